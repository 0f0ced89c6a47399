"""A real server with keys, TLS, an admin port and Unix sockets."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from penstock.serving.listeners import listen_unix
from tests.certificates import Authority, needs_openssl
from tests.e2e.server import API, Server, serving
from tests.waiting import PATIENCE_S

ROUTE = "/v1/embeddings"
BODY = {"input": "a"}
KEYS = """
- {name: alice, key: s3cret-of-alice}
- {name: slow, key: s3cret-of-slow, max_tokens_per_second: 0.1}
"""
SECRETS = (
    "s3cret-of-alice",
    "s3cret-of-slow",
    "s3cret-of-carol",
    "s3cret-flag",
    "s3cret-admin",
    "s3cret-tls",
)


@dataclass
class Guarded:
    server: Server
    folder: Path
    context: ssl.SSLContext

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server.port}"

    @property
    def admin_url(self) -> str:
        found = re.search(r"operation routes are at ([^\s\",]+)", "".join(self.server.log))
        assert found is not None
        return found[1]

    def ask(self, path: str, key: str | None = None, *, admin: bool = False) -> httpx.Response:
        """Send a request on a new connection, which may reach either API process."""
        url = (self.admin_url if admin else self.url) + path
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        with httpx.Client(verify=self.context, timeout=PATIENCE_S, headers=headers) as http:
            return http.post(url, json=BODY) if path.endswith(ROUTE) else http.get(url)

    def always(self, path: str, key: str, status: int) -> bool:
        """Whether several new connections get this status. They are enough to reach both API processes."""
        return all(self.ask(path, key).status_code == status for _ in range(8))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority(folder)
    certificate, key = authority.sign("server", password="s3cret-tls")
    for name, text in (("keys.yaml", KEYS), ("admin", "s3cret-admin\n"), ("password", "s3cret-tls\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    flags = (
        *("--device", "null", "--api-server-count", "2", "--root-path", "/below", "--admin-port", "0"),
        *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)),
        *("--ssl-keyfile-password-file", str(folder / "password"), "--api-key", "s3cret-flag"),
        *("--api-key-file", str(folder / "keys.yaml"), "--admin-key-file", str(folder / "admin")),
        *("--log-level", "debug", "--access-log"),
    )
    context = ssl.create_default_context(cafile=str(authority.certificate))
    with serving(*flags) as server:
        server.wait_for_log("operation routes are at https://")
        yield Guarded(server, folder, context)


@needs_openssl
class TestGuarded:
    def test_every_key_opens_the_routes_over_tls_below_the_root_path(self, guarded: Guarded) -> None:
        for key in ("s3cret-of-alice", "s3cret-flag", "s3cret-admin"):
            for path in (ROUTE, f"/below{ROUTE}"):
                assert guarded.ask(path, key).status_code == 200
        assert guarded.ask(ROUTE, "s3cret").status_code == guarded.ask(ROUTE).status_code == 401

    def test_operation_routes_are_on_the_admin_port(self, guarded: Guarded) -> None:
        for path in ("/metrics", "/version", "/server_info"):
            assert guarded.ask(path, "s3cret-flag").status_code == 404
            assert guarded.ask(path, "s3cret-flag", admin=True).status_code == 200
        for path in ("/live", "/ready", "/health"):
            assert guarded.ask(path).status_code == guarded.ask(path, admin=True).status_code == 200
        assert guarded.ask(ROUTE, "s3cret-admin", admin=True).status_code == 404

    def test_the_limit_of_a_key_holds_for_all_processes_together(self, guarded: Guarded) -> None:
        answers = [guarded.ask(ROUTE, "s3cret-of-slow") for _ in range(12)]
        assert [each.status_code for each in answers] == [200] + 11 * [429]
        assert all(int(each.headers["retry-after"]) > 1 for each in answers[1:])

    def test_keys_are_replaced_while_the_server_runs(self, guarded: Guarded) -> None:
        file, server = guarded.folder / "keys.yaml", guarded.server
        file.write_text("- {name: broken, key: s3cret-of-carol, what: 1}\n")
        server.wait_for_log("its last keys stay valid")
        assert guarded.always(ROUTE, "s3cret-of-alice", 200)
        file.write_text("- {name: carol, key: s3cret-of-carol}\n")
        server.wait_for(lambda: guarded.always(ROUTE, "s3cret-of-carol", 200))
        server.wait_for(lambda: guarded.always(ROUTE, "s3cret-of-alice", 401))
        file.write_text(KEYS)
        server.wait_for(lambda: guarded.always(ROUTE, "s3cret-of-alice", 200))

    def test_a_renewed_certificate_is_used_without_a_restart(self, guarded: Guarded, tmp_path: Path) -> None:
        other = Authority(tmp_path, "another")
        certificate, key = other.sign("renewed", password="s3cret-tls")
        shutil.copy(certificate, guarded.folder / "server.crt")
        shutil.copy(key, guarded.folder / "server.key")
        trusting = ssl.create_default_context(cafile=str(other.certificate))

        def is_renewed() -> bool:
            try:
                return httpx.get(f"{guarded.url}/live", verify=trusting).status_code == 200
            except httpx.TransportError:
                return False

        guarded.server.wait_for(lambda: all(is_renewed() for _ in range(6)))
        guarded.context.load_verify_locations(str(other.certificate))

    def test_no_secret_is_seen_from_outside(self, guarded: Guarded) -> None:
        server = guarded.server
        assert guarded.ask(ROUTE, "s3cret-flag").status_code == 200
        shown = [guarded.ask(path, "s3cret-admin", admin=True).text for path in ("/metrics", "/server_info")]
        shown += [
            guarded.ask(path, "s3cret-flag").text for path in ("/openapi.json", "/v1/models", "/nowhere")
        ]
        shown += [guarded.ask(ROUTE, f"{secret}x").text for secret in SECRETS]
        for pid in (server.process.pid, *server.children(API), *server.engines()):
            shown.append(Path(f"/proc/{pid}/cmdline").read_text())
        for pid in (*server.children(API), *server.engines()):
            shown.append(Path(f"/proc/{pid}/environ").read_text())
        shown += list(server.log)
        assert 'penstock_key_requests_total{key="api-key-1"}' in shown[0]
        for secret in SECRETS:
            assert not [text for text in shown if secret in text], secret


def test_a_server_listens_on_a_unix_socket_and_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "penstock.sock"
    listen_unix(str(path), 0o600).close()  # the socket file of a dead server
    environment = {**os.environ, "PENSTOCK_API_KEY": "first,second"}
    with serving(
        "--device", "null", "--uds", str(path), "--admin-port", "0", environment=environment
    ) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for pid in (*server.children(API), *server.engines()):
            assert "first,second" not in Path(f"/proc/{pid}/environ").read_text()
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.example"
        ) as http:
            for key, status in (("first", 200), ("second", 200), ("first,second", 401)):
                assert http.post(ROUTE, json=BODY, headers={"X-Api-Key": key}).status_code == status
        assert server.terminate() == 0
    assert not path.exists()

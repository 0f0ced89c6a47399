"""TLS: which files are accepted, how clients authenticate, and how certificates are renewed."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api.http_server import Door, HttpServer
from penstock.api.process import http_config
from penstock.api.state import ServerState
from penstock.api.tls import ServerTls, server_context
from penstock.cli.protection import check_protection
from penstock.config import ServerConfig
from penstock.errors import ConfigError
from tests.certificates import Authority, needs_openssl
from tests.waiting import PATIENCE_S, wait_until

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> tuple[Path, Path]:
    return authority.sign("server")


@pytest.fixture(scope="module")
def locked_key(authority: Authority) -> tuple[Path, Path]:
    return authority.sign("locked", password="pass-word")


@contextmanager
def tls_server(**config: Any) -> Iterator[tuple[str, ServerTls]]:
    """Serve TLS from a thread; yield the address and the certificates."""
    state = ServerState(ServerConfig(**config), {})
    tls = ServerTls(state.config)
    listener = socket.create_server(("127.0.0.1", 0))
    uvicorn_config = http_config(state, listener)
    server = HttpServer(uvicorn_config, [Door(listener, uvicorn_config.app, None, tls.context)], 20.0)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}", tls
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()


def trusting(authority: Authority, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if client is not None:
        context.load_cert_chain(*client)
    return context


def shown_by(url: str, context: ssl.SSLContext) -> str:
    """The name in the certificate that the server sends on a new connection."""
    address = httpx.URL(url)
    with (
        socket.create_connection((address.host, address.port or 0), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        subject: Any = secure.getpeercert()
        return str(dict(pair for part in subject["subject"] for pair in part)["commonName"])


def test_answers_errors_and_large_bodies_travel_over_tls(
    authority: Authority, files: tuple[Path, Path]
) -> None:
    certificate, key = map(str, files)
    with (
        tls_server(ssl_certfile=certificate, ssl_keyfile=key, max_body_bytes=1000) as (url, _),
        httpx.Client(base_url=url, verify=trusting(authority), timeout=PATIENCE_S) as http,
    ):
        assert http.get("/live").json() == {"status": "alive"}
        refused = http.post("/v1/embeddings", content=b"x" * 2_000_000)
        assert refused.status_code == 413
        assert http.get("/live").status_code == 200
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port or 0), PATIENCE_S) as plain:
            plain.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"alive" not in plain.recv(1000)
        context = trusting(authority)
        with (
            socket.create_connection((address.host, address.port or 0), PATIENCE_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            assert secure.version() in ("TLSv1.2", "TLSv1.3")
            secure.sendall(b"this is not HTTP\r\n\r\n")
            assert secure.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_a_client_without_a_certificate_is_refused_where_one_is_required(
    tmp_path: Path, authority: Authority, files: tuple[Path, Path]
) -> None:
    certificate, key = map(str, files)
    config = {"ssl_ca_certs": str(authority.certificate), "ssl_cert_reqs": "required"}
    with tls_server(ssl_certfile=certificate, ssl_keyfile=key, **config) as (url, _):
        known = trusting(authority, authority.sign("client"))
        assert httpx.get(f"{url}/live", verify=known).status_code == 200
        other = Authority(tmp_path, "other")
        for context in (trusting(authority), trusting(authority, other.sign("client"))):
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                httpx.get(f"{url}/live", verify=context)


def test_a_renewed_certificate_is_shown_and_a_damaged_one_is_not(
    tmp_path: Path, authority: Authority, files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = tmp_path / "own.crt", tmp_path / "own.key"
    for source, target in zip(files, (certificate, key), strict=True):
        shutil.copy(source, target)
    with tls_server(ssl_certfile=str(certificate), ssl_keyfile=str(key)) as (url, tls):
        context = trusting(authority)
        assert shown_by(url, context) == "server"
        renewed = authority.sign("renewed")
        shutil.copy(renewed[0], certificate)  # the matching key is copied later
        tls.reload()
        assert shown_by(url, context) == "server" and "does not belong to the certificate" in caplog.text
        shutil.copy(renewed[1], key)
        tls.reload()
        assert shown_by(url, context) == "renewed"
        no_name = trusting(authority)
        no_name.check_hostname = False
        with (
            socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), PATIENCE_S) as plain,
            no_name.wrap_socket(plain) as secure,  # a client without a host name (no SNI)
        ):
            assert "renewed" in str(secure.getpeercert())


def test_the_key_of_a_certificate_may_have_a_password(tmp_path: Path, locked_key: tuple[Path, Path]) -> None:
    certificate, key = map(str, locked_key)
    file = tmp_path / "password"
    file.write_text("pass-word\n")
    for given in ({"ssl_keyfile_password": "pass-word"}, {"ssl_keyfile_password_file": str(file)}):
        server_context(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, **given))  # type: ignore[arg-type]
    for password, words in ((None, "set PENSTOCK_SSL_KEYFILE_PASSWORD"), ("pass-w0rd", "password is wrong")):
        config = ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_keyfile_password=password)
        with pytest.raises(ConfigError, match=words) as refused:
            server_context(config)
        assert "pass-w" not in refused.value.message


def test_files_and_flags_that_cannot_work_are_named(
    tmp_path: Path, authority: Authority, files: tuple[Path, Path], locked_key: tuple[Path, Path]
) -> None:
    certificate, key = map(str, files)
    junk = tmp_path / "junk"
    junk.write_text("no certificate")
    damaged = tmp_path / "damaged"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nabcd\n-----END CERTIFICATE-----\n")
    whole = {"ssl_certfile": certificate, "ssl_keyfile": key}
    cases: list[tuple[dict[str, Any], str]] = [
        ({**whole, "ssl_certfile": "/nowhere"}, "--ssl-certfile '/nowhere' cannot be used: No such file"),
        ({**whole, "ssl_certfile": str(junk)}, "it has no certificate in PEM format"),
        ({**whole, "ssl_certfile": str(damaged)}, "the certificate or its key is damaged"),
        ({**whole, "ssl_keyfile": str(junk)}, "--ssl-keyfile .* it has no private key in PEM format"),
        ({"ssl_certfile": certificate}, "it has no private key"),
        ({**whole, "ssl_certfile": str(locked_key[0])}, "does not belong to the certificate"),
        ({"ssl_keyfile": key}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_cert_reqs": "required"}, "--ssl-cert-reqs needs --ssl-certfile"),
        ({**whole, "ssl_cert_reqs": "required"}, "needs --ssl-ca-certs"),
        ({**whole, "ssl_ca_certs": certificate}, "checks nobody without --ssl-cert-reqs"),
        (
            {**whole, "ssl_cert_reqs": "optional", "ssl_ca_certs": str(junk)},
            "--ssl-ca-certs .* no certificate",
        ),
        ({**whole, "ssl_ciphers": "NONSENSE"}, "--ssl-ciphers"),
        ({"admin_host": "127.0.0.1"}, "--admin-host needs --admin-port"),
        ({"uds_permissions": 0o660}, "--uds-permissions needs --uds"),
    ]
    for config, words in cases:
        with pytest.raises(ConfigError, match=words):
            check_protection(ServerConfig(**config))
    check_protection(ServerConfig(**whole))

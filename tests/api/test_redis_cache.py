"""Results in Redis are shared between processes, are checked when read, and never delay a request."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api import redis_cache
from penstock.api.app import build_app
from penstock.api.redis_cache import MAX_FAILURES, PAUSE_S, CircuitBreaker
from penstock.checkpoint.revision import loaded_revision
from tests.api.local_app import CountingClient, local_state
from tests.checkpoints import BERT_CONFIG, bert_tensors, write_bert
from tests.waiting import PATIENCE_S, wait_until

redis = pytest.importorskip("redis", reason="needs the redis package")
PROGRAM = shutil.which("redis-server")
PASSWORD = "pass word"
TEXTS = ["the long water", "people write many words", "oil"]
needs_server = pytest.mark.skipif(PROGRAM is None, reason="needs redis-server")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the lookup timeout, so that a busy machine does not look like a slow Redis."""
    monkeypatch.setattr(redis_cache, "LOOKUP_TIMEOUT_S", PATIENCE_S)


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server for these tests, on a Unix socket."""
    folder = tmp_path_factory.mktemp("redis")
    path = folder / "s"
    options = {
        "port": "0",
        "unixsocket": str(path),
        "save": "",
        "dir": str(folder),
        "requirepass": PASSWORD,
    }
    command = [str(PROGRAM), *(word for name, value in options.items() for word in (f"--{name}", value))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(path.exists)
            yield str(path)
        finally:
            process.terminate()


@pytest.fixture
def database(socket_path: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the emptied database. Servers read the password from their environment."""
    monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", PASSWORD)
    with redis.Redis(unix_socket_path=socket_path, password=PASSWORD) as client:
        client.flushall()
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


class LoadedClient(CountingClient):
    """An engine client whose revision is that of the loaded files."""

    revision = ""
    engine_settings: dict[str, Any] = {}


class Served:
    """A server with a result cache, as in a process of its own."""

    def __init__(self, folder: Path, url: str, **server: Any) -> None:
        self._state = local_state(folder, client=LoadedClient, server={"result_cache_redis": url, **server})

    def __enter__(self) -> Served:
        self.state, self.engine = self._state.__enter__()
        spec = self.state.models["model"].spec
        self.engine.revision = loaded_revision(spec, {})  # type: ignore[attr-defined]
        self.http = TestClient(build_app(self.state)).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.http.__exit__(None, None, None)
        self._state.__exit__(None, None, None)

    @property
    def store(self) -> redis_cache.RedisStore:
        assert self.state.result_cache is not None and self.state.result_cache.redis is not None
        return self.state.result_cache.redis

    def embed(self, *texts: str) -> tuple[list[str], int]:
        answer = self.http.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
        assert answer.status_code == 200, answer.text
        return [row["embedding"] for row in answer.json()["data"]], int(answer.headers["x-cache-hits"])

    def settle(self) -> None:
        """Wait until the model's revision is known and all rows are written."""
        assert self.http.portal is not None
        self.http.portal.call(self.store.settled)

    def warm(self) -> None:
        """Compute the model's revision. Until it is known, the cache is neither read nor written."""
        self.embed("warm-up")
        self.settle()


@needs_server
def test_servers_share_results(folder: Path, socket_path: str, database: Any) -> None:
    url = f"unix://{socket_path}"
    with Served(folder, url) as first:
        first.warm()
        database.flushall()
        vectors, hits = first.embed(*TEXTS)
        first.settle()
        assert hits == 0 and database.dbsize() == 3
        assert 0 < database.ttl(database.keys()[0]) <= 86_400
    with Served(folder, url, result_cache_mb=1, result_cache_ttl_s=0.0) as second:
        second.warm()
        second.engine.requests.clear()
        assert second.embed(*TEXTS) == (vectors, 3) and not second.engine.requests
        database.flushall()
        assert second.embed(*TEXTS) == (vectors, 3)  # from the in-memory store
        second.embed(*TEXTS, "see how they look")
        second.settle()
        (key,) = database.keys()
        assert database.ttl(key) == -1


@needs_server
def test_other_weights_under_the_same_name_share_nothing(
    tmp_path: Path, socket_path: str, database: Any
) -> None:
    url, folder = f"unix://{socket_path}", write_bert(tmp_path)
    with Served(folder, url) as first:
        first.warm()
        old, _ = first.embed(*TEXTS)
        first.settle()
    write_bert(folder, tensors=bert_tensors(BERT_CONFIG, seed=1))
    with Served(folder, url) as second:
        second.warm()
        new, hits = second.embed(*TEXTS)
        assert hits == 0 and new != old


@needs_server
def test_a_secret_keeps_others_from_reading_and_from_writing_results(
    folder: Path, socket_path: str, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"unix://{socket_path}"
    with Served(folder, url) as open_server:
        open_server.warm()
        vectors, _ = open_server.embed(*TEXTS)
        open_server.settle()
    monkeypatch.setenv("PENSTOCK_RESULT_CACHE_SECRET", "s" * 100)
    for hits in (0, 3):
        with Served(folder, url) as closed:
            closed.warm()
            assert closed.embed(*TEXTS) == (vectors, hits)
            closed.settle()


@needs_server
@pytest.mark.parametrize("value", [b"", b"x" * 15, b"x" * 500, None], ids=["empty", "short", "other", "list"])
def test_what_is_no_row_is_a_miss(folder: Path, socket_path: str, database: Any, value: bytes | None) -> None:
    with Served(folder, f"unix://{socket_path}") as served:
        served.warm()
        vectors, _ = served.embed(*TEXTS)
        served.settle()
        for key in database.scan_iter():
            database.delete(key)
            _ = database.rpush(key, "a") if value is None else database.set(key, value)
        assert served.embed(*TEXTS) == (vectors, 0)
        served.settle()
        assert served.embed(*TEXTS) == (vectors, 3)


@needs_server
def test_rows_of_another_shape_are_a_miss(folder: Path, socket_path: str, database: Any) -> None:
    with Served(folder, f"unix://{socket_path}") as served:
        served.warm()
        vectors, _ = served.embed(*TEXTS)
        served.settle()
        narrow = redis_cache.CachedRow((("<f4", (3,)),), (bytes(12),))
        for key in database.scan_iter():
            database.set(key, redis_cache.encode_row(narrow, key))
        assert served.embed(*TEXTS) == (vectors, 0)


@needs_server
def test_a_wrong_password_fails_no_request(
    folder: Path, socket_path: str, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", "wrong")
    with Served(folder, f"unix://{socket_path}") as served:
        served.warm()
        assert [served.embed(*TEXTS)[1] for _ in range(4)] == [0] * 4
        served.settle()
    assert database.dbsize() == 0


def test_a_redis_that_is_not_there_fails_no_request(folder: Path, tmp_path: Path) -> None:
    with Served(folder, f"unix://{tmp_path}/nothing") as served:
        served.warm()
        vectors, _ = served.embed(*TEXTS)
        assert served.embed(*TEXTS) == (vectors, 0)
        for _ in range(MAX_FAILURES):
            served.embed(*TEXTS)
        assert served.store.breaker.is_open
        assert served.embed(*TEXTS) == (vectors, 0)


def test_a_redis_that_never_answers_fails_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_cache, "LOOKUP_TIMEOUT_S", 0.01)
    monkeypatch.setattr(redis_cache, "WRITE_TIMEOUT_S", 0.01)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with Served(folder, f"redis://127.0.0.1:{silent.getsockname()[1]}") as served:
            served.warm()
            for _ in range(MAX_FAILURES + 1):
                assert served.embed(*TEXTS)[1] == 0
            assert served.store.breaker.is_open


def test_rows_that_redis_takes_too_slowly_are_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_cache, "MAX_PENDING_BYTES", 200)
    monkeypatch.setattr(redis_cache.RedisStore, "_mget", _nothing)
    with Served(folder, "redis://127.0.0.1:1") as served:
        served.warm()
        monkeypatch.setattr(redis_cache.RedisStore, "_write", lambda *_: asyncio.Event().wait())
        for _ in range(3):
            served.embed(*TEXTS)
        assert served.store._pending_bytes <= 200


async def _nothing(store: Any, names: list[bytes]) -> list[bytes | None]:
    return [None] * len(names)


def test_requests_of_the_same_moment_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[bytes]] = []

    async def mget(store: Any, names: list[bytes]) -> list[bytes | None]:
        commands.append(names)
        await asyncio.sleep(0)
        return [name * 2 for name in names]

    monkeypatch.setattr(redis_cache.RedisStore, "_mget", mget)

    async def read() -> list[Any]:
        store = redis_cache.RedisStore("redis://127.0.0.1:1")
        return await asyncio.gather(*(store._read([b"%d" % number, b"x"]) for number in range(3)))

    assert asyncio.run(read()) == [[b"00", b"xx"], [b"11", b"xx"], [b"22", b"xx"]]
    assert len(commands) == 1


def test_a_store_is_left_alone_after_failures_and_tried_again() -> None:
    now_s = 100.0
    breaker = CircuitBreaker(lambda: now_s)
    for _ in range(MAX_FAILURES - 1):
        breaker.on_failure(OSError("lost"))
    breaker.on_success()
    for _ in range(MAX_FAILURES):
        assert not breaker.is_open
        breaker.on_failure(OSError("lost"))
    assert breaker.is_open
    now_s += PAUSE_S
    assert not breaker.is_open
    breaker.on_failure(OSError("lost"))  # one more failure opens the breaker again
    assert breaker.is_open
    now_s += PAUSE_S
    breaker.on_success()
    breaker.on_failure(OSError("lost"))
    assert not breaker.is_open


def test_large_results_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_cache, "MAX_READ_BYTES", 1)
    monkeypatch.setattr(redis_cache.RedisStore, "_read", None)
    with Served(folder, "redis://127.0.0.1:1") as served:
        served.warm()
        assert served.embed(*TEXTS)[1] == 0


def test_nothing_is_kept_of_files_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_cache.RedisStore, "_read", None)
    with Served(write_bert(tmp_path), "redis://127.0.0.1:1") as served:
        write_bert(tmp_path, tensors=bert_tensors(BERT_CONFIG, seed=1))
        served.warm()
        assert served.embed(*TEXTS)[1] == 0
        assert not served.store._pending

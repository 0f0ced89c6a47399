"""Connections under attack: each limit holds, the offending client gets an answer, and others are served."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from penstock.api.body import PIECE_BYTES
from penstock.api.connections import MAX_PIPELINED
from penstock.api.state import ServerState
from tests.api.scripted_app import listening, make_state, server_thread
from tests.text_models import ScriptedEngine, write_text_model
from tests.waiting import PATIENCE_S, wait_until

ROUTE = "/v1/completions"
BODY = json.dumps({"prompt": "find", "max_tokens": 3}).encode()
SLOW = {"header_timeout_s": 0.2, "body_timeout_s": 0.2, "idle_timeout_s": 0.2, "write_timeout_s": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, copy: [5, 6, 7])


@pytest.fixture(scope="module")
def plain_url(folder: Path) -> Iterator[str]:
    """A shared server with small limits on headers and one allowed host."""
    limits = {"max_header_bytes": 4096, "max_headers": 20, "max_url_bytes": 500, "max_body_bytes": 100_000}
    engine = ScriptedEngine(lambda prompt, copy: [5, 6, 7])
    with serving(folder, engine, **limits, allowed_hosts=("mine.example",), access_log=True) as (url, _):
        yield url


class Client:
    """A raw client that can send any bytes."""

    def __init__(self, url: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), PATIENCE_S)

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError:
            pass  # the server closed the connection; its answer tells more

    def head(self, method: str = "POST", path: str = ROUTE, **headers: object) -> None:
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in {"host": "x", **headers}.items()]
        self.send("\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode())

    def post(self, body: bytes = BODY, **headers: object) -> None:
        self.head(content_length=len(body), **headers)
        self.send(body)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Read the status, headers and body of one answer."""
        with self.socket.makefile("rb") as file:
            status = int(file.readline().split()[1])
            headers: dict[str, str] = {}
            while line := file.readline().strip():
                name, _, value = line.decode().partition(":")
                headers[name] = value.strip()
            return status, headers, file.read(int(headers.get("content-length", 0)))

    def error(self) -> tuple[int, dict[str, Any]]:
        status, headers, body = self.answer()
        assert headers["content-type"] == "application/json"
        return status, json.loads(body)["error"]

    def rest(self) -> bytes:
        """Read everything until the server closes the connection."""
        parts = []
        try:
            while part := self.socket.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)

    def close(self) -> None:
        self.socket.close()


Connect = Callable[[str], Client]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as stack:

        def make(url: str) -> Client:
            client = Client(url)
            stack.callback(client.close)
            return client

        yield make


@contextmanager
def serving(folder: Path, engine: ScriptedEngine, **server: Any) -> Iterator[tuple[str, ServerState]]:
    state = make_state(folder, engine, {"drain_s": 0.1, **server})
    with listening(state) as url:
        yield url, state


def limits_met(url: str, limit: str) -> float:
    """How often a limit was met. The server updates metrics shortly after the answer."""
    text = httpx.get(f"{url}/metrics").text
    name = f'penstock_connection_limits_total{{limit="{limit}"}}'
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def access_line(caplog: pytest.LogCaptureFixture, client: Client) -> logging.LogRecord:
    """The only access log line of a client. The server writes it after the answer, and lines of other tests'
    clients may come in between."""
    assert client.answer()[0]
    address = ":".join(map(str, client.socket.getsockname()))

    def lines() -> list[logging.LogRecord]:
        records = [record for record in caplog.records if record.name == "penstock.access"]
        return [record for record in records if vars(record)["fields"].get("address") == address]

    wait_until(lines)
    (record,) = lines()
    return record


def ask(url: str) -> int:
    return httpx.post(url + ROUTE, content=BODY, timeout=PATIENCE_S).status_code


class TestHeaders:
    @pytest.mark.parametrize(
        ("sent", "status", "limit"),
        [
            (b"GET / HTTP/1.1\r\nx: " + b"a" * 600_000, 431, "header_bytes"),  # an endless header
            (b"GET / HTTP/1.1\r\nx: " + b"a" * 5000 + b"\r\n\r\n", 431, "header_bytes"),
            (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 30 + b"\r\n", 431, "headers"),
            (b"GET /" + b"a" * 1000 + b" HTTP/1.1\r\n\r\n", 414, "url_bytes"),
            (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, "syntax"),
            (b"not http at all\r\n\r\n", 400, "syntax"),
            (b"GET / HTTP/1.1\r\nbad\x01name: y\r\n\r\n", 400, "syntax"),
            (b"POST /score HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400, "syntax"),
        ],
    )
    def test_headers_beyond_a_limit_get_a_typed_error_and_the_end(
        self, plain_url: str, connect: Connect, sent: bytes, status: int, limit: str
    ) -> None:
        before = limits_met(plain_url, limit)
        client = connect(plain_url)
        client.send(sent)
        got, error = client.error()
        assert got == status and error["message"] and client.rest() == b""
        wait_until(lambda: limits_met(plain_url, limit) == before + 1)

    def test_trailers_and_chunk_extensions_are_bounded(self, plain_url: str, connect: Connect) -> None:
        for tail in (b"0\r\nx: " + b"a" * 900_000, b"1;" + b"a" * 900_000):
            client = connect(plain_url)
            client.head(transfer_encoding="chunked")
            client.send(tail)
            assert client.error()[0] == 431

    def test_a_request_after_one_that_cannot_be_parsed_waits_for_the_first_answer(
        self, plain_url: str, connect: Connect
    ) -> None:
        client = connect(plain_url)
        client.send(b"GET /health HTTP/1.1\r\n\r\nGET /version HTTP/1.1\r\n\r\nnonsense\r\n\r\n")
        text = client.rest()
        assert [part[:3] for part in text.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]

    def test_more_pipelined_requests_than_allowed_are_refused_after_the_others(
        self, plain_url: str, connect: Connect
    ) -> None:
        client = connect(plain_url)
        client.send(b"GET /health HTTP/1.1\r\n\r\n" * (MAX_PIPELINED + 20))
        statuses = [part[:3] for part in client.rest().split(b"HTTP/1.1 ")[1:]]
        assert statuses[:-1] == [b"200"] * (MAX_PIPELINED + 1)


class TestTime:
    def test_a_client_that_sends_slowly_gets_408_and_an_idle_one_is_closed(
        self, folder: Path, engine: ScriptedEngine, connect: Connect
    ) -> None:
        with serving(folder, engine, **SLOW, min_body_rate=1_000_000) as (url, state):
            silent, headers, body = connect(url), connect(url), connect(url)
            headers.send(b"POST / HTTP/1.1\r\nhost")
            body.head(content_length=100)
            body.send(b'{"prompt"')
            assert silent.rest() == b""
            for client in (headers, body):
                status, error = client.error()
                assert status == 408 and error["reason"] == "read_timeout" and client.rest() == b""
            for limit in ("header_timeout", "body_timeout", "idle_timeout"):
                wait_until(lambda limit=limit: limits_met(url, limit))
            # The metrics' own answer may still be in a buffer.
            wait_until(lambda: state.in_flight == 0 and state.buffered.held == 0)

    def test_a_slow_body_gets_the_shape_of_its_dialect(
        self, folder: Path, engine: ScriptedEngine, connect: Connect
    ) -> None:
        with serving(folder, engine, **SLOW) as (url, _):
            client = connect(url)
            client.head(path="/v2/rerank", content_length=100)
            status, _, body = client.answer()
            assert status == 408 and set(json.loads(body)) == {"message"}

    def test_a_body_that_keeps_its_rate_may_take_longer_than_the_timeout(
        self, folder: Path, engine: ScriptedEngine, connect: Connect
    ) -> None:
        with serving(folder, engine, body_timeout_s=0.2, min_body_rate=1) as (url, _):
            client, other = connect(url), connect(url)
            client.head(content_length=len(BODY))
            client.send(BODY[:-1])
            other.head(content_length=len(BODY))
            assert other.error()[0] == 408  # the first client's bytes extend its own time limit
            client.send(BODY[-1:])
            assert client.answer()[0] == 200

    def test_a_client_that_does_not_read_is_disconnected(
        self, folder: Path, engine: ScriptedEngine, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import penstock.api.dialects.pages as pages

        monkeypatch.setattr(pages, "page", lambda name: bytes(64_000_000))
        with serving(folder, engine, write_timeout_s=0.2) as (url, state):
            client = connect(url)
            client.head("GET", "/docs")
            wait_until(lambda: state.buffered.held == 64_000_000)
            wait_until(lambda: limits_met(url, "write_timeout"))
            wait_until(lambda: state.buffered.held == 0)
            assert ask(url) == 200


class TestBytes:
    def test_half_sent_bodies_hold_no_place_among_the_requests(
        self, folder: Path, engine: ScriptedEngine, connect: Connect
    ) -> None:
        with serving(folder, engine, max_concurrent_requests=1) as (url, state):
            for _ in range(100):
                client = connect(url)
                client.head(content_length=1000)
                client.send(b"{")
            wait_until(lambda: state.buffered.held == 100)
            assert ask(url) == 200

    def test_bodies_beyond_the_bytes_in_all_get_503_and_small_ones_are_read(
        self, folder: Path, engine: ScriptedEngine, connect: Connect
    ) -> None:
        with serving(folder, engine, max_buffered_bytes=1_000_000) as (url, state):
            holder, refused = connect(url), connect(url)
            holder.head(content_length=2_000_000)
            holder.send(bytes(950_000))
            wait_until(lambda: state.buffered.held == 950_000)
            refused.head(content_length=200_000)
            refused.send(bytes(199_000))
            status, headers, body = refused.answer()
            assert status == 503 and int(headers["retry-after"]) >= 1
            assert json.loads(body)["error"]["reason"] == "server_full"
            assert ask(url) == 200
            holder.close()
            wait_until(lambda: state.buffered.held == 0)
            wait_until(lambda: limits_met(url, "buffered_bytes"))

    def test_a_body_in_many_pieces_arrives_whole_and_one_too_large_gets_413(
        self, folder: Path, engine: ScriptedEngine, connect: Connect
    ) -> None:
        with serving(folder, engine, max_body_bytes=100_000) as (url, state):
            client = connect(url)
            client.head(transfer_encoding="chunked")
            for byte in BODY:
                client.send(b"1\r\n%c\r\n" % byte)
            client.send(b"0\r\n\r\n")
            assert client.answer()[0] == 200
            client.head(transfer_encoding="chunked")
            client.send(b"2000\r\n" + bytes(0x2000) + b"\r\n")
            client.send(b"20000\r\n" + bytes(0x20000) + b"\r\n0\r\n\r\n")
            assert client.error()[0] == 413
            client.post()
            assert client.answer()[0] == 200  # the server read and dropped the rest of the body
            wait_until(lambda: state.buffered.held == 0)

    def test_a_large_answer_beyond_the_bytes_in_all_gets_503(
        self, folder: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import penstock.api.dialects.pages as pages

        monkeypatch.setattr(pages, "page", lambda name: bytes(2_000_000))
        with serving(folder, engine, max_buffered_bytes=1_000_000) as (url, _):
            assert httpx.get(f"{url}/docs").status_code == 503
            assert httpx.head(f"{url}/health").status_code == 200

    def test_large_metrics_are_shown_while_clients_hold_all_bytes(
        self, folder: Path, engine: ScriptedEngine, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import penstock.api.dialects.operation as operation

        size = 2 * PIECE_BYTES
        monkeypatch.setattr(operation, "render", lambda *_: bytes(size))
        with serving(folder, engine, max_buffered_bytes=8 * size) as (url, state):
            holder, second = connect(url), connect(url)
            holder.head(content_length=20 * size)
            holder.send(bytes(8 * size - 100))
            wait_until(lambda: state.buffered.held == 8 * size - 100)
            assert len(httpx.get(f"{url}/metrics").content) == size
            second.head(content_length=1000)
            second.send(bytes(900))  # bodies up to `ALWAYS_READ_BYTES` are always read
            wait_until(lambda: state.buffered.held == 8 * size + 800)
            assert httpx.get(f"{url}/metrics").status_code == 503

    def test_a_large_answer_arrives_whole(
        self, folder: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import penstock.api.dialects.pages as pages

        content = bytes(range(256)) * 8000
        monkeypatch.setattr(pages, "page", lambda name: content)
        with serving(folder, engine) as (url, _):
            assert httpx.get(f"{url}/docs").content == content
            assert httpx.head(f"{url}/docs").headers["content-length"] == str(len(content))


class TestConnections:
    def test_connections_beyond_the_limit_are_told_so_and_closed(
        self, folder: Path, engine: ScriptedEngine, connect: Connect
    ) -> None:
        with serving(folder, engine, max_connections=2) as (url, _):
            first, second = connect(url), connect(url)
            for client in (first, second):
                client.post()
                assert client.answer()[0] == 200
            third = connect(url)
            status, headers, body = third.answer()
            assert status == 503 and headers["connection"] == "close" and "retry-after" in headers
            assert b"--max-connections" in body and third.rest() == b""
            first.close()
            wait_until(lambda: _accepted(url))

    def test_connections_of_one_address_are_limited_except_on_loopback(
        self,
        folder: Path,
        engine: ScriptedEngine,
        connect: Connect,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with serving(folder, engine, max_connections_per_address=1) as (url, _):
            local = [connect(url) for _ in range(3)]
            for client in local:
                client.post()
                assert client.answer()[0] == 200
            monkeypatch.setattr("penstock.api.connection_table.is_loopback", lambda address: False)
            remote = connect(url)
            remote.post()
            assert remote.answer()[0] == 200
            other = connect(url)
            status, _, body = other.answer()
            assert status == 503 and b"--max-connections-per-address" in body
            remote.close()
            wait_until(lambda: _accepted(url))


def _accepted(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


class TestHalfClosed:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_only_ends_its_own_side_gets_its_answer(
        self, folder: Path, engine: ScriptedEngine, connect: Connect, stream: bool
    ) -> None:
        engine.pause = asyncio.Event()
        body = json.dumps({"prompt": "find", "max_tokens": 3, "stream": stream}).encode()
        with serving(folder, engine) as (url, _):
            client = connect(url)
            client.post(body)
            wait_until(lambda: engine.open == 1)
            client.socket.shutdown(socket.SHUT_WR)
            begun = b"data: " if stream else b"HTTP/1.1 "
            text = b""
            while begun not in text:
                text += client.socket.recv(65536)
            assert engine.open == 1
            engine.resume()
            text += client.rest()
            assert text.startswith(b"HTTP/1.1 200 OK\r\n") and text.count(b"HTTP/1.1") == 1
            assert (b"data: [DONE]" if stream else b'"finish_reason"') in text and not engine.cancelled

    def test_a_stream_that_is_probed_stays_well_formed(
        self, folder: Path, engine: ScriptedEngine, connect: Connect
    ) -> None:
        engine.pause = asyncio.Event()
        body = json.dumps({"prompt": "find", "max_tokens": 3, "stream": True}).encode()
        with serving(folder, engine) as (url, _):
            client = connect(url)
            client.post(body)
            text = b""
            while b"data: " not in text:
                text += client.socket.recv(65536)
            client.socket.shutdown(socket.SHUT_WR)
            text += client.socket.recv(1)
            engine.resume()
            text += client.rest()
            assert _dechunked(text.partition(b"\r\n\r\n")[2]).endswith(b"data: [DONE]\n\n")

    def test_pipelined_requests_before_the_end_are_all_answered(
        self, plain_url: str, connect: Connect
    ) -> None:
        client = connect(plain_url)
        client.send(b"GET /health HTTP/1.1\r\n\r\n" * 5)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.rest().count(b"HTTP/1.1 200 OK\r\n") == 5

    @pytest.mark.parametrize("sent", [b"GET /he", b"POST /score HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"])
    def test_half_a_request_gets_400(self, plain_url: str, connect: Connect, sent: bytes) -> None:
        client = connect(plain_url)
        client.send(sent)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.error()[0] == 400

    def test_a_client_that_disconnects_cancels_its_work_though_others_wait_behind_it(
        self, folder: Path, engine: ScriptedEngine, connect: Connect
    ) -> None:
        engine.pause = asyncio.Event()
        with serving(folder, engine) as (url, state):
            for number in range(3):
                client = connect(url)
                client.post()
                wait_until(lambda: engine.open == 1)
                client.close()
                wait_until(lambda: engine.open == 0 and state.in_flight == 0)
                assert len(engine.cancelled) == number + 1


def _dechunked(text: bytes) -> bytes:
    out = b""
    while True:
        size, _, text = text.partition(b"\r\n")
        if not int(size, 16):
            assert text == b"\r\n"
            return out
        out, text = out + text[: int(size, 16)], text[int(size, 16) + 2 :]


class TestDrain:
    @pytest.mark.parametrize("stream", [False, True])
    def test_requests_that_outlast_the_drain_end_with_503(
        self,
        folder: Path,
        engine: ScriptedEngine,
        connect: Connect,
        stream: bool,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        engine.pause = asyncio.Event()  # never set
        state = make_state(folder, engine, {"drain_s": 0.3})
        body = json.dumps({"prompt": "find", "max_tokens": 3, "stream": stream}).encode()
        with server_thread(state) as (url, server, thread):
            running, half, kept = connect(url), connect(url), connect(url)
            kept.head("GET", "/health")
            assert kept.answer()[0] == 200
            running.post(body)
            half.head(path="/v2/rerank", content_length=10)
            text = b""
            while stream and b"data: " not in text:
                text += running.socket.recv(65536)
            wait_until(lambda: state.in_flight == 1)
            server.should_exit = True
            assert kept.rest() == b""
            if stream:
                text += running.rest()
                assert b"the server is shutting down" in text and b"data: [DONE]" in text
                assert text.endswith(b"0\r\n\r\n")
            else:
                status, error = running.error()
                assert status == 503 and error["message"] == "the server is shutting down"
            status, _, answer = half.answer()
            assert status == 503 and json.loads(answer) == {"message": "the server is shutting down"}
            thread.join(PATIENCE_S)
        assert not thread.is_alive() and engine.cancelled
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    def test_a_request_during_the_drain_is_answered_and_its_connection_closed(
        self, folder: Path, engine: ScriptedEngine, connect: Connect
    ) -> None:
        state = make_state(folder, engine, {"drain_s": 60})
        with server_thread(state) as (url, server, thread):
            client = connect(url)
            client.send(b"POST ")
            wait_until(lambda: server.server_state.connections)
            half = connect(url)
            half.head(content_length=len(BODY))
            wait_until(lambda: len(server.server_state.tasks) == 1)
            server.should_exit = True
            wait_until(lambda: not _accepted(url))
            client.send(f"{ROUTE} HTTP/1.1\r\ncontent-length: {len(BODY)}\r\n\r\n".encode() + BODY)
            half.send(BODY)
            for each in (client, half):
                status, headers, _ = each.answer()
                assert status == 200 and headers["connection"] == "close" and each.rest() == b""
            thread.join(PATIENCE_S)
        assert not thread.is_alive()


class TestRequests:
    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("localhost", 200),
            ("LOCALHOST:8000", 200),
            ("127.0.0.1:1", 200),
            ("127.9.9.9", 200),
            ("[::1]:8000", 200),
            ("x", 200),
            ("mine.example:8000", 200),
            ("evil.example", 421),
            ("127.0.0.1.evil.example", 421),
            ("localhost.evil.example:8000", 421),
        ],
    )
    def test_a_server_on_loopback_refuses_the_names_of_other_hosts(
        self, plain_url: str, connect: Connect, host: str, status: int
    ) -> None:
        client = connect(plain_url)
        for method, path in (("GET", "/health"), ("GET", "/nothing")):
            client.head(method, path, host=host)
            got, _, body = client.answer()
            assert got == (404 if status == 200 and path == "/nothing" else status)
        if status == 421:
            assert b"--allowed-hosts" in body

    def test_the_access_log_has_no_query(
        self, plain_url: str, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "penstock.access")
        client = connect(plain_url)
        client.head("GET", "/health?api_key=secret&x=%0a")
        record = access_line(caplog, client)
        assert record.getMessage() == "GET /health 200" and "secret" not in str(vars(record))

    def test_the_access_log_has_requests_that_no_route_sees(
        self, plain_url: str, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "penstock.access")
        client = connect(plain_url)
        client.head("GET", "/health", host="other.example")
        assert access_line(caplog, client).getMessage() == "GET /health 421"

    def test_a_client_that_waits_for_100_continue_is_told_to_go_on_or_refused_at_once(
        self, plain_url: str, connect: Connect
    ) -> None:
        client = connect(plain_url)
        client.head(expect="100-continue", content_length=len(BODY))
        assert client.answer()[0] == 100
        client.send(BODY)
        assert client.answer()[0] == 200
        client.head(expect="100-continue", content_length=200_000)
        status, headers, _ = client.answer()
        assert status == 413 and headers["connection"] == "close"

    def test_a_method_that_a_route_does_not_take_names_those_that_it_takes(self, plain_url: str) -> None:
        for path, allowed in ((ROUTE, "POST"), ("/health", "GET, HEAD")):
            refused = httpx.request("DELETE", plain_url + path)
            assert refused.status_code == 405 and refused.headers["allow"] == allowed

    @pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "zstd"])
    def test_a_compressed_body_is_refused(self, plain_url: str, encoding: str) -> None:
        refused = httpx.post(plain_url + ROUTE, content=BODY, headers={"content-encoding": encoding})
        assert refused.status_code == 415 and "uncompressed" in refused.json()["error"]["message"]
        plain = httpx.post(plain_url + ROUTE, content=BODY, headers={"content-encoding": "identity"})
        assert plain.status_code == 200

    @pytest.mark.parametrize("request_id", ["a\nb", "\x00", "\x7f", "a" * 257, "\u2028", "\ud800"])
    def test_a_request_id_that_no_header_can_hold_is_refused(self, plain_url: str, request_id: str) -> None:
        body = json.dumps({"prompt": "find", "request_id": request_id})
        refused = httpx.post(plain_url + ROUTE, content=body)
        assert refused.status_code == 400
        accepted = httpx.post(plain_url + ROUTE, json={"prompt": "find", "request_id": "wäter 水"})
        assert accepted.status_code == 200 and accepted.json()["id"] == "cmpl-wäter 水"

    def test_a_request_to_upgrade_is_answered_as_http(self, plain_url: str, connect: Connect) -> None:
        client = connect(plain_url)
        client.head("GET", "/health", connection="upgrade", upgrade="h2c")
        assert client.answer()[0] == 200 and client.rest() == b""
        client = connect(plain_url)
        client.post(connection="upgrade", upgrade="h2c")
        assert client.answer()[0] == 200 and client.rest() == b""


def test_clients_in_threads_are_served_beside_slow_ones(
    folder: Path, engine: ScriptedEngine, connect: Connect
) -> None:
    with serving(folder, engine) as (url, _):
        for _ in range(50):
            connect(url).send(b"POST / HTTP/1.1\r\nx: " + b"a" * 1000)
        statuses: list[int] = []
        threads = [threading.Thread(target=lambda: statuses.append(ask(url))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert statuses == [200] * 8

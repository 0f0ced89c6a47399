"""The direct path from endpoint to connection: an answer in one write, and a callback on disconnect."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from uvicorn.server import ServerState as UvicornState

from penstock.api import connections
from penstock.api.connections import Connection
from penstock.api.endpoint import unless_gone
from penstock.api.process import http_config
from penstock.errors import Cancelled, EngineUnavailable
from tests.api.scripted_app import make_state
from tests.text_models import ScriptedEngine, write_text_model
from tests.waiting import PATIENCE_S

BODY = json.dumps({"prompt": "find", "max_tokens": 3}).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text"))


class Transport:
    """A fake transport that records what is written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def get_extra_info(self, name: str) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name)

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def request(method: str = "POST", path: str = "/v1/completions", body: bytes = BODY, **headers: str) -> bytes:
    named = {"host": "x", "content-length": str(len(body)), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join((*lines, "", "")).encode() + body


def connected(
    folder: Path, use: Callable[[Connection, Transport], Coroutine[Any, Any, None]], **server: Any
) -> None:
    """Run a test on a connection of an API process, on its own event loop."""

    async def main() -> None:
        engine = ScriptedEngine(lambda prompt, copy: [5, 6, 7])
        config = http_config(make_state(folder, engine, server))
        config.load()
        make: Any = config.http_protocol_class
        connection = make(config=config, server_state=UvicornState(), app_state={})
        transport = Transport()
        connection.connection_made(transport)
        await use(connection, transport)
        connection.connection_lost(None)

    asyncio.run(main())


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():  # noqa: ASYNC110 — the condition has no awaitable event
            await asyncio.sleep(0.001)


def test_a_small_answer_is_one_write_and_the_next_request_follows(folder: Path) -> None:
    async def use(connection: Connection, transport: Transport) -> None:
        for count in (1, 2):
            connection.data_received(request(**{"x-request-id": "mine"}))
            await until(lambda count=count: len(transport.written) >= count)
            head, _, body = transport.written[-1].partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ")
            assert b"\r\nx-request-id: mine" in head and b"connection: close" not in head
            assert f"content-length: {len(body)}".encode() in head and json.loads(body)["choices"]
        assert len(transport.written) == 2 and not transport.is_closed and connection.is_idle

    connected(folder, use)


def test_the_last_answer_of_a_connection_closes_it(folder: Path) -> None:
    async def use(connection: Connection, transport: Transport) -> None:
        connection.data_received(request(connection="close"))
        await until(lambda: transport.is_closed)
        assert len(transport.written) == 1 and b"\r\nconnection: close\r\n\r\n" in transport.written[0]

    connected(folder, use)


def test_an_answer_to_head_has_the_length_and_no_body(folder: Path) -> None:
    async def use(connection: Connection, transport: Transport) -> None:
        connection.data_received(request("HEAD", "/health", b""))
        await until(lambda: transport.written)
        assert transport.written[0].endswith(b"\r\n\r\n") and b"content-length: 0" not in transport.written[0]

    connected(folder, use)


def test_errors_are_one_write_too(folder: Path) -> None:
    async def use(connection: Connection, transport: Transport) -> None:
        connection.data_received(request(body=b"{"))
        await until(lambda: transport.written)
        assert transport.written[0].startswith(b"HTTP/1.1 400 ") and b'"error"' in transport.written[0]

    connected(folder, use)


def test_middleware_still_adds_its_headers(folder: Path) -> None:
    async def use(connection: Connection, transport: Transport) -> None:
        connection.data_received(request(origin="https://app.example"))
        await until(lambda: b'"choices"' in b"".join(transport.written))
        assert b"access-control-allow-origin: https://app.example" in b"".join(transport.written)

    connected(folder, use, allowed_origins=("https://app.example",))


def test_an_answer_waits_for_a_client_that_reads_slowly(folder: Path) -> None:
    async def use(connection: Connection, transport: Transport) -> None:
        connection.pause_writing()
        connection.data_received(request())
        await until(lambda: connection.cycle is not None and not connection.cycle.more_body)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not transport.written
        connection.resume_writing()
        await until(lambda: b'"choices"' in b"".join(transport.written))

    connected(folder, use)


def header_names(written: list[bytes]) -> list[bytes]:
    _, *lines = b"".join(written).partition(b"\r\n\r\n")[0].split(b"\r\n")
    return [line.partition(b": ")[0] for line in lines]


@pytest.mark.parametrize("body", [BODY, b"{"], ids=["answer", "error"])
def test_an_answer_in_one_write_has_the_headers_of_one_in_messages(
    folder: Path, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(connection: Connection, transport: Transport) -> None:
        connection.data_received(request(body=body, **{"x-request-id": "mine"}))
        await until(lambda: transport.written)
        in_one_write = header_names(transport.written)
        transport.written.clear()
        monkeypatch.setattr(connections.Exchange, "respond", lambda *given, **more: False)
        connection.data_received(request(body=body, **{"x-request-id": "mine"}))
        await until(lambda: len(transport.written) == 2)
        assert header_names(transport.written) == in_one_write
        assert {b"x-request-id", b"x-tokenize-ms", b"x-total-ms", b"content-type"} <= set(in_one_write)

    connected(folder, use)


def test_an_answered_request_leaves_nothing_to_the_garbage_collector(folder: Path) -> None:
    async def use(connection: Connection, transport: Transport) -> None:
        connection.data_received(request())
        await until(lambda: transport.written)
        answered = weakref.ref(connection.cycle)
        gc.collect()
        gc.disable()
        try:
            connection.data_received(request("GET", "/health", b""))
            await until(lambda: len(transport.written) > 1)
            assert answered() is None
        finally:
            gc.enable()

    connected(folder, use)


def test_a_header_value_with_a_line_break_is_refused(folder: Path) -> None:
    async def use(connection: Connection, transport: Transport) -> None:
        connection.data_received(request(body=BODY)[:-1])  # incomplete, so that no handler answers it
        headers = [(b"x-name", b"a\r\nset-cookie: b")]
        assert not connection.cycle.respond(200, b"", headers, b"{}", head_only=False)
        assert not transport.written and not connection.cycle.response_started

    connected(folder, use)


def test_the_callback_for_an_ended_request_runs_once_even_if_set_afterwards(folder: Path) -> None:
    async def use(connection: Connection, transport: Transport) -> None:
        told: list[Exception] = []
        connection.data_received(request()[:-1])
        connection.cycle.on_end(told.append)
        connection.cycle.fail(EngineUnavailable("the server is shutting down"))
        connection.cycle.disconnect()
        assert [str(each) for each in told] == ["the server is shutting down"]
        connection.cycle.on_end(told.append)
        await until(lambda: len(told) == 2)

    connected(folder, use)


class Exchange:
    """A direct exchange whose disconnect callback the test calls."""

    def __init__(self) -> None:
        self.callback: Any = None

    def respond(self, *given: Any, **more: Any) -> bool:
        return False

    @property
    def task(self) -> Any:
        return asyncio.current_task()

    def take_body(self) -> None:
        return None

    def on_end(self, callback: Any) -> None:
        self.callback = callback


async def never() -> Any:
    raise AssertionError("the connection tells, so nobody waits for a message")


def test_work_is_cancelled_when_the_connection_reports_a_disconnect() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def leave() -> None:
        exchange = Exchange()
        asyncio.get_running_loop().call_soon(lambda: exchange.callback(Cancelled("the client disconnected")))
        with pytest.raises(Cancelled):
            await unless_gone(work(), never, exchange)
        await asyncio.sleep(0)  # raises if the cancellation leaked into this task
        assert exchange.callback is None

    asyncio.run(leave())
    assert ended == ["cancelled"]


def test_a_cancellation_by_others_is_passed_on() -> None:
    async def stop() -> None:
        exchange = Exchange()
        task = asyncio.create_task(unless_gone(asyncio.Event().wait(), never, exchange))
        await until(lambda: exchange.callback is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert exchange.callback is None

    asyncio.run(stop())

"""The load client, with a server that can misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.bench.load import fleet
from penstock.bench.load.fleet import Outcome, run_load
from penstock.bench.load.plan import Address, Reader, Traffic, WorkerPlan
from penstock.bench.load.samples import Block, Recorder
from penstock.bench.load.sender import Sender
from penstock.bench.load.store import Store, write_store, write_tickets
from penstock.bench.load.wire import Connection, whole_body
from penstock.errors import BadValue
from tests.bench.stub import Stub, stub
from tests.waiting import PATIENCE_S


def message(route: str = "/v1/embeddings", **fields: Any) -> bytes:
    body = json.dumps({"input": "one two three", **fields}).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def send(server: Stub, count: int = 20, reader: Reader = "body", processes: int = 2, **kind: Any) -> Outcome:
    route = kind.pop("route", "/v1/embeddings")
    fields = kind.pop("fields", {})
    traffic = Traffic(**({"max_concurrency": 4} | kind))
    return run_load(
        [message(route, **fields)] * count, Address("127.0.0.1", server.port), reader, traffic, processes
    )


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_every_framing_of_the_body_is_read(framing: str) -> None:
    with stub(framing=framing) as server:
        samples = send(server).samples
    assert len(samples) == 20
    assert samples.ok.all()
    assert (samples["input_tokens"] == 3).all()
    assert (samples.columns["status"] == 200).all()


def test_latency_ends_with_the_last_part_of_the_body() -> None:
    with stub(body_delay_s=0.15) as server:
        samples = send(server, count=4).samples
    assert (np.sort(samples["end"]) >= np.sort(server.last_writes_s)).all()
    assert (samples["end"] >= samples["first_byte"]).all()
    assert (samples["first_byte"] >= samples["start"]).all()


def test_connections_are_reused() -> None:
    with stub() as server:
        send(server, count=40)
        assert server.connections <= 4


def test_without_keepalive_each_request_opens_a_connection() -> None:
    with stub() as server:
        assert send(server, count=12, keepalive=False).samples.ok.all()
        assert server.connections == 12


def test_max_concurrency_holds_over_all_processes() -> None:
    with stub(delay_s=0.02) as server:
        outcome = send(server, count=30, max_concurrency=3)
        assert server.max_active <= 3
    assert outcome.processes == 2


def test_at_an_infinite_rate_all_requests_are_sent_at_once() -> None:
    with stub(answer_from_active=30) as server:
        outcome = send(server, count=60, max_concurrency=None)
        assert server.max_active >= 30  # the share of one of the two load processes
    assert outcome.samples.ok.all()


def test_a_rate_spreads_the_requests() -> None:
    with stub() as server:
        outcome = send(server, count=20, request_rate=100.0, burstiness=float("inf"), max_concurrency=None)
    samples = outcome.samples
    assert samples.ok.all()
    assert samples["due"][-1] - outcome.began_s == pytest.approx(0.2, abs=1e-6)
    assert (samples["start"] >= samples["due"]).all()


def test_requests_are_repeated_for_the_duration() -> None:
    with stub(delay_s=0.01) as server:
        outcome = send(server, count=2, duration_s=1.0)
    assert outcome.planned is None
    assert len(outcome.samples) > 2
    assert set(outcome.samples.columns["request"].tolist()) == {0, 1}


def test_a_duration_without_any_limit_is_refused(server: Stub) -> None:
    with pytest.raises(BadValue, match="needs --max-concurrency"):
        send(server, duration_s=1.0, max_concurrency=None)


def test_error_responses_are_counted_and_quoted() -> None:
    with stub(fail_every=2) as server:
        samples = send(server).samples
    assert int(samples.failed.sum()) == 10
    assert samples.errors() == {"HTTP 500 Internal Server Error: made to fail": 10}
    assert set(samples.columns["status"].tolist()) == {200, 500}


def test_an_incomplete_body_is_a_failure() -> None:
    with stub(framing="cut") as server:
        errors = send(server, count=4).samples.errors()
    assert list(errors) == ["the server closed the connection in the middle of an answer"]


def test_a_response_that_is_not_http_is_a_failure() -> None:
    with stub(garbage=True) as server:
        errors = send(server, count=2).samples.errors()
    assert all(text.startswith("the answer is not HTTP") for text in errors)


def test_a_run_ends_when_its_server_is_gone() -> None:
    with stub(die_after=5) as server:
        outcome = send(server, count=5, duration_s=60.0)
    assert outcome.problem is not None
    assert "connections in a row failed" in outcome.problem
    assert int(outcome.samples.ok.sum()) > 0


def test_a_refused_connection_is_a_failure() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # but does not listen
        address = Address("127.0.0.1", silent.getsockname()[1])
        outcome = run_load([message()] * 5, address, "body", Traffic(max_concurrency=2), 1)
    assert list(outcome.samples.errors()) == ["cannot connect: Connection refused"]


def test_a_response_after_the_timeout_is_a_failure() -> None:
    with stub(answer_from_active=2) as server:  # a single request is never answered
        errors = send(server, count=1, timeout_s=0.2).samples.errors()
    assert list(errors) == ["no complete answer within 0.2 s"]


def test_token_counts_are_read_from_headers() -> None:
    with stub() as server:
        tei = send(server, count=3, reader="header", route="/embed", fields={"inputs": "a b"}).samples
        raw = send(server, count=3, reader="header", fields={"encoding_format": "bytes"}).samples
    assert tei["input_tokens"].tolist() == [5, 5, 5]
    assert raw["input_tokens"].tolist() == [3, 3, 3]


def test_streams_record_the_time_of_each_token() -> None:
    with stub() as server:
        samples = send(
            server, count=4, reader="stream", route="/v1/completions", fields={"max_tokens": 5}
        ).samples
    assert samples.ok.all()
    assert samples["output_tokens"].tolist() == [5, 5, 5, 5]
    assert samples.columns["gaps"].tolist() == [4, 4, 4, 4]
    assert (samples["first_token"] > samples["start"]).all()
    assert (samples["last_token"] >= samples["first_token"]).all()


def test_more_connections_than_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bench.load.fleet.allow_open_files", lambda: 100)
    with pytest.raises(BadValue, match="ulimit -n"):
        run_load([message()] * 500, Address("127.0.0.1", 9), "body", Traffic(), 2)


def test_a_load_process_that_dies_is_reported(server: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    begin = fleet._start

    def start(plan: WorkerPlan) -> subprocess.Popen[bytes]:
        started.append(begin(plan))
        return started[-1]

    monkeypatch.setattr(fleet, "_start", start)
    traffic = Traffic(max_concurrency=2, duration_s=30.0)
    outcome = run_load(
        [message()], Address("127.0.0.1", server.port), "body", traffic, 1, lambda _: started[0].kill()
    )
    assert outcome.problem is not None
    assert "died" in outcome.problem


async def sent_here(
    address: Address, count: int, meanwhile: Callable[[], None] = lambda: None
) -> tuple[Sender, Block]:
    """Run a load process's sender in this process. `meanwhile` is called before the loop's next iteration."""
    store, tickets = write_store([message()] * count, None), write_tickets(count)
    plan = WorkerPlan(
        number=0,
        processes=1,
        address=address,
        store_fd=store,
        tickets_fd=tickets,
        slots=None,
        duration_s=None,
        keepalive=True,
        timeout_s=PATIENCE_S,
        reader="body",
    )
    over, recorder = asyncio.Event(), Recorder()
    sender = Sender(plan, Store(store), recorder, over.set)
    try:
        sender.begin(time.monotonic())
        meanwhile()
        async with asyncio.timeout(PATIENCE_S):
            await over.wait()
    finally:
        os.close(store)
        os.close(tickets)
    return sender, recorder.flush()


def test_a_burst_is_sent_before_the_first_response_is_awaited() -> None:
    """No request waits until the connections of all others are established."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.settimeout(PATIENCE_S)

        def answer() -> None:
            for _ in range(20):
                accepted, _ = listener.accept()
                with accepted:
                    accepted.settimeout(PATIENCE_S)
                    assert accepted.recv(10_000) == message()
                    accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        port = listener.getsockname()[1]
        sender, _ = asyncio.run(sent_here(Address("127.0.0.1", port), 20, answer))
    assert sender.completed == 20 and sender.reason is None


@pytest.mark.parametrize("taken", [0, 7])
def test_a_request_that_cannot_be_written_at_once_is_written_later(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens on a network, where connecting takes longer, and with requests larger than the socket
    buffer."""

    class Slow(socket.socket):
        begun = False

        def send(self, data: Any, *flags: Any) -> int:
            if self.begun:
                return super().send(data, *flags)
            self.begun = True
            if not taken:
                raise BlockingIOError
            return super().send(data[:taken], *flags)

    monkeypatch.setattr("penstock.bench.load.sender.socket.socket", Slow)
    with stub() as server:
        sender, _ = asyncio.run(sent_here(Address("127.0.0.1", server.port), 12))
    assert sender.completed == 12 and sender.reason is None


def test_a_connection_that_is_refused_late_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(socket.socket):
        def send(self, data: Any, *flags: Any) -> int:
            raise BlockingIOError

    with stub() as server:
        port = server.port
    monkeypatch.setattr("penstock.bench.load.sender.socket.socket", Slow)
    sender, _ = asyncio.run(sent_here(Address("127.0.0.1", port), 3))
    assert sender.completed == 0


OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
WHOLE = (
    OK + b"content-length: 4\r\n\r\n{..}",
    OK.upper() + b"Content-Length:4 \r\nX-A: b\r\n\r\n{..}",
)


@pytest.mark.parametrize("answer", WHOLE)
def test_an_answer_in_one_piece_is_read_without_the_parser(answer: bytes) -> None:
    assert whole_body(answer) == b"{..}"


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"content-length: 5\r\n\r\n{..}",
        OK + b"content-length: 3\r\n\r\n{..}",
        OK + b"content-length: 4\r\nconnection: close\r\n\r\n{..}",
        OK + b"content-length: 4\r\nTransfer-Encoding: chunked\r\n\r\n{..}",
        OK + b"content-length: +4\r\n\r\n{..}",
        OK + b"x-length: 4\r\n\r\n{..}",
        OK + b"content-length: 0\r\n",
        OK.replace(b"1.1", b"1.0") + b"content-length: 4\r\n\r\n{..}",
        OK.replace(b"200", b"429") + b"content-length: 4\r\n\r\n{..}",
        b"HTTP/1.1 200 OK",
        b"",
    ],
)
def test_any_other_answer_is_left_to_the_parser(answer: bytes) -> None:
    assert whole_body(answer) is None


class Answers:
    """Takes what a connection reads: the status, the size, the tokens, and whether it may be used again."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []

    def connected(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection, reason: str) -> None:
        self.found.append((reason,))

    def answered(self, connection: Connection, now: float) -> None:
        connection.busy = False
        status, size, fault = connection.status, connection.body_bytes, connection.fault()
        self.found.append((status, size, connection.tokens(), connection.reusable, fault))


def read_in_pieces(answer: bytes, size: int) -> list[tuple[Any, ...]]:
    answers = Answers()
    connection = Connection(answers)
    connection.connection_made(asyncio.Transport())
    for _ in range(3):
        connection.begin(0, 0.0, 0.0)
        for at in range(0, len(answer), size):
            connection.data_received(answer[at : at + size])
    return answers.found


USAGE = b'"usage":{"prompt_tokens":7,"total_tokens":9}}'


@pytest.mark.parametrize(
    "body",
    [b'{"data":[' + b"0.125," * 3000 + b"1]," + USAGE, b"{" + USAGE, b'{"total_tokens":5}', b"[]", b""],
)
def test_an_answer_in_one_piece_is_read_like_one_in_many(body: bytes) -> None:
    answer = OK + b"content-length: %d\r\n\r\n" % len(body) + body
    assert read_in_pieces(answer, 1 << 20) == read_in_pieces(answer, 64)
    assert len(read_in_pieces(answer, 1 << 20)) == 3

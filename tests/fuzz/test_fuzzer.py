"""The fuzzer detects every kind of fault."""

from __future__ import annotations

import asyncio

import pytest

from penstock.api.app import ROUTES
from penstock.api.schema import openapi
from tests.fuzz.cases import Case, Schema, as_case, make_case, numeric_bodies
from tests.fuzz.exchange import MAX_ERROR_BYTES, Outcome, exchange
from tests.fuzz.pacing import FUZZ_S, QUIET_S, SETTLE_S, Pacer
from tests.fuzz.probe import ProbeResult
from tests.fuzz.report import Run

CASE = as_case("plain", "/v1/embeddings", b"{}")


@pytest.fixture(scope="module")
def schema() -> Schema:
    return Schema(openapi(ROUTES))


def reply(status: int, body: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 %d x\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


async def answered_with(raw: bytes | None, case: Case, max_reply_s: float = 60.0) -> Outcome:
    """Send a case to a server that replies with `raw` and closes, or that never answers if `raw` is None."""
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if raw is None:
            await over.wait()
        else:
            writer.write(raw)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        outcome = await exchange(server.sockets[0].getsockname()[1], case, max_reply_s)
        over.set()
    return outcome


@pytest.mark.parametrize(
    ("raw", "status", "fault"),
    [
        (reply(200, b'{"a": 1}'), 200, None),
        (reply(400, b'{"error": {}}'), 400, None),
        (reply(500, b"{}"), 500, "5xx"),
        (reply(503, b"{}"), 503, "5xx"),
        (b"", None, "closed"),
        (reply(200, b'{"a": 1}')[:-1], None, "closed"),
        (reply(400, b'"%s"' % (b"x" * MAX_ERROR_BYTES)), 400, "echo"),
        (reply(200, b'{"score": NaN}'), 200, "not JSON"),
        (reply(200, b"{"), 200, "not JSON"),
        (reply(200, b"{", b"text/plain"), 200, None),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + reply(200, b"{}"), 200, None),
        (reply(200, b"{}") + reply(400, b"{}"), 200, None),
    ],
)
def test_a_reply_is_judged_by_the_promises(raw: bytes, status: int | None, fault: str | None) -> None:
    outcome = asyncio.run(answered_with(raw, CASE))
    assert (outcome.status, outcome.fault) == (status, fault)


def test_a_reply_that_never_comes_is_a_hang() -> None:
    assert asyncio.run(answered_with(None, CASE, max_reply_s=0.05)).fault == "hang"


def test_nobody_owes_a_reply_to_a_client_that_left() -> None:
    abandoned = Case("abandoned", "/", CASE.raw, is_complete=False)
    assert asyncio.run(answered_with(b"", abandoned)) == Outcome(None)


def test_a_case_can_be_repeated_alone_and_differs_from_others(schema: Schema) -> None:
    cases = [make_case(schema, 3, "minilm", number) for number in range(300)]
    assert make_case(schema, 3, "minilm", 250) == cases[250]
    assert len({case.raw for case in cases}) > 270
    assert {case.route for case in cases} >= set(schema.posts)
    assert len({case.name for case in cases}) >= 14


def test_every_numeric_field_is_found_wherever_it_is_nested(schema: Schema) -> None:
    found = {(path, name) for path in schema.posts for name, _ in numeric_bodies(schema, path, 7)}
    spans = [
        body["chunk_spans"] for name, body in numeric_bodies(schema, "/pooling", 7) if name == "chunk_spans"
    ]
    assert spans[:2] == [[[[7, 1]]], [[[1, 7]]]]
    assert {("/rerank", "top_n"), ("/v1/maxsim", "query_scales"), ("/detokenize", "tokens")} <= found
    without = set(schema.posts) - {
        path for path, _ in found
    }  # these take no number, or bodies of other routes
    orders = {f"/v1/admin/models/{action}" for action in ("load", "unload", "sleep", "wake")}
    orders |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    assert without <= {"/tokenize", "/v1/tokenize", "/api/show", "/invocations", "/vertex"} | orders


def test_quiet_phases_are_told_from_busy_ones_by_the_clock() -> None:
    pacer = Pacer(rate=10.0, began_s=100.0)
    times = [
        100.0,
        100.0 + FUZZ_S,
        100.0 + FUZZ_S + SETTLE_S + QUIET_S / 2,
        100.0 + FUZZ_S + SETTLE_S + QUIET_S,
    ]
    probe = ProbeResult([1.0, 2.0, 3.0, 4.0], times, num_wrong=1)
    quiet, busy = pacer.split(probe)
    assert quiet.latencies_ms == [3.0]
    assert busy.latencies_ms == [1.0, 2.0, 4.0]
    assert busy.num_wrong == 1


def test_a_run_names_the_promises_that_it_broke() -> None:
    run = Run("minilm", "own", idle=ProbeResult([10.0] * 100), busy=ProbeResult([29.0] * 100))
    run.count("number", "/score", Outcome(400))
    assert run.broken() == []
    run.count("number", "/score", Outcome(500, "5xx"), "--case minilm/7")
    run.busy = ProbeResult([31.0] * 100, num_wrong=2)
    assert len(run.broken()) == 3
    assert run.examples[0]["repeat"] == "--case minilm/7"

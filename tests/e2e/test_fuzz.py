"""Hostile requests get a correct answer or a 4xx. `make fuzz` sends many more of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from tests.fuzz.cases import Case, Schema, as_case, make_case, numeric_bodies
from tests.fuzz.exchange import Outcome, exchange

NUM_CASES = 200
NUM_WORKERS = 4
EXTREMES = (2**64, -(2**64), 2**63, -1, 1e308)


@pytest.fixture(scope="module", params=["server", "llama_server"])
def target(request: pytest.FixtureRequest) -> Server:
    """The embedding server or the generating server, as the parameter names it."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="module")
def schema(target: Server) -> Schema:
    return Schema(target.http.get("/openapi.json").json())


def send(server: Server, cases: Iterator[Case]) -> list[tuple[Case, Outcome]]:
    """Send all cases, several at a time, and return the outcomes in the order of the replies."""
    outcomes: list[tuple[Case, Outcome]] = []

    async def worker() -> None:
        for case in cases:
            outcomes.append((case, await exchange(server.port, case)))

    async def workers() -> None:
        await asyncio.gather(*(worker() for _ in range(NUM_WORKERS)))

    asyncio.run(workers())
    return outcomes


def faults(outcomes: list[tuple[Case, Outcome]]) -> list[str]:
    return [
        f"{case.name} on {case.route}: {outcome} {case.raw[:300]!r}"
        for case, outcome in outcomes
        if outcome.fault is not None
    ]


def test_random_requests_get_no_5xx_no_empty_reply_and_no_long_echo(target: Server, schema: Schema) -> None:
    outcomes = send(target, (make_case(schema, 0, "short", number) for number in range(NUM_CASES)))
    assert len(outcomes) == NUM_CASES
    assert {outcome.status for _, outcome in outcomes} >= {None, 200, 400, 405}  # the routes are reached
    assert faults(outcomes) == []


@pytest.mark.parametrize("value", EXTREMES)
def test_an_extreme_number_in_any_field_of_any_route_is_no_5xx(
    target: Server, schema: Schema, value: float
) -> None:
    cases = [
        as_case(name, path, json.dumps(body).encode())
        for path in schema.posts
        for name, body in numeric_bodies(schema, path, value)
    ]
    fields = {(case.route, case.name) for case in cases}
    assert {("/rerank", "top_n"), ("/v1/completions", "logit_bias"), ("/v1/embeddings", "input")} <= fields
    half = cases[EXTREMES.index(value) % 2 :: 2]  # each field gets every second value
    assert faults(send(target, iter(half))) == []


def test_the_server_still_answers_after_them(target: Server) -> None:
    assert target.http.get("/ready").status_code == 200
    assert target.post("/tokenize", prompt="still here").status_code == 200

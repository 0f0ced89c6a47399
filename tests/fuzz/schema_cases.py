"""Requests that schemathesis derives from a server's OpenAPI document, with checks of the answers.

Bodies are of four kinds: unchanged examples, examples with some generated fields, bodies that match the
schema, and bodies that do not. The first two kinds mostly succeed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any, Literal

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.exchange import MAX_REPLY_S, SLOW_S, Outcome, judge
from tests.fuzz.pacing import Pacer

Json = Any
Kind = Literal["example", "varied", "positive", "negative"]
Report = Callable[[str, str, Outcome, str], None]  # kind, route, outcome, command to repeat it
Call = Callable[[schemathesis.Case], schemathesis.Response]
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
_KINDS: tuple[Kind, ...] = ("varied", "varied", "positive", "negative")  # repeated for a larger share
_MAX_VARIED = 3  # maximum number of generated fields in an example


def load(document: Json, url: str | None = None) -> schemathesis.BaseSchema:
    """Load the document into schemathesis; requests go to `url`."""
    schema = schemathesis.openapi.from_dict(document)
    if url is not None:
        schema.config.update(base_url=url)
    schema.config.output.sanitization.update(enabled=False)  # it redacts every field with "token" in its name
    return schema


def run_schema_cases(url: str, num_cases: int, first_seed: int, pacer: Pacer | None, report: Report) -> int:
    """Send at least `num_cases` over all routes of a server, and return the number sent."""
    session = requests.Session()
    document = session.get(f"{url}/openapi.json", timeout=MAX_REPLY_S).json()

    def call(case: schemathesis.Case) -> schemathesis.Response:
        if pacer is not None:
            time.sleep(pacer.wait_s())
        return case.call(session=session, timeout=MAX_REPLY_S)

    return send_cases(document, load(document, url), num_cases, first_seed, call, report)


def send_cases(
    document: Json,
    schema: schemathesis.BaseSchema,
    num_cases: int,
    first_seed: int,
    call: Call,
    report: Report,
) -> int:
    """Send the examples of all operations, then generated cases in equal shares."""
    sent = 0
    operations = [found.ok() for found in schema.get_all_operations()]

    def send(case: schemathesis.Case, kind: Kind) -> None:
        nonlocal sent
        sent += 1
        outcome = _exchange(case, call)
        repeat = "" if _is_quiet(outcome) else case.as_curl_command()[:100_000]
        report(kind, f"{case.method} {case.operation.path}", outcome, repeat)

    for operation in operations:
        for case in _example_cases(document, operation):
            send(case, "example")
    with_body = [each for each in operations if each.body]
    share = max(1, -(-(num_cases - sent) // (len(_KINDS) * len(with_body))))
    round_number = 0
    while sent < num_cases:
        for operation in with_body:
            examples = list(_examples(document, operation))
            for kind in dict.fromkeys(_KINDS):
                strategy = _strategy(document, operation, kind, examples)
                number = share * _KINDS.count(kind)
                _run(strategy, first_seed + round_number, number, lambda case, kind=kind: send(case, kind))
        round_number += 1
    return sent


def _exchange(case: schemathesis.Case, call: Call) -> Outcome:
    began_s = time.monotonic()
    try:
        response = call(case)
    except requests.Timeout:
        outcome = Outcome(None, "hang", f"no reply after {MAX_REPLY_S:.0f} s")
    except requests.ConnectionError as error:
        outcome = Outcome(None, "closed", str(error)[:300])
    else:
        names = {name.lower().encode(): values[0].encode() for name, values in response.headers.items()}
        outcome = judge(response.status_code, response.content, names)
        if outcome.fault is None and (wrong := _violation(case, response)):
            outcome = replace(outcome, fault="schema", detail=wrong)
    return replace(outcome, seconds=time.monotonic() - began_s)


def _violation(case: schemathesis.Case, response: schemathesis.Response) -> str:
    """How an answer violates the document; empty if it does not."""
    try:
        case.validate_response(response, checks=CHECKS)
    except FailureGroup as failures:
        return "; ".join(f"{each.title}: {each.message}"[:600] for each in failures.exceptions)
    return ""


def _is_quiet(outcome: Outcome) -> bool:
    return outcome.fault is None and outcome.seconds < SLOW_S


# --- examples -----------------------------------------------------------------------------------------------


def _definition(document: Json, operation: schemathesis.APIOperation) -> Json:
    return document["paths"][operation.path][operation.method.lower()]


def _examples(document: Json, operation: schemathesis.APIOperation) -> Iterator[tuple[str, Json]]:
    """Examples of an operation, each with the name of its schema."""
    content = _definition(document, operation).get("requestBody", {}).get("content", {})
    for name, each in content.get("application/json", {}).get("examples", {}).items():
        yield name, each["value"]


def _example_cases(document: Json, operation: schemathesis.APIOperation) -> Iterator[schemathesis.Case]:
    parameters = _definition(document, operation).get("parameters", [])
    path = {each["name"]: each.get("example", "example") for each in parameters if each["in"] == "path"}
    if not operation.body:
        yield operation.Case(path_parameters=path)
    for _, body in _examples(document, operation):
        yield operation.Case(body=dict(body), media_type="application/json", path_parameters=path)


def _own_fields(document: Json, name: str) -> set[str]:
    """Fields of the schema with this name, which may have a module prefix."""
    schemas = document["components"]["schemas"]
    found = schemas.get(name) or next(each for full, each in schemas.items() if full.endswith(f".{name}"))
    return set(found["properties"])


# --- generated cases ----------------------------------------------------------------------------------------


def _strategy(
    document: Json, operation: schemathesis.APIOperation, kind: Kind, examples: list[tuple[str, Json]]
) -> st.SearchStrategy[schemathesis.Case]:
    mode = GenerationMode.NEGATIVE if kind == "negative" else GenerationMode.POSITIVE
    cases = operation.as_strategy(generation_mode=mode)
    if kind != "varied" or not examples:
        return cases
    fields = {name: _own_fields(document, name) for name, _ in examples}

    def vary(case: schemathesis.Case, random: Random) -> schemathesis.Case:
        """Put some generated fields into an example, but not `model`, since no server has a random one."""
        name, example = random.choice(examples)
        given = case.body if isinstance(case.body, dict) else {}
        optional = sorted(fields[name].intersection(given) - {"model"})
        chosen = random.sample(optional, k=min(len(optional), random.randint(0, _MAX_VARIED)))
        case.body = {**example, **{each: given[each] for each in chosen}}
        return case

    return st.builds(vary, cases, st.randoms(use_true_random=False))


def _run(
    strategy: st.SearchStrategy[schemathesis.Case],
    number: int,
    num_cases: int,
    send: Callable[[schemathesis.Case], None],
) -> None:
    @seed(number)
    @settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def one(case: schemathesis.Case) -> None:
        send(case)

    one()

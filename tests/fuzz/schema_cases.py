"""Requests that schemathesis derives from the server's OpenAPI schema: bodies that fit it, and bodies that do
not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from tests.fuzz.exchange import MAX_REPLY_S, SLOW_S, Outcome, judge
from tests.fuzz.pacing import Pacer

Report = Callable[[str, str, Outcome, str], None]  # kind, route, outcome, how to repeat it


def run_schema_cases(url: str, num_cases: int, first_seed: int, pacer: Pacer, report: Report) -> int:
    """Send at least `num_cases` over all routes, and return how many were sent."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.output.sanitization.update(
        enabled=False
    )  # it would hide every field with "token" in its name
    operations = [found.ok() for found in schema.get_all_operations()]
    with_body = [each for each in operations if each.body]
    session, sent, round_number = requests.Session(), 0, 0

    def send(case: schemathesis.Case, kind: str) -> None:
        nonlocal sent
        sent += 1
        time.sleep(pacer.wait_s())
        began_s = time.monotonic()
        try:
            response = case.call(session=session, timeout=MAX_REPLY_S)
        except requests.Timeout:
            outcome = Outcome(None, "hang", f"no reply after {MAX_REPLY_S:.0f} s")
        except requests.ConnectionError as error:
            outcome = Outcome(None, "closed", str(error)[:300])
        else:
            names = {name.lower().encode(): values[0].encode() for name, values in response.headers.items()}
            outcome = judge(response.status_code, response.content, names)
        outcome = replace(outcome, seconds=time.monotonic() - began_s)
        report(kind, case.path, outcome, "" if _is_quiet(outcome) else case.as_curl_command()[:100_000])

    while sent < num_cases:
        share = -(-(num_cases - sent) // (2 * len(with_body)))
        for operation in with_body if round_number else operations:
            for mode in (
                (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
                if operation.body
                else (GenerationMode.POSITIVE,)
            ):
                _run(operation, mode, first_seed + round_number, share if operation.body else 3, send)
        round_number += 1
    return sent


def _is_quiet(outcome: Outcome) -> bool:
    return outcome.fault is None and outcome.seconds < SLOW_S


def _run(
    operation: schemathesis.APIOperation,
    mode: GenerationMode,
    number: int,
    num_cases: int,
    send: Callable[[schemathesis.Case, str], None],
) -> None:
    @seed(number)
    @settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: schemathesis.Case) -> None:
        send(case, mode.value)

    one()

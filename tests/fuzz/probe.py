"""A well-behaved client: one small request at a fixed pace, each answer checked against the idle server's.

It is a separate process, so that the load generator's interpreter does not delay it. It stops when its
standard input ends, and prints one JSON object.
"""

from __future__ import annotations

import http.client
import json
import math
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

PACE_S = 0.05
NUM_WARMUP = 20  # unmeasured requests before the first measured one
TOLERANCE = 1e-5  # per component, whatever else is in the batch


@dataclass(slots=True)
class ProbeResult:
    latencies_ms: list[float] = field(default_factory=list)
    due_s: list[float] = field(default_factory=list)  # when each request was due, on the monotonic clock
    num_wrong: int = 0
    wrong: list[str] = field(default_factory=list)  # the first few
    reference: Any = None  # the right answer

    @property
    def p50_ms(self) -> float:
        return self._percentile(50)

    @property
    def p99_ms(self) -> float:
        return self._percentile(99)

    def _percentile(self, percent: int) -> float:
        """NaN without a latency: few cases may all end before the next request is due."""
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else math.nan


@contextmanager
def probing(port: int, route: str, body: dict[str, Any], reference: Any = None) -> Iterator[ProbeResult]:
    """Probe a server while the block runs; the result is filled in when it ends.

    Without a `reference`, the first answer is taken as right.
    """
    given = [str(port), route, json.dumps(body), json.dumps(reference)]
    words = [sys.executable, "-m", "tests.fuzz.probe", *given]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    result = ProbeResult()
    try:
        yield result
    finally:
        out, _ = process.communicate("")
        for name, value in json.loads(out).items():
            setattr(result, name, value)


def _ask(port: int, route: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", route, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _equals(first: Any, other: Any) -> bool:
    """Whether two answers agree: numbers within the tolerance, all else exactly. Ids and times may differ."""
    if isinstance(first, dict):
        names = set(first) - {"id", "created"}
        return isinstance(other, dict) and all(_equals(first[name], other.get(name)) for name in names)
    if isinstance(first, list):
        same_size = isinstance(other, list) and len(first) == len(other)
        return same_size and all(map(_equals, first, other))
    if isinstance(first, float):
        return isinstance(other, int | float) and abs(first - other) <= TOLERANCE
    return bool(first == other)


def main(words: Sequence[str]) -> None:
    port, route, body = int(words[0]), words[1], words[2].encode()
    result = ProbeResult()
    for _ in range(NUM_WARMUP):
        status, answer = _ask(port, route, body)
        assert status == 200, answer
    result.reference = json.loads(words[3]) or json.loads(answer)
    due_s = time.monotonic()
    while True:
        due_s += PACE_S
        ended, _, _ = select.select([sys.stdin], [], [], max(0.0, due_s - time.monotonic()))
        if ended:
            break
        try:
            status, answer = _ask(port, route, body)
            wrong = (
                ""
                if status == 200 and _equals(result.reference, json.loads(answer))
                else f"{status}: {answer[:200]!r}"
            )
        except (OSError, http.client.HTTPException, ValueError) as error:
            wrong = repr(error)
        now_s = time.monotonic()
        result.latencies_ms.append(
            (now_s - due_s) * 1000
        )  # since the due time: a stall delays all later requests
        result.due_s.append(due_s)
        if wrong:
            result.num_wrong += 1
            result.wrong = [*result.wrong, wrong][:5]
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main(sys.argv[1:])

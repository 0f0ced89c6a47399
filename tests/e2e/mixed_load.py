"""A mixed load on one server, whose answers are checked against those of the idle server.

Every answer must be right, or the request must fail with a typed error or a broken connection. Anything else
is a defect: an answer of another request, a status that blames the caller, a stream with a wrong
continuation.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from tests.e2e.server import Server
from tests.waiting import PATIENCE_S, wait_until

WORDS = ("water", "river", "stone", "light", "paper", "house", "green", "seven", "music", "glass", "winter")
ACCEPTED_ERRORS = (408, 429, 503)
NUM_DISTINCT = 6  # requests per kind


def _text(seed: int, length: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(length))


@dataclass(frozen=True)
class Case:
    """One request, and the answer of an idle server."""

    kind: str
    path: str
    body: dict[str, Any]
    expected: Any = None

    def check(self, found: Any) -> None:
        if self.kind == "generate":
            assert found == self.expected, (self.body, found, self.expected)
        else:
            np.testing.assert_allclose(found, self.expected, atol=1e-4, err_msg=str(self.body)[:200])


def _cases() -> Iterator[Case]:
    for seed in range(NUM_DISTINCT):
        draw = np.random.default_rng(seed)
        yield Case("embed", "/v1/embeddings", {"input": [_text(1000 * seed + row, 40) for row in range(48)]})
        documents = [_text(7000 + 100 * seed + row, 12) for row in range(8)]
        yield Case("rerank", "/score", {"queries": _text(seed, 5), "documents": documents})
        prompt = {"prompt": _text(9000 + seed, 6), "max_tokens": 80, "temperature": 0, "ignore_eos": True}
        yield Case("generate", "/v1/completions", prompt | {"stream": True})
        vectors = [draw.standard_normal((40, 16)).round(3).tolist() for _ in range(5)]
        yield Case("maxsim", "/v1/maxsim", {"queries": vectors[:1], "documents": vectors[1:]})


class _Refused(Exception):
    """A typed error, which is allowed while the server has faults."""


def ask(http: httpx.Client, case: Case) -> Any:
    """Send a request and return the values or the text of its answer."""
    with http.stream("POST", case.path, json=case.body) as answer:
        if answer.status_code in ACCEPTED_ERRORS:
            raise _Refused
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code} {answer.read().decode()[:300]}")
        if case.kind == "generate":
            return _read_stream(answer, case)
        body = json.loads(answer.read())
    key = "embedding" if case.kind == "embed" else "score"
    return np.array([row[key] for row in body["data"]], dtype=np.float32)


def _read_stream(answer: httpx.Response, case: Case) -> str:
    """Read the text of a stream. If the stream breaks off, its text must be a prefix of the expected text."""
    text = ""
    try:
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return text
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                assert event["error"]["type"] in (
                    "InternalServerError",
                    "ServiceUnavailableError",
                    "RateLimitError",
                ), event
                raise _Refused
            text += "".join(choice["text"] for choice in event["choices"])
    finally:
        if case.expected is not None:
            assert case.expected.startswith(text), (case.body, text, case.expected)
    raise httpx.RemoteProtocolError("the stream ended without [DONE]")


@dataclass
class Load:
    """Threads that send requests until stopped. The first defect stops all of them."""

    server: Server
    cases: list[Case]
    counts: Counter[str] = field(default_factory=Counter)
    defects: list[BaseException] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def work(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._stopping.is_set() and not self.defects:
            case = draw.choice(self.cases)
            try:
                # A new connection for each request, so that requests reach all API processes.
                with self.server.client(headers={"Connection": "close"}) as http:
                    case.check(ask(http, case))
                self.counts[case.kind] += 1
            except (_Refused, httpx.TransportError):
                self.counts["failed"] += 1
            except BaseException as error:
                self.defects.append(error)

    def wait_for_answers(self, count: int) -> None:
        """Wait until `count` more requests have been answered."""
        goal = self.num_answered + count
        wait_until(lambda: self.num_answered >= goal or self.defects, lambda: str(self.counts))
        self.raise_defect()

    @property
    def num_answered(self) -> int:
        return sum(count for kind, count in list(self.counts.items()) if kind != "failed")

    def stop(self) -> None:
        self._stopping.set()

    def raise_defect(self) -> None:
        if self.defects:
            raise self.defects[0]


def reference_cases(server: Server) -> list[Case]:
    """The cases with the answers of an idle server. All answers of a kind differ."""
    with server.client() as http:
        found = [Case(case.kind, case.path, case.body, ask(http, case)) for case in _cases()]
    for kind in ("embed", "rerank", "maxsim"):
        values = [case.expected for case in found if case.kind == kind]
        for index, one in enumerate(values):
            for other in values[index + 1 :]:
                assert np.abs(one - other).max() > 0.01, "answers must differ, or a swap would not be seen"
    texts = [case.expected for case in found if case.kind == "generate"]
    assert len(set(texts)) == len(texts)
    return found


@contextmanager
def running_load(server: Server, cases: list[Case], num_threads: int, seed: int) -> Iterator[Load]:
    load = Load(server, cases)
    threads = [threading.Thread(target=load.work, args=(seed + n,)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a request was never answered"
    load.raise_defect()


def wait_until_idle(server: Server) -> None:
    """Wait until the engine holds no rows, comparisons or KV cache blocks."""
    for gauge in ("queue_rows", "queue_tokens", "running_rows", "kv_blocks", "comparisons"):
        server.wait_for_metric(f"penstock_{gauge}", 0)

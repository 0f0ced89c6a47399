"""Requests that do not fit into the queue are refused before they are tokenised."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from starlette.testclient import TestClient

from penstock.api.admission import Admission, TokenRatio
from penstock.api.app import build_app
from penstock.api.call import Call
from penstock.api.metrics import ApiMetrics
from penstock.api.run import _prepare
from penstock.api.state import ServedModel
from penstock.errors import QueueFull, QueueTooSlow
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import PooledOutput, Request, Task, Timings
from penstock.wire.status import EngineStatus, StatusReader, StatusWriter, create_status_page
from tests.api.scripted_app import make_state
from tests.text_models import ScriptedEngine, continue_with, write_text_model

SETTINGS = {
    "max_num_batched_tokens": 1000,
    "max_num_seqs": 100,
    "max_queued_tokens": 50_000,
    "max_queue_seconds": 5.0,
}
IDLE = EngineStatus(pid=1, tokens_per_s=1000)
SLOW = EngineStatus(pid=1, queued_tokens=9000, tokens_per_s=1000)  # 9 s of small requests
FULL = EngineStatus(pid=1, queued_tokens=50_000, tokens_per_s=1e6)
LARGE = EngineStatus(pid=1, queued_tokens=9000, queued_large_tokens=9000, tokens_per_s=1000)
PROMPTS = EngineStatus(pid=1, queued_prompt_tokens=9000, prompt_tokens_per_s=1000)


class PoolingEngine(ScriptedEngine):
    """An engine that answers pooling requests at once, or refuses them with a full queue."""

    refusal: QueueFull | None = None

    async def run(self, request: Request) -> PooledOutput:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        values = np.ones((request.num_rows, 8), dtype=np.float32)
        return PooledOutput(request.id, values, Timings(0.0, 0.0))


class Served:
    """An application whose engine status is published by the test."""

    def __init__(self, folder: Path, page: Path) -> None:
        create_status_page(page)
        self.writer = StatusWriter(page)
        self.engine = PoolingEngine(continue_with(Tokenizer(folder), "the water"))
        self.state = state = make_state(folder, self.engine, tasks=(Task.EMBED, Task.GENERATE))
        (self.model,) = state.models.values()
        self.model.admission = Admission(StatusReader(page), lambda: SETTINGS)
        self.http = TestClient(build_app(state))

    def publish(self, status: EngineStatus) -> None:
        self.writer.publish(status)

    def forbid_tokenising(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise AssertionError("the request was tokenised")

        for name in ("encode", "encode_short", "encode_with_offsets", "call"):
            monkeypatch.setattr(self.model.text.batcher, name, fail)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Iterator[Served]:
    served = Served(folder, tmp_path / "status")
    with served.http:
        yield served


def rejected(reason: str) -> float:
    return REGISTRY.get_sample_value("penstock_rejected_total", {"reason": reason}) or 0.0


@pytest.mark.parametrize(
    ("status", "reason", "retry_after"), [(SLOW, "wait", "5"), (FULL, "tokens", "1")], ids=["slow", "full"]
)
def test_a_request_is_refused_before_it_is_tokenised(
    served: Served, monkeypatch: pytest.MonkeyPatch, status: EngineStatus, reason: str, retry_after: str
) -> None:
    served.publish(status)
    served.forbid_tokenising(monkeypatch)
    before = rejected(reason)
    answer = served.http.post("/v1/embeddings", json={"input": ["the long water"] * 50})
    assert answer.status_code == 429, answer.text
    assert answer.headers["retry-after"] == retry_after
    assert answer.json()["error"]["reason"] == "queue_full"
    assert rejected(reason) == before + 1
    assert served.engine.requests == []


def test_a_prompt_is_refused_before_it_is_tokenised(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.publish(PROMPTS)
    served.forbid_tokenising(monkeypatch)
    for route, body in (
        ("/v1/completions", {"prompt": "find the water"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "find"}]}),
    ):
        answer = served.http.post(route, json=body)
        assert answer.status_code == 429, answer.text
        assert answer.headers["retry-after"] == "5"
    assert served.engine.requests == []


def test_prompts_that_wait_do_not_keep_texts_out_and_the_other_way_round(served: Served) -> None:
    served.publish(PROMPTS)
    assert served.http.post("/v1/embeddings", json={"input": "water"}).status_code == 200
    served.publish(SLOW)
    assert served.http.post("/v1/completions", json={"prompt": "water"}).status_code == 200


def test_an_idle_engine_takes_a_request_beyond_every_limit(served: Served) -> None:
    served.publish(IDLE)
    assert served.http.post("/v1/embeddings", json={"input": ["water " * 30] * 2000}).status_code == 200


def test_a_single_row_is_taken_beside_a_large_request_and_another_large_one_is_not(served: Served) -> None:
    served.publish(LARGE)
    assert served.http.post("/v1/embeddings", json={"input": "water"}).status_code == 200
    refused = served.http.post("/v1/embeddings", json={"input": ["water"] * 101})
    assert refused.status_code == 429 and "about 9.0 s to start" in refused.json()["error"]["message"]


def test_a_refusal_of_the_engine_tells_when_to_come_back(served: Served) -> None:
    served.engine.refusal = QueueTooSlow("waited 5 s")
    served.publish(IDLE)
    answer = served.http.post("/v1/embeddings", json={"input": "water"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    served.publish(EngineStatus(pid=1, queued_tokens=0, tokens_per_s=1000))

    class Busy(PoolingEngine):
        async def run(self, request: Request) -> PooledOutput:
            served.publish(EngineStatus(pid=1, queued_tokens=30_000, tokens_per_s=1000))
            raise QueueTooSlow("waited 5 s")

    served.model.engine = Busy(served.engine.script)
    answer = served.http.post("/v1/embeddings", json={"input": "water"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "26"


def admission(tmp_path: Path, status: EngineStatus, clock: Callable[[], float] | None = None) -> Admission:
    """An admission check whose clock, by default, advances by a second at every reading."""
    create_status_page(tmp_path / "page")
    StatusWriter(tmp_path / "page").publish(status)
    return Admission(StatusReader(tmp_path / "page"), lambda: SETTINGS, clock or itertools.count().__next__)


def test_a_small_request_right_behind_one_that_was_admitted_is_not_checked_and_later_ones_are(
    tmp_path: Path,
) -> None:
    now_s = 100.0
    door = admission(tmp_path, EngineStatus(pid=1, queued_tokens=1, tokens_per_s=1000), lambda: now_s)
    door.admit("Embed", 100)
    StatusWriter(tmp_path / "page").publish(SLOW)
    door.admit("Embed", 100)
    with pytest.raises(QueueTooSlow):
        door.admit("Embed", 40_000)
    with pytest.raises(QueueTooSlow):
        Admission(StatusReader(tmp_path / "page"), lambda: SETTINGS).admit("Embed", 100)
    now_s += 0.01
    with pytest.raises(QueueTooSlow):
        door.admit("Embed", 100)


def test_as_many_tokens_may_wait_as_the_engines_together_take(tmp_path: Path) -> None:
    create_status_page(page := tmp_path / "page")
    StatusWriter(page).publish(FULL)
    with pytest.raises(QueueFull):
        Admission(StatusReader(page), lambda: SETTINGS).admit("Embed", 100)
    Admission(StatusReader(page), lambda: SETTINGS, num_engines=lambda: 2).admit("Embed", 100)


def test_requests_that_are_still_tokenised_count_as_waiting(tmp_path: Path) -> None:
    door = admission(tmp_path, IDLE)
    first = door.admit("Embed", 160_000)  # about 40,000 tokens, which the engine does not count yet
    with pytest.raises(QueueTooSlow):
        door.admit("Embed", 20_000)
    with pytest.raises(QueueFull, match="about 40000 tokens are waiting"):
        door.admit("Embed", 160_000)
    door.tokenised("Embed", first, None)
    door.tokenised("Embed", door.admit("Embed", 160_000), 40_000)
    assert door._tokenising == [0, 0]


def test_a_request_that_fails_while_it_is_tokenised_is_counted_out(served: Served) -> None:
    answer = served.http.post("/v1/embeddings", json={"input": "water " * 5000})
    assert answer.status_code == 400, answer.text
    assert served.model.admission._tokenising == [0, 0]


def test_a_request_that_is_cancelled_while_it_is_tokenised_is_counted_out(served: Served) -> None:
    class Stuck:
        num_rows = 1

        async def prepare(self, *_: Any) -> Any:
            await asyncio.Event().wait()

    async def cancelled(model: ServedModel) -> None:
        call = Call(served.state, ApiMetrics(), 0.0)
        call.body_bytes = 4000
        task = asyncio.ensure_future(_prepare(call, model, Stuck()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert model.admission._tokenising == [1000, 0]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled(served.model))
    assert served.model.admission._tokenising == [0, 0]


def test_the_estimate_follows_the_requests_that_were_tokenised(tmp_path: Path) -> None:
    door = admission(tmp_path, IDLE)
    for _ in range(200):
        door.tokenised("Embed", door.admit("Embed", 1000), 900)
    assert door.admit("Embed", 1000).estimated_tokens == pytest.approx(900, abs=5)
    assert door.admit("Score", 1000).estimated_tokens == 250, "other kinds of bodies have their own"


def test_one_large_request_outweighs_many_small_ones() -> None:
    ratio = TokenRatio()
    for _ in range(10):
        ratio.learn(40, 40)
    ratio.learn(1_000_000, 200_000)
    assert ratio.estimate(1000) == pytest.approx(200, abs=2)


def test_nothing_is_refused_while_the_engine_is_not_ready_or_publishes_nothing(tmp_path: Path) -> None:
    create_status_page(tmp_path / "page")
    StatusWriter(tmp_path / "page").publish(FULL)
    for door in (Admission(StatusReader(tmp_path / "page"), dict), Admission()):
        assert door.admit("Embed", 10**9).estimated_tokens > 10**8

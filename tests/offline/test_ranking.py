"""Offline scores and rankings: in one call or in windows, from one task or several."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import AsyncEngine, Engine
from penstock.errors import BadValue, NotPossible
from penstock.tasks import run as task_run
from penstock.types import PoolingParams, Request, Task
from tests.checkpoints import WORDS, write_bert, write_cross_encoder

QUERY = "the long water"
DOCUMENTS = [" ".join(WORDS[i : i + 1 + i % 9]) for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("models") / "cross")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", threads=1) as running:
        yield running


def test_one_query_may_stand_for_all(engine: Engine) -> None:
    scores = engine.score(QUERY, DOCUMENTS)
    assert scores.shape == (60,) and scores.dtype == np.float32 and ((scores > 0) & (scores < 1)).all()
    np.testing.assert_allclose(engine.score([QUERY] * 60, DOCUMENTS), scores, atol=1e-6)
    np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS[7]), scores[7:8], atol=1e-5)


def test_a_score_does_not_depend_on_what_else_is_asked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engine.score(QUERY, DOCUMENTS)
    monkeypatch.setattr(task_run, "WINDOW_ROWS", 7)
    np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS), whole, atol=1e-5)
    backwards = engine.score(QUERY, DOCUMENTS[::-1])[::-1]
    np.testing.assert_allclose(backwards, whole, atol=1e-5)


def test_the_best_come_first_and_equals_keep_their_order(engine: Engine) -> None:
    found = engine.rerank(QUERY, [*DOCUMENTS[:5], *DOCUMENTS[:5]])
    scores = [row.score for row in found]
    assert scores == sorted(scores, reverse=True) and len(found) == 10
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert second.index == first.index + 5 and first.document == DOCUMENTS[first.index]
    assert engine.rerank(QUERY, DOCUMENTS, top_n=3) == engine.rerank(QUERY, DOCUMENTS)[:3]
    assert len(engine.rerank(QUERY, DOCUMENTS[:2], top_n=9)) == 2


def test_classes_and_scores_are_the_same_head(engine: Engine) -> None:
    """Rows of both tasks run in one step; a score is the probability of the only label."""
    request = engine.local.text.processor.prepare("a", ["a word"], PoolingParams(Task.CLASSIFY))
    score = Request("b", request.token_ids, request.lengths, PoolingParams(Task.SCORE))
    found = [engine.local.engine.submit(each).result().values for each in (request, score)]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


def test_what_makes_no_sense_is_refused(engine: Engine, tmp_path: Path) -> None:
    for wrong in ((QUERY, []), ([QUERY] * 2, ["a"]), (QUERY, [3])):
        with pytest.raises(BadValue):
            engine.score(*wrong)  # type: ignore[arg-type]
    for top_n in (0, -2):
        with pytest.raises(BadValue, match="top_n"):
            engine.rerank(QUERY, DOCUMENTS, top_n=top_n)
    with pytest.raises(BadValue, match="unknown option 'colour'"):
        engine.score(QUERY, DOCUMENTS, colour="red")
    with pytest.raises(BadValue, match="at most 64"):
        engine.score(QUERY, ["water " * 80])
    with pytest.raises(NotPossible, match="takes no instruction"):
        engine.score(QUERY, DOCUMENTS, instruction="be kind")
    with (
        Engine(str(write_cross_encoder(tmp_path / "three", labels=3)), device="cpu") as moods,
        pytest.raises(NotPossible, match="cannot score"),
    ):
        moods.score(QUERY, DOCUMENTS)


def test_embedders_have_the_task(tmp_path: Path) -> None:
    with Engine(str(write_bert(tmp_path / "bi")), device="null") as engine:
        assert Task.SCORE in engine.spec.tasks and engine.spec.score is None


def test_many_tasks_share_one_engine(engine: Engine, folder: Path) -> None:
    async def run() -> None:
        async with AsyncEngine(str(folder), device="cpu", threads=1) as shared:
            parts = [DOCUMENTS[i : i + 6] for i in range(0, 60, 6)]
            found = await asyncio.gather(*(shared.score(QUERY, part) for part in parts))
            np.testing.assert_allclose(np.concatenate(found), engine.score(QUERY, DOCUMENTS), atol=1e-5)
            best = await shared.rerank(QUERY, DOCUMENTS, top_n=4, use_activation=False)
            assert [row.index for row in best] == [row.index for row in engine.rerank(QUERY, DOCUMENTS)][:4]

    asyncio.run(run())

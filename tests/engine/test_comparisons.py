"""Comparisons of given vectors: queue limits, deadlines, cancellation, and parts of bounded size."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Engine
from penstock.engine.comparisons import ComparisonLimits, Comparisons
from penstock.engine.loop import EngineCore
from penstock.errors import BadValue, DeadlineExceeded, QueueFull, RowFailed
from penstock.inputs.vectors import MAX_DIM, check_cost, make_comparison
from penstock.runner import model_runner
from penstock.scoring.external_vectors import (
    CPU_LIMITS,
    PartLimits,
    compare_in_parts,
    plan_parts,
    tile_shape,
)
from penstock.types import Array, Comparison, Failure, PooledOutput
from tests.engine.fakes import Clock, ManualRunner
from tests.engine.fakes import make_core as make_core_of
from tests.waiting import wait_until

CPU = torch.device("cpu")


class ComparingRunner(ManualRunner):
    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[Comparison, Future[Array]]] = []

    def compare(self, comparison: Comparison) -> Future[Array]:
        self.started.append((comparison, Future()))
        return self.started[-1][1]

    @property
    def names(self) -> list[str]:
        return [comparison.id for comparison, _ in self.started]


def make_core() -> tuple[EngineCore, ComparingRunner, Clock]:
    runner, clock = ComparingRunner(), Clock()
    return make_core_of(runner, clock=clock), runner, clock


def comparison(
    name: str, vectors: int = 2, *, arrival_s: float = 0.0, deadline_s: float | None = None
) -> Comparison:
    made = make_comparison(name, [np.ones((1, 4))], [np.ones((vectors, 4))])
    made.arrival_s, made.deadline_s = arrival_s, deadline_s
    return made


SCORES = np.ones((1, 1), dtype=np.float32)


class TestQueue:
    def test_one_runs_at_a_time_in_order_of_arrival_and_the_wait_is_told_apart(self) -> None:
        core, runner, clock = make_core()
        for name in "abc":
            core.compare(comparison(name, arrival_s=clock.now_s))
        assert runner.names == ["a"] and core.num_comparisons == 3
        clock.now_s += 2.0
        runner.started[0][1].set_result(SCORES)
        (first,) = core.step()
        assert runner.names == ["a", "b"]
        clock.now_s += 3.0
        runner.started[1][1].set_result(SCORES)
        (second,) = core.step()
        assert isinstance(first, PooledOutput) and isinstance(second, PooledOutput)
        assert (first.timings.queue_s, first.timings.device_s) == (0.0, 2.0)
        assert (second.timings.queue_s, second.timings.device_s) == (2.0, 3.0)

    def test_an_id_in_use_is_refused(self) -> None:
        core, _, _ = make_core()
        core.compare(comparison("same"))
        with pytest.raises(BadValue, match="already in use"):
            core.compare(comparison("same"))

    @pytest.mark.parametrize("limits", [ComparisonLimits(1000, math.inf), ComparisonLimits(1 << 40, 2000)])
    def test_too_much_in_the_queue_is_refused_and_room_is_given_back(self, limits: ComparisonLimits) -> None:
        queue = Comparisons(limits)
        queue.add(comparison("first", vectors=500))  # an empty queue accepts any size
        with pytest.raises(QueueFull, match="comparisons are waiting"):
            queue.add(comparison("second"))
        assert queue.cancel("first")
        for name in "abc":
            queue.add(comparison(name))
        assert len(queue) == 3

    def test_a_deadline_drops_those_that_wait_and_those_that_run(self) -> None:
        core, runner, clock = make_core()
        core.compare(comparison("runs", deadline_s=clock.now_s + 2))
        core.compare(comparison("waits", deadline_s=clock.now_s + 1))
        core.compare(comparison("patient"))
        assert core.next_deadline_s() == clock.now_s + 1
        clock.now_s += 1
        (failed,) = core.step()
        assert isinstance(failed, Failure) and failed.id == "waits"
        assert isinstance(failed.error, DeadlineExceeded)
        clock.now_s += 1
        (failed,) = core.step()
        assert isinstance(failed, Failure) and failed.id == "runs"
        assert runner.started[0][1].cancelled() and runner.names == ["runs", "patient"]

    def test_one_that_has_waited_too_long_to_start_is_refused(self) -> None:
        core, _, clock = make_core()
        core.max_queue_s = 5.0
        for name in "abc":
            core.compare(comparison(name, arrival_s=clock.now_s))
            clock.now_s += 1
        clock.now_s += 3
        assert [(type(each), each.id) for each in core.step() if isinstance(each, Failure)] == [
            (Failure, "b")
        ]
        assert core.num_comparisons == 2, "the one that runs goes on"

    def test_cancelling_ends_the_running_one_and_starts_the_next(self) -> None:
        core, runner, _ = make_core()
        for name in "abc":
            core.compare(comparison(name))
        core.cancel("b")
        core.cancel("a")
        assert core.step() == [] and runner.started[0][1].cancelled()
        assert runner.names == ["a", "c"] and core.num_comparisons == 1
        core.cancel("c")
        assert not core.busy

    def test_errors_of_the_caller_keep_their_type_and_others_fail_the_row(self) -> None:
        core, runner, _ = make_core()
        core.compare(comparison("a"))
        core.compare(comparison("b"))
        runner.started[0][1].set_exception(BadValue("too large", param="documents"))
        (first,) = core.step()
        runner.started[1][1].set_exception(ZeroDivisionError())
        (second,) = core.step()
        assert isinstance(first, Failure) and isinstance(first.error, BadValue)
        assert isinstance(second, Failure) and isinstance(second.error, RowFailed)


def random_comparison(
    queries: list[int], documents: list[int], dtype: str, seed: int, width: int = 6
) -> Comparison:
    draw = np.random.default_rng(seed)

    def matrices(lengths: list[int]) -> list[Any]:
        if dtype == "int8":
            return [draw.integers(-128, 128, (n, width)) for n in lengths]
        return [draw.standard_normal((n, width)) for n in lengths]

    def scales(lengths: list[int]) -> list[Any] | None:
        return [draw.random(n) for n in lengths] if dtype == "int8" else None

    return make_comparison(
        "a",
        matrices(queries),
        matrices(documents),
        dtype=dtype,
        query_scales=scales(queries),
        document_scales=scales(documents),
    )


def scores_of(compared: Comparison, limits: PartLimits = CPU_LIMITS) -> Array:
    *parts, scores = compare_in_parts(compared, CPU, limits)
    assert scores is not None and not any(part is not None for part in parts)
    return scores


class TestParts:
    @settings(max_examples=50, deadline=None)
    @given(
        st.lists(st.integers(0, 30), min_size=1, max_size=8),
        st.booleans(),
        st.integers(0, 30),
        st.sampled_from(["float32", "float16", "int8"]),
        st.integers(32, 3000),
        st.integers(48, 800),
        st.integers(1, 100),
    )
    def test_a_comparison_in_small_parts_has_the_scores_of_the_whole(
        self,
        documents: list[int],
        one_query: bool,
        query: int,
        dtype: str,
        max_operations: int,
        max_bytes: int,
        max_products: int,
    ) -> None:
        queries = [query] if one_query else [(query + n) % 7 for n in range(len(documents))]
        compared = random_comparison(queries, documents, dtype, seed=query)
        limits = PartLimits(max_operations, max_bytes, max_products)
        parts = list(plan_parts(compared, limits))
        covered = [index for part in parts for index in range(part.first, part.end)]
        assert covered == list(range(len(documents)))
        for part in parts:
            if not part.is_divided:
                lengths = compared.document_lengths[part.first : part.end]
                of_queries = compared.query_lengths[compared.pairs[part.first : part.end]]
                assert (lengths * of_queries).max() <= max_products
                assert (lengths * of_queries).sum() * 32 <= max_operations
                assert 4 * 6 * lengths.sum() <= max_bytes
        np.testing.assert_allclose(scores_of(compared, limits), scores_of(compared), rtol=1e-4, atol=1e-3)

    @given(st.integers(1, 10**7), st.integers(1, 10**7), st.integers(1, MAX_DIM))
    def test_the_tiles_of_any_pair_are_bounded(self, queries: int, documents: int, width: int) -> None:
        tile_queries, tile_documents = tile_shape(queries, documents, width, CPU_LIMITS)
        assert 1 <= tile_queries <= queries and 1 <= tile_documents <= documents
        assert tile_queries * tile_documents <= CPU_LIMITS.max_products
        assert tile_queries * tile_documents * width <= CPU_LIMITS.max_operations
        assert 4 * width * (tile_queries + tile_documents) <= CPU_LIMITS.max_bytes

    def test_thirty_thousand_narrow_vectors_on_both_sides_need_little_memory(self) -> None:
        """An earlier version used 3.8 GB."""
        draw = np.random.default_rng(0)
        query, document = (draw.standard_normal((30_000, 1)).astype(np.float32) for _ in range(2))
        compared = make_comparison("a", [query], [document])
        scores_of(make_comparison("small", [query[:9]], [document[:9]]))  # makes torch load its libraries
        with lowest_peak() as added_bytes:
            found = scores_of(compared)
        assert added_bytes() < 150 << 20
        best = np.where(query > 0, query * document.max(), query * document.min())
        assert found[0, 0] == pytest.approx(best.sum(dtype=np.float64), rel=1e-5)

    def test_one_long_query_with_many_short_documents_needs_little_memory(self) -> None:
        draw = np.random.default_rng(0)
        query = draw.standard_normal((200_000, 1)).astype(np.float32)
        documents = [draw.standard_normal((1, 1)).astype(np.float32) for _ in range(200)]
        compared = make_comparison("a", [query], documents)
        with lowest_peak() as added_bytes:
            found = scores_of(compared)
        assert added_bytes() < 150 << 20
        total = query.sum(dtype=np.float64)
        np.testing.assert_allclose(found[:, 0], np.concatenate(documents)[:, 0] * total, rtol=1e-3, atol=1e-2)

    def test_scores_beyond_float32_are_refused_with_the_document(self) -> None:
        fine, huge = [[1.0, 1.0]], [[3e38, 3e38]]
        with pytest.raises(BadValue, match=r"documents\[1\]"):
            scores_of(make_comparison("a", [[[2.0, 2.0]]], [fine, huge]))
        divided = PartLimits(max_operations=32, max_bytes=64, max_products=1)
        with pytest.raises(BadValue, match=r"documents\[1\]"):
            scores_of(make_comparison("a", [[[2.0, 2.0], [2.0, 1.0]]], [fine, huge]), divided)


class lowest_peak:
    """Measures how far the process's peak memory rises above its memory at the beginning."""

    def __enter__(self) -> Any:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        except OSError:
            pytest.skip("the system does not reset the peak memory of a process")
        before = _status_kb("VmRSS")
        return lambda: 1024 * (_status_kb("VmHWM") - before)

    def __exit__(self, *_: object) -> None:
        return None


def _status_kb(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu", threads=1) as running:
        yield running


def test_steps_run_between_the_parts_of_a_comparison_and_a_cancelled_one_ends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [0]

    def endless(comparison: Comparison, device: torch.device) -> Iterator[Array | None]:
        while True:
            parts[0] += 1
            yield None

    monkeypatch.setattr(model_runner, "compare_in_parts", endless)
    local = engine.local.engine

    async def scene() -> None:
        tasks = [asyncio.create_task(local.compare(comparison(name))) for name in ("runs", "waits")]
        await asyncio.to_thread(wait_until, lambda: parts[0] > 3)
        assert (await asyncio.to_thread(engine.embed, "a step")).shape == (1, 384)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(wait_until, lambda: not local.core.busy)

    asyncio.run(scene())
    assert engine.embed("another step").shape == (1, 384)
    ended = parts[0]  # the part that was running at the cancellation ended before this step
    assert engine.embed("a further step").shape == (1, 384)
    assert parts[0] == ended


class TestSizes:
    @pytest.mark.parametrize("dim", [0, -1, MAX_DIM + 1, 2**62, 2**70])
    def test_a_width_beyond_the_limits_is_refused(self, dim: int) -> None:
        with pytest.raises(BadValue, match="dim is"):
            make_comparison("a", [""], [""], dim=dim)

    def test_vectors_that_are_too_wide_are_refused(self) -> None:
        wide = np.ones((1, MAX_DIM + 1), dtype=np.float32)
        with pytest.raises(BadValue, match=f"at most {MAX_DIM}"):
            make_comparison("a", [wide], [wide])

    def test_a_comparison_that_takes_minutes_is_refused(self) -> None:
        many = np.ones((200_000, 1), dtype=np.float32)
        check_cost(make_comparison("a", [many[:30_000]], [many[:30_000]]))
        with pytest.raises(BadValue, match="products"):
            check_cost(make_comparison("a", [many], [many]))

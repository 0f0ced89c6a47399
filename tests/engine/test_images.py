"""Rows with images in the engine's loop. Steps share a store of image features on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.loop import EngineCore
from penstock.errors import NotPossible
from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.scheduler import Budget, Chunking, Scheduler
from penstock.types import (
    Array,
    Failure,
    PooledOutput,
    PooledResult,
    PoolPlan,
    Request,
    StepPlan,
    StepResult,
)
from tests.helpers import make_images, make_request
from tests.thinning import num_examples

GARBAGE = -1e6
Fails = Callable[[int, PoolPlan], bool]


def feature(patches: Array, index: int) -> float:
    """The fake tower's feature for a token of an image. It depends on every pixel and on the token."""
    return float((int(patches.astype(np.int64).sum()) * 31 + index * 7) % 10_007)


class FakeDevice:
    """A fake device with a feature store. A failed step leaves garbage in the slots that it should write."""

    def __init__(self, slots: int, fails: Fails, *, ends_at_once: bool) -> None:
        self.store = np.full(slots, GARBAGE)
        self.sums: dict[tuple[str, int], float] = {}  # running sums of chunked rows
        self.fails, self.ends_at_once = fails, ends_at_once
        self.plans: list[PoolPlan] = []
        self.in_flight: deque[tuple[Future[StepResult], StepResult | Exception]] = deque()

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        assert isinstance(plan, PoolPlan)
        future: Future[StepResult] = Future()
        failed = self.fails(len(self.plans), plan)
        self.plans.append(plan)
        result: StepResult | Exception = ValueError("this step fails") if failed else self._compute(plan)
        if failed and plan.images is not None:
            self.store[plan.images.write_slots] = GARBAGE
        self.in_flight.append((future, result))
        if self.ends_at_once:
            self.end_step()
        return future

    def end_step(self) -> None:
        future, result = self.in_flight.popleft()
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def close(self) -> None:
        return None

    def _compute(self, plan: PoolPlan) -> PooledResult:
        values = plan.token_ids.astype(np.float64)
        if (images := plan.images) is not None:
            written = [feature(patches, i) for patches in images.patches for i in range(len(patches))]
            self.store[images.write_slots] = written
            values[images.tokens] = self.store[images.read_slots]
        rows = np.add.reduceat(values, plan.cu_lengths[:-1])
        for part in plan.slices:
            for at, (row, step_row) in enumerate(zip(part.rows, part.step_rows, strict=True)):
                if part.begins is not None and part.begins[at] > 0:
                    rows[step_row] += self.sums.get((part.request.id, int(row)), GARBAGE)
                self.sums[part.request.id, int(row)] = rows[step_row]
        outputs = [rows if variant.rows is None else rows[variant.rows] for variant in plan.variants]
        return PooledResult(tuple(each.astype(np.float32)[:, None] for each in outputs), device_s=0.1)


def expected(request: Request) -> list[float]:
    out = []
    for row, (start, length) in enumerate(zip(request.starts, request.lengths, strict=True)):
        values = request.token_ids[start : start + length].astype(np.float64)
        images = request.images
        for image in () if images is None else np.flatnonzero(images.rows == row):
            assert images is not None
            patches = images.patches[images.cu_patches[image] : images.cu_patches[image + 1]]
            for token in range(int(images.num_tokens[image])):
                values[int(images.starts[image]) + token] = feature(patches, token)
        out.append(float(values.sum()))
    return out


@st.composite
def image_requests(draw: st.DrawFn) -> list[Request]:
    """Rows of 4 to 20 tokens, some with an image of one token per patch. Images repeat."""
    requests = []
    for number in range(draw(st.integers(1, 6))):
        lengths = draw(st.lists(st.integers(4, 20), min_size=1, max_size=4))
        request = make_request(f"r{number}", lengths, first_token=100 * number)
        grids, rows, starts = [], [], []
        for row, length in enumerate(lengths):
            if draw(st.booleans()):
                grid = draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 3)]))
                grids.append(grid)
                rows.append(row)
                starts.append(draw(st.integers(0, length - grid[0] * grid[1])))
        if grids:
            counts = [height * width for height, width in grids]
            seed = draw(st.integers(0, 2))
            request.images = make_images(grids, rows, starts=starts, num_tokens=counts, seed=seed)
        requests.append(request)
    return requests


def make_core(device: FakeDevice, *, depth: int, chunked: bool, max_patches: int = 1 << 30) -> EngineCore:
    pool = BlockPool(64, 4)
    scheduler = Scheduler(
        Budget(24, 8, 10**9, max_patches=max_patches),
        Chunking(pool, 7) if chunked else None,
        image_cache=ImageCache(len(device.store)),
    )
    return EngineCore(device, scheduler, depth=depth, share_identical=False)  # type: ignore[arg-type]


def answers(core: EngineCore, device: FakeDevice, requests: list[Request]) -> dict[str, object]:
    out: dict[str, object] = {}
    failures = [failure for request in requests for failure in core.submit(request)]
    assert not failures
    while core.busy:
        for outcome in core.step():
            assert isinstance(outcome, PooledOutput | Failure)
            out[outcome.id] = outcome.error if isinstance(outcome, Failure) else outcome.values[:, 0].tolist()
        if device.in_flight:
            device.end_step()
    return out


@given(image_requests(), st.booleans(), st.integers(1, 2), st.sets(st.integers(0, 12), max_size=4))
@settings(max_examples=num_examples(60), deadline=None)
def test_every_row_gets_the_features_of_its_own_images_whatever_fails(
    requests: list[Request], chunked: bool, depth: int, failing: set[int]
) -> None:
    """Only steps with several requests fail, so that each request succeeds when it runs again alone."""

    def fails(number: int, plan: PoolPlan) -> bool:
        return number in failing and len(plan.slices) > 1

    device = FakeDevice(24, fails, ends_at_once=False)
    core = make_core(device, depth=depth, chunked=chunked)
    got = answers(core, device, requests)
    assert got == {request.id: expected(request) for request in requests}
    assert core.scheduler.image_cache is not None
    core.scheduler.image_cache.check_integrity()


@given(image_requests(), st.integers(1, 2))
@settings(max_examples=num_examples(30), deadline=None)
def test_chunks_wait_for_room_in_a_small_store(requests: list[Request], depth: int) -> None:
    """A chunk needs store slots for whole images, so several chunks may need more slots than they have
    tokens."""
    device = FakeDevice(5, lambda *_: False, ends_at_once=False)
    core = make_core(device, depth=depth, chunked=True)
    assert answers(core, device, requests) == {request.id: expected(request) for request in requests}


def test_a_poisoned_image_fails_its_own_request_alone() -> None:
    requests = [make_request(name, [6, 5]) for name in ("good", "bad", "text")]
    requests[0].images = make_images([(2, 2)], [0], num_tokens=[4], seed=1)
    requests[1].images = make_images([(1, 2)], [1], num_tokens=[2], seed=2)
    poison = requests[1].images.patches

    def fails(number: int, plan: PoolPlan) -> bool:
        ran = () if plan.images is None else plan.images.patches
        return any(np.array_equal(patches, poison) for patches in ran)

    device = FakeDevice(24, fails, ends_at_once=True)
    got = answers(make_core(device, depth=1, chunked=False), device, requests)
    assert got["good"] == expected(requests[0]) and got["text"] == expected(requests[2])
    assert "this step fails" in str(got["bad"])


def test_an_image_runs_once_in_a_step_and_not_again_while_it_is_cached() -> None:
    first, again = (make_request(name, [4, 4, 4]) for name in ("a", "b"))
    page = make_images([(2, 1)], [0], num_tokens=[2])
    first.images = again.images = page
    twice = make_request("c", [4, 4])
    twice.images = type(page)(
        np.concatenate([page.patches] * 2),
        np.concatenate([page.grids] * 2),
        np.array([0, 1], dtype=np.int32),
        np.array([0, 2], dtype=np.int32),
        np.array([2, 2], dtype=np.int32),
        np.concatenate([page.digests] * 2),
    )
    device = FakeDevice(24, lambda *_: False, ends_at_once=True)
    core = make_core(device, depth=1, chunked=False)
    for request in (twice, first, again):
        assert answers(core, device, [request]) == {request.id: expected(request)}
    assert [plan.images.num_images for plan in device.plans if plan.images is not None] == [1, 0, 0]


def test_a_salt_separates_the_features_of_equal_images() -> None:
    device = FakeDevice(24, lambda *_: False, ends_at_once=True)
    core = make_core(device, depth=1, chunked=False)
    for salt in ("", "tenant"):
        request = make_request(f"of {salt}", [4])
        request.images, request.cache_salt = make_images([(1, 1)], [0]), salt
        answers(core, device, [request])
    assert [plan.images.num_images for plan in device.plans if plan.images is not None] == [1, 1]


def test_a_step_has_no_more_patches_than_its_budget_unless_one_row_needs_them() -> None:
    requests = [make_request(f"r{number}", [4]) for number in range(4)]
    for number, request in enumerate(requests):
        grid = (4, 4) if number == 3 else (2, 3)
        request.images = make_images([grid], [0], num_tokens=[1], seed=number)
        request.images.patches[:] = number
    device = FakeDevice(24, lambda *_: False, ends_at_once=True)
    device._compute = lambda plan: PooledResult((np.zeros((plan.num_rows, 1), np.float32),))  # type: ignore[method-assign]
    answers(make_core(device, depth=1, chunked=False, max_patches=12), device, requests)
    assert [plan.images.num_patches for plan in device.plans if plan.images is not None] == [12, 6, 16]


def test_a_request_with_images_is_refused_where_there_is_no_tower() -> None:
    request = make_request("a", [4])
    request.images = make_images([(1, 1)], [0])
    core = EngineCore(FakeDevice(1, lambda *_: False, ends_at_once=True), Scheduler(Budget(8, 8, 8)))  # type: ignore[arg-type]
    with pytest.raises(NotPossible, match="reads no images"):
        core.add(request)


def test_an_input_with_more_image_tokens_than_the_store_holds_is_refused() -> None:
    request = make_request("a", [20])
    request.images = make_images([(5, 5)], [0], num_tokens=[20])
    device = FakeDevice(12, lambda *_: False, ends_at_once=True)
    (failure,) = make_core(device, depth=1, chunked=False).submit(request)
    assert isinstance(failure, Failure) and "20 tokens; the engine can hold 12" in str(failure.error)

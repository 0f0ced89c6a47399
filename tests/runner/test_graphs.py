"""Buckets, layouts, and the choice between graph and eager steps, with fake graph captures."""

from __future__ import annotations

import weakref
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import EngineConfig, Machine, ModelFacts, resolve
from penstock.errors import DeviceOutOfMemory
from penstock.kvcache.store import KVCache
from penstock.runner import graphs as module
from penstock.runner.buckets import (
    MAX_LENGTHS,
    ROWS,
    TOKENS,
    Bucket,
    Layout,
    NoGroups,
    bucket_of,
    cached_keys_of,
    max_layout_size,
)
from penstock.runner.capture import MAX_FAILURES, Work
from penstock.runner.graph_policy import USES_BEFORE_CAPTURE
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import OutputDtype, PoolingParams, PoolPlan, Task
from tests.helpers import ints, make_request
from tests.runner.fake_graphs import CPU, Clock, Model, fake, make_runner, plan_of, replayed


@pytest.mark.parametrize("tokens", [size + more for size in TOKENS for more in (-1, 0, 1)])
def test_a_step_gets_the_smallest_bucket_that_holds_it(tokens: int) -> None:
    bucket = bucket_of(tokens, 1, tokens)
    if tokens > TOKENS[-1]:
        assert bucket is None
        return
    assert bucket is not None and bucket.rows == 1
    assert bucket.tokens == bucket.max_length == min(size for size in TOKENS if size >= tokens)


def test_any_step_fits_its_bucket_and_no_bucket_is_much_larger() -> None:
    draw = np.random.default_rng(0)
    found = 0
    for _ in range(3000):
        lengths = draw.integers(1, int(draw.integers(2, 600)), int(draw.integers(1, 300)))
        tokens, rows, longest = int(lengths.sum()), len(lengths), int(lengths.max())
        bucket = bucket_of(tokens, rows, longest)
        if bucket is None:
            continue
        found += 1
        assert bucket.tokens >= tokens and bucket.rows >= rows and bucket.max_length >= longest
        assert bucket.rows <= bucket.tokens and bucket.max_length <= bucket.tokens
        if tokens > 256:
            assert bucket.tokens < tokens * 1.5
        assert bucket.rows < 4 * rows + 1
    assert found > 500


def test_most_combinations_of_sizes_share_a_bucket() -> None:
    pairs = {bucket_of(t, r, n) for t in TOKENS for r in ROWS for n in MAX_LENGTHS if r <= t and n <= t}
    assert len(pairs) < len(TOKENS) * len(ROWS) * len(MAX_LENGTHS) / 2


def test_a_step_of_very_different_lengths_has_no_bucket() -> None:
    assert bucket_of(8000, 1000, 4000) is None
    assert bucket_of(8000, 1000, 60) == Bucket(8192, 1024, 64)
    assert bucket_of(100, 2000, 1) is None
    assert bucket_of(0, 0, 0) is None


@pytest.mark.parametrize("types", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_a_layout_writes_the_step_and_pads_the_rest(types: bool, skip: bool) -> None:
    plan = plan_of(
        5, 3, 9, type_ids=[1] * 17 if types else None, skip=[2, 1, 3] if skip else None, first_token=7
    )
    layout = Layout.of(Bucket(32, 4, 16), has_types=types, has_skip=skip)
    out = np.full(layout.size, -99, dtype=np.int32)
    layout.write(out, plan)
    assert out[layout.cu_lengths].tolist() == [0, 3, 8, 17, 17]
    assert out[layout.lengths].tolist() == [3, 5, 9, 0]
    assert out[layout.token_ids].tolist() == [*plan.token_ids.tolist(), *[0] * 15]
    assert out[layout.positions].tolist() == [*plan.positions.tolist(), *[0] * 15]
    assert (layout.type_ids is not None) == types and (layout.skip is not None) == skip
    if layout.type_ids is not None:
        assert out[layout.type_ids].tolist() == [1] * 17 + [0] * 15
    if layout.skip is not None:
        assert out[layout.skip].tolist() == [1, 2, 3, 0]
    optional = [part for part in (layout.type_ids, layout.skip) if part is not None]
    parts = sorted(
        (part.start, part.stop)
        for part in (layout.cu_lengths, layout.lengths, layout.token_ids, layout.positions, *optional)
    )
    assert all(stop <= start for (_, stop), (start, _) in pairwise(parts))
    assert all(start % 4 == 0 for start, _ in parts) and layout.size <= max_layout_size()


def test_iterating_over_the_groups_of_an_unknown_step_raises() -> None:
    assert not NoGroups()
    with pytest.raises(RuntimeError, match="equal length"):
        list(NoGroups())


@pytest.mark.parametrize("narrowed", [0, 1 << 20])
@pytest.mark.parametrize("method", ["mean", "cls", "last", "mean_sqrt_len"])
@pytest.mark.parametrize(
    "lengths",
    [(1,), (16,), (17,), (3, 9, 1), (40,) * 5, (1, 2, 64, 65), (500, 1), (512,), (100,) * 9, (20, 1) * 64],
)
def test_a_replay_equals_the_eager_step_whatever_the_padding_holds(
    method: str, lengths: tuple[int, ...], narrowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_PRUNED_SIZE", narrowed)
    runner, graphs = make_runner(method)
    for first in (1, 50, 400):  # the first step's graph replays the others
        plan = plan_of(*lengths, first_token=first)
        expected = runner._step(plan).outputs
        result = replayed(runner, graphs, plan)
        (values,) = result.outputs
        assert values.shape == expected[0].shape and not result.finite
        np.testing.assert_allclose(values, expected[0], atol=1e-6)
    assert len(graphs.captured) == 1 and graphs.replays == 3


@pytest.mark.parametrize("method", ["cls", "last"])
@pytest.mark.parametrize("skip", [False, True])
def test_a_large_graph_prunes_its_last_layer_to_the_tokens_that_are_read(
    method: str, skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_PRUNED_SIZE", 512 * Model.hidden_size)
    runner, graphs = make_runner(method)
    model: Any = runner.model
    for lengths in ((100,) * 9, (300, 20, 300, 300), (1, 1, 1, 590)):
        left = [length // 2 for length in lengths] if skip else None
        plan = plan_of(*lengths, skip=left)
        model.seen.clear()
        (values,) = replayed(runner, graphs, plan).outputs
        assert all(len(batch.output_tokens.tokens) == batch.num_rows for batch in model.seen)
        model.prunes_last_layer = False
        expected = runner._step(plan).outputs
        model.prunes_last_layer = True
        np.testing.assert_allclose(values, expected[0], atol=1e-6)
    model.seen.clear()
    replayed(runner, graphs, plan_of(40, 40))  # too small to prune
    replayed(runner, graphs, plan_of(590, params=PoolingParams(Task.TOKEN_EMBED)))
    assert all(batch.output_tokens is None for batch in model.seen)


def test_a_graph_serves_every_step_of_its_bucket() -> None:
    runner, graphs = make_runner()
    for lengths in ((20, 30), (5, 60, 7), (64, 64, 64, 64), (33,), (200,), (60, 61, 62, 63)):
        plan = plan_of(*lengths)
        (values,) = replayed(runner, graphs, plan).outputs
        np.testing.assert_allclose(values, runner._step(plan).outputs[0], atol=1e-6)
    assert len(graphs.captured) < 6


@pytest.mark.parametrize("dtype", OutputDtype)
def test_a_replay_gives_every_output_dtype_and_its_finite_flags(dtype: OutputDtype) -> None:
    runner, graphs = make_runner()
    plan = plan_of(3, 8, 5, params=PoolingParams(dtype=dtype))
    eager, result = runner._step(plan), replayed(runner, graphs, plan)
    (values,), (expected,) = result.outputs, eager.outputs
    assert values.dtype == expected.dtype and (values == expected).all()
    assert len(result.finite) == len(eager.finite)
    assert all((flag == 1).all() and flag.shape == (3,) for flag in result.finite)


@pytest.mark.parametrize("task", [Task.TOKEN_EMBED, Task.CLASSIFY, Task.EMBED])
def test_a_step_of_one_task_is_pooled_inside_the_graph(task: Task) -> None:
    runner, graphs = make_runner()
    plan = plan_of(3, 8, 4, params=PoolingParams(task))
    key = graphs.key_of(plan)
    assert key is not None and key.params == PoolingParams(task)
    (values,) = replayed(runner, graphs, plan).outputs
    np.testing.assert_allclose(values, runner._step(plan).outputs[0], atol=1e-6)


def test_mixed_steps_share_a_graph_that_ends_with_the_model() -> None:
    runner, graphs = make_runner()
    wants = (PoolingParams(), PoolingParams(dimensions=4), PoolingParams(Task.TOKEN_EMBED))
    requests = [make_request(str(i), [3, 8], params=params, skip=[1, 0]) for i, params in enumerate(wants)]
    mixed = build_plan([ScheduledRows(request, ints([0, 1])) for request in requests])
    cut = plan_of(10, 23, params=PoolingParams(dimensions=4), skip=[1, 2])
    for plan in (mixed, cut, mixed):
        key = graphs.key_of(plan)
        assert key is not None and key.params is None
        values = replayed(runner, graphs, plan).outputs
        for mine, theirs in zip(values, runner._step(plan).outputs, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)
    assert graphs.replays == 3


def test_a_captured_batch_has_the_shape_of_its_bucket() -> None:
    runner, graphs = make_runner()
    replayed(runner, graphs, plan_of(20, 30, 7))
    batch = runner.model.seen[-1]  # type: ignore[attr-defined]
    assert (batch.num_tokens, batch.num_rows, batch.max_length) == (64, 4, 64)
    assert isinstance(batch.groups, NoGroups)


def test_a_shape_is_captured_once_it_repeats_and_waits_for_the_host() -> None:
    _, graphs = make_runner()
    plan = plan_of(20, 30)
    key = graphs.key_of(plan)
    assert key is not None
    for _ in range(USES_BEFORE_CAPTURE + 3):
        assert graphs.prepare(key, plan) is None, "nothing is known of how long it takes"
    graphs.observe(key, host_s=0.001, device_s=0.004)
    assert graphs.prepare(key, plan) is None, "the device is the limit"
    graphs.observe(key, host_s=0.004, device_s=0.0041)
    assert graphs.prepare(key, plan) is None, "the least of each counts"
    _, graphs = make_runner()
    for _ in range(USES_BEFORE_CAPTURE):
        assert graphs.prepare(key, plan) is None
    graphs.observe(key, host_s=0.004, device_s=0.0041)
    tries = [graphs.prepare(key, plan) is not None for _ in range(3)]
    assert tries == [False, True, True], "the device waited for the host, twice as long as a capture takes"


def test_steps_that_only_precompile_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graphs = make_runner()
    plan = plan_of(200, 300)
    key = graphs.key_of(plan)
    assert (
        key is not None
        and [graphs.prepare(key, plan) for _ in range(USES_BEFORE_CAPTURE)] == [None] * USES_BEFORE_CAPTURE
    )
    monkeypatch.setattr(module, "is_precompiling", lambda: True)
    graphs.observe(key, host_s=0.004, device_s=0.0001)
    monkeypatch.setattr(module, "is_precompiling", lambda: False)
    assert graphs.prepare(key, plan) is None, "nothing is known of it"
    graphs.observe(key, host_s=0.004, device_s=0.0001)
    assert [graphs.prepare(key, plan) is not None for _ in range(3)] == [False, True, True]


def test_a_small_step_uses_a_larger_graph_until_its_own_is_captured() -> None:
    runner, graphs = make_runner()
    roomy, small = plan_of(*[60] * 6), plan_of(40, 50, 60, 41, 30)  # 384 and 256 tokens, up to 16 rows
    replayed(runner, graphs, roomy)
    (taken,) = graphs.captured
    key = graphs.key_of(small)
    assert key is not None and key != taken and taken.serves(key) and not key.serves(taken)
    graphs.policy.times.replayed(taken.bucket.tokens, 0.002)
    graphs.policy.times.replayed(key.bucket.tokens, 0.001)
    for _ in range(USES_BEFORE_CAPTURE):
        results = runner._replay(graphs, key, small)
        assert results is not None and list(graphs.captured) == [taken]
        torch.testing.assert_close(results.outputs[0], runner._step(small).outputs[0])
    results = runner._replay(graphs, key, small)  # captured, because the shape repeats and padding costs time
    assert results is not None and list(graphs.captured) == [taken, key]
    torch.testing.assert_close(results.outputs[0], runner._step(small).outputs[0])


def test_a_larger_graph_serves_only_steps_that_fit_and_pool_the_same_way() -> None:
    _, graphs = make_runner()
    base = graphs.key_of(plan_of(40, 50, 60, 41, 30))
    assert base is not None and base.bucket == Bucket(256, 16, 64)
    for bucket, serves in (
        (Bucket(384, 16, 64), True),
        (Bucket(512, 32, 128), True),
        (Bucket(2048, 16, 64), True),  # the policy decides whether the padding is worth it
        (Bucket(384, 64, 1024), False),  # most programs of attention would have no work
        (Bucket(384, 4, 128), False),
        (Bucket(384, 16, 32), False),
    ):
        assert base._replace(bucket=bucket).serves(base) is serves
    for flag in ("has_types", "has_skip"):  # a step without them can pass zeros; the reverse is impossible
        more = base._replace(**{flag: True})
        assert more.serves(base) and not base.serves(more)
    assert not base._replace(params=None).serves(base)
    some = base._replace(max_cached_keys=4096)
    assert base._replace(max_cached_keys=16384).serves(some) and not some.serves(
        base._replace(max_cached_keys=16384)
    )
    assert not some.serves(base) and not base.serves(some)


@pytest.mark.parametrize("method", ["last", "cls"])
def test_a_graph_with_type_ids_and_skip_serves_steps_without_them(method: str) -> None:
    runner, graphs = make_runner(method)
    replayed(runner, graphs, plan_of(*[60] * 6, skip=[7] * 6, type_ids=[1] * 360))
    (taken,) = graphs.captured
    assert taken.has_skip and taken.has_types
    plain = plan_of(40, 50, 60, 41, 30)
    key = graphs.key_of(plain)
    assert key is not None and not key.has_skip and not key.has_types
    results = runner._replay(graphs, key, plain)
    assert results is not None and list(graphs.captured) == [taken]
    torch.testing.assert_close(results.outputs[0], runner._step(plain).outputs[0])


def test_a_larger_graph_replays_a_step_if_padding_costs_less_than_launching() -> None:
    runner, graphs = make_runner()
    replayed(runner, graphs, plan_of(*[60] * 16))  # 1,024 tokens
    (taken,) = graphs.captured
    graphs.policy.captured(taken, 100.0)  # captures take long, so none is due
    plan = plan_of(*[50] * 12)  # 640 tokens
    key = graphs.key_of(plan)
    assert key is not None and taken.serves(key)
    assert runner._replay(graphs, key, plan) is None, "nothing is known of what either takes"
    graphs.observe(key, host_s=0.004, device_s=0.004)
    graphs.policy.times.replayed(taken.bucket.tokens, 0.0039)
    assert runner._replay(graphs, key, plan) is None, "padding would cost as much"
    graphs.policy.times.replayed(taken.bucket.tokens, 0.001)
    results = runner._replay(graphs, key, plan)
    assert results is not None and list(graphs.captured) == [taken]
    torch.testing.assert_close(results.outputs[0], runner._step(plan).outputs[0])


def test_a_new_graph_replays_smaller_steps_if_it_is_smaller_than_the_last_one() -> None:
    runner, graphs = make_runner()
    graphs.observe(graphs.key_of(plan_of(20)), host_s=0.004, device_s=0.004)  # type: ignore[arg-type]
    small = plan_of(*[50] * 6)
    key = graphs.key_of(small)
    assert key is not None
    for lengths in ([60] * 16, [60] * 12):
        replayed(runner, graphs, plan_of(*lengths))
        graphs.policy.times.replayed(list(graphs.captured)[-1].bucket.tokens, 0.001)
        assert runner._replay(graphs, key, small) is not None
        assert graphs.last_replayed is list(graphs.captured.values())[-1]


def test_a_pause_follows_every_capture() -> None:
    clock = Clock()

    def slow(work: Work) -> Any:
        clock.now += 1.0
        return fake(work)

    _, graphs = make_runner(capture=slow, clock=clock)
    plans = [plan_of(20), plan_of(100), plan_of(400)]
    for plan in plans * (USES_BEFORE_CAPTURE + 1):
        key = graphs.key_of(plan)
        assert key is not None
        graphs.prepare(key, plan)
        graphs.observe(key, 1.0, 1.0)
    assert len(graphs.captured) == 1
    clock.now += 3.0
    graphs.prepare(graphs.key_of(plans[1]), plans[1])  # type: ignore[arg-type]
    assert len(graphs.captured) == 1
    clock.now += 1.1
    graphs.prepare(graphs.key_of(plans[1]), plans[1])  # type: ignore[arg-type]
    assert len(graphs.captured) == 2


def test_a_failed_capture_is_not_repeated_and_the_step_runs_eagerly() -> None:
    tries = []

    def broken(work: Work) -> Any:
        tries.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    runner, graphs = make_runner(capture=broken)
    with graphs.capture_on_first_use():
        for length in (10, 10, 20, 20, 40, 100, 200):
            plan = plan_of(length)
            key = graphs.key_of(plan)
            assert key is not None and runner._replay(graphs, key, plan) is None
    assert len(tries) == MAX_FAILURES and not graphs.captured


@pytest.mark.parametrize("when", ["first run", "capture"])
def test_a_capture_out_of_memory_holds_nothing_and_the_step_runs_eagerly(when: str) -> None:
    held: list[Any] = []

    def short(work: Work) -> Any:
        outputs = work() if when == "capture" else [torch.zeros(4)]
        held.extend(weakref.ref(output) for output in outputs)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    clock = Clock()
    runner, graphs = make_runner(capture=short, clock=clock)
    plan = plan_of(5, 9)
    key = graphs.key_of(plan)
    assert key is not None
    with graphs.capture_on_first_use():
        assert runner._replay(graphs, key, plan) is None
    assert held and all(output() is None for output in held)
    assert key in graphs.refused and not graphs.captured
    (values,) = runner.launch(plan).result().outputs
    np.testing.assert_array_equal(values, runner._step(plan).outputs[0])
    other = graphs.key_of(plan_of(200))
    assert other is not None
    graphs.policy.uses[other] = USES_BEFORE_CAPTURE + 1
    graphs.policy.times.ran_eagerly(other.bucket.tokens, 1.0, 1.0)
    assert not graphs._is_due(other, None), "memory is scarce for a while"
    assert not graphs.capture_next(), "also if nobody waits"
    clock.now += 61
    assert graphs._is_due(other, None)


def test_graphs_are_dropped_when_a_step_runs_out_of_memory() -> None:
    runner, graphs = make_runner()
    plan = plan_of(5, 9)
    replayed(runner, graphs, plan)
    outputs = [weakref.ref(output) for graph in graphs.captured.values() for output in graph.outputs]

    class Full(ModelRunner):
        def _launch_on_cuda(self, plan: PoolPlan) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    full = Full(runner.model, runner.pooler, CPU, 2)
    full.device, full.graphs = SimpleNamespace(type="cuda", index=None), graphs  # type: ignore[assignment]
    with pytest.raises(DeviceOutOfMemory):
        full.launch(plan)
    assert not graphs.captured and graphs.output_bytes == 0
    assert outputs and all(output() is None for output in outputs)


def test_a_model_that_cannot_be_captured_is_tried_once() -> None:
    asked = []

    def by_groups(work: Work) -> Any:
        asked.append(list(NoGroups()))

    _, graphs = make_runner(capture=by_groups)
    with graphs.capture_on_first_use():
        for length in (10, 20):
            plan = plan_of(length)
            assert graphs.prepare(graphs.key_of(plan), plan) is None  # type: ignore[arg-type]
    assert graphs._failures == MAX_FAILURES and not graphs.refused


def test_the_number_of_graphs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAPHS", 2)
    _, graphs = make_runner()
    with graphs.capture_on_first_use():
        for length in (10, 20, 40, 100):
            plan = plan_of(length)
            graphs.prepare(graphs.key_of(plan), plan)  # type: ignore[arg-type]
    assert len(graphs.captured) == 2


def test_the_output_memory_of_graphs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTPUT_BYTES", 64 * 8 * 4 + 1)
    _, graphs = make_runner()
    with graphs.capture_on_first_use():
        for length in (60, 100, 200):
            plan = plan_of(length, params=PoolingParams(Task.TOKEN_EMBED))
            graphs.prepare(graphs.key_of(plan), plan)  # type: ignore[arg-type]
    assert [key.bucket.tokens for key in graphs.captured] == [64, 128] and graphs.is_full


def test_a_step_that_cannot_be_replayed_has_no_key() -> None:
    _, graphs = make_runner()
    assert graphs.key_of(plan_of(4, 5, key_limits=[2, 5])) is None
    kept = ScheduledRows(make_request("k", [6]), ints([0]), ints([0]), ints([3]), ((0,),))
    assert graphs.key_of(build_plan([kept], block_size=16)) is None
    assert graphs.key_of(plan_of(TOKENS[-1] + 1)) is None


def cut_plan(remembered: int = 21) -> PoolPlan:
    """A chunked step: a row that continues, a row that begins, and a whole row that caches nothing."""
    length, begin = remembered + 40, remembered
    table = tuple(range(3, 3 + -(-length // 16)))
    shares = [
        ScheduledRows(make_request("a", [length]), ints([0]), ints([begin]), ints([begin + 30]), (table,)),
        ScheduledRows(make_request("b", [9]), ints([0]), ints([0]), ints([4]), ((1,),)),
        ScheduledRows(make_request("c", [6]), ints([0]), ints([0]), ints([6]), (None,)),
    ]
    return build_plan(shares, block_size=16)


def test_a_layout_writes_a_chunked_row_and_padding_is_written_to_no_cache_slot() -> None:
    plan = cut_plan()
    kv = plan.kv
    assert kv is not None
    bucket = bucket_of(plan.num_tokens, plan.num_rows, plan.max_length)
    assert bucket is not None
    max_cached_keys = cached_keys_of(len(kv.read_slots))
    layout = Layout.of(bucket, has_types=False, has_skip=False, max_cached_keys=max_cached_keys)
    assert layout.kv is not None
    out = np.full(layout.size, 99, dtype=np.int32)
    layout.write(out, plan)
    assert out[layout.kv.cu_keys].tolist() == [0, 4, 10, 61, *[61] * (bucket.rows - 3)]
    slots = out[layout.kv.token_slots]
    assert slots[:4].tolist() == [16, 17, 18, 19] and (slots[4:10] == -1).all()
    assert slots[10:40].tolist() == list(range(48 + 21, 48 + 51)) and (slots[40:] == -1).all()
    assert out[layout.kv.read_slots][:21].tolist() == list(range(48, 48 + 21))
    assert (slots[kv.write_tokens] == kv.write_slots).all() and (slots >= 0).sum() == len(kv.write_slots)


@pytest.mark.parametrize(("remembered", "room"), [(0, 4096), (4096, 4096), (4097, 16384), (65536, 65536)])
def test_cached_keys_have_few_bucket_sizes(remembered: int, room: int) -> None:
    assert cached_keys_of(remembered) == room


def test_too_many_cached_keys_have_no_bucket() -> None:
    assert cached_keys_of(65537) is None


@pytest.mark.parametrize(("method", "wanted"), [("last", True), ("mean", False)])
def test_steps_that_use_the_kv_cache_are_replayed_unless_they_carry_sums(
    method: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runner.graphs.reads_in_place", lambda store: True)
    _, graphs = make_runner(method)
    plan = cut_plan()
    assert graphs.key_of(plan) is None
    graphs.cache = KVCache(object(), torch.zeros(1))  # type: ignore[assignment]
    key = graphs.key_of(plan)
    assert (key is not None) is wanted
    if key is not None:
        assert key.max_cached_keys == 4096 and key.params is None
        whole = graphs.key_of(plan_of(30, 4, 6))
        assert whole is not None and whole.max_cached_keys is None and whole != key
    assert graphs.key_of(cut_plan(70000)) is None


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        ({"enforce_eager": True}, False),
        ({"dtype": "float32"}, False),
        ({"dtype": "float16"}, True),
        ({"model_impl": "transformers"}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_graphs_are_for_native_models_in_half_precision_on_cuda(
    changes: dict[str, Any], wanted: bool
) -> None:
    machine = Machine(cpus=2, cuda=True, bf16=True)
    assert resolve(EngineConfig(**changes), ModelFacts(max_model_len=512), machine).graphs is wanted

"""Graph policy: when a graph is captured, when a larger graph is used instead, and which shapes are saved for
the next start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from penstock.runner import graph_history, graph_policy, warmup
from penstock.runner.buckets import Bucket, bucket_of
from penstock.runner.capture import Work
from penstock.runner.graph_history import GraphHistory
from penstock.runner.graph_keys import Key
from penstock.runner.graph_policy import (
    IDLE_SHARE,
    MAX_PLANNED,
    MIN_IDLE_S,
    USES_BEFORE_CAPTURE,
    GraphPolicy,
    StepTimes,
)
from penstock.runner.likely_shapes import likely_buckets
from penstock.types import OutputDtype, PoolingParams, Task
from tests.runner.fake_graphs import Clock, fake, make_runner, plan_of, replayed

EMBED = PoolingParams()


def key_of(tokens: int, rows: int = 4, max_length: int = 64, **more: Any) -> Key:
    bucket = bucket_of(tokens, rows, max_length)
    assert bucket is not None
    return Key(bucket, False, False, EMBED)._replace(**more)


def measured(host_s: float = 0.004, per_token_s: float = 1e-6) -> GraphPolicy:
    """A policy with measured step times. Device time grows with the number of tokens."""
    policy = GraphPolicy()
    policy.times.ran_eagerly(64, host_s, host_s)
    for tokens in (64, 1024, 16384):
        policy.times.replayed(tokens, tokens * per_token_s)
    return policy


def test_times_between_known_sizes_are_interpolated_and_beyond_them_in_proportion() -> None:
    times = StepTimes()
    assert times.device_s(64) is None and times.gain_s(64) == 0
    times.replayed(1024, 0.002)
    times.replayed(2048, 0.003)
    times.replayed(2048, 0.009)  # the shortest time counts
    assert times.device_s(1024) == 0.002 and times.device_s(512) == pytest.approx(0.001)
    assert times.device_s(1536) == pytest.approx(0.0025) and times.device_s(4096) == pytest.approx(0.006)


def test_an_eager_step_measures_the_device_only_if_the_device_is_the_bottleneck() -> None:
    times = StepTimes()
    times.ran_eagerly(1024, host_s=0.004, device_s=0.0041)
    assert times.device_s(1024) is None and times.gain_s(1024) == 0.004
    times.ran_eagerly(4096, host_s=0.004, device_s=0.02)
    assert times.device_s(4096) == 0.02 and times.gain_s(4096) == 0, "a graph would save nothing"
    assert times.gain_s(64) > 0.003, "what a large step takes says nothing against small graphs"


def test_a_shape_is_captured_under_load_once_its_steps_lost_the_time_of_a_capture() -> None:
    policy, key, roomy = measured(), key_of(500), key_of(1000)
    policy.captured(roomy, 0.02)
    due = []
    for _ in range(8):
        policy.uses[key] += 1
        due.append(policy.is_due(key, None))
    gain = policy.times.gain_s(512)
    assert due.index(True) == max(USES_BEFORE_CAPTURE, -(-0.02 // gain) - 1)
    borrowing = key_of(700)
    policy.uses[borrowing] = 100
    lost_s = 0.001024 - 0.000768  # time that each step loses to padding
    uses = [policy.is_due(borrowing, roomy) for _ in range(100)]
    assert uses.index(True) + 1 == pytest.approx(0.02 / lost_s, abs=1), "a borrowed graph loses little"


def test_a_planned_shape_is_captured_at_once_if_no_larger_graph_can_replay_it() -> None:
    policy, key = measured(), key_of(500)
    policy.plan([key])
    assert not policy.is_due(key, key_of(1000)) and policy.is_due(key, None)
    policy.captured(key, 0.01)
    assert policy.num_planned == 0 and not policy.is_due(key, None)


def test_a_larger_graph_replays_a_step_up_to_the_cost_of_an_eager_step() -> None:
    policy = measured(host_s=0.004, per_token_s=1e-6)
    assert policy.may_borrow(key_of(1000), key_of(3000)) and not policy.may_borrow(key_of(1000), key_of(4000))
    assert not policy.may_borrow(key_of(8000), key_of(9000)), "the device is the limit"
    unknown = GraphPolicy()
    assert unknown.may_borrow(key_of(300), key_of(600)) and not unknown.may_borrow(key_of(600), key_of(700))


def test_a_large_step_gains_by_a_graph_only_while_the_device_waits_for_the_host() -> None:
    policy, large = measured(host_s=0.001), key_of(8192)
    times = policy.times
    assert times.gain_s(8192) == 0 and policy.prefers_eager(large)
    for _ in range(200):
        times.followed(0.004, device_s=0.008)
    assert times.waits_for_host and times.gain_s(8192) > 0 and not policy.prefers_eager(large)
    for _ in range(20):
        policy.note_use(large)
        due = policy.is_due(large, None)
    assert due
    assert policy.may_borrow(key_of(8000), key_of(8192)) and not policy.may_borrow(large, key_of(16384))
    for _ in range(200):
        times.followed(0.0005, device_s=0.008)
    assert times.waits_for_host, "a graph makes the gaps shorter, and must stay in use then"
    for _ in range(200):
        times.followed(-1e-6, device_s=0.008)
    assert not times.waits_for_host and policy.prefers_eager(large)


def test_a_pause_without_requests_does_not_count_as_waiting_for_the_host() -> None:
    times = measured().times
    for _ in range(200):
        times.followed(0.1, device_s=0.001)
    assert not times.waits_for_host


def test_planned_shapes_come_in_order_and_those_without_gain_not_at_all() -> None:
    policy = measured()
    policy.plan([key_of(100), key_of(12_000), key_of(1000)])
    policy.plan([key_of(500), key_of(1000)])  # shapes planned later come first
    found = [policy.next_planned(unavailable=[key_of(100)]) for _ in range(4)]
    assert found == [key_of(500), key_of(1000), None, None]
    policy.plan(key_of(size, rows) for size in range(500, 8000, 100) for rows in (1, 4, 16, 64))
    assert policy.num_planned <= MAX_PLANNED


def test_the_largest_worthwhile_shape_can_be_captured_first_for_its_memory() -> None:
    policy = measured()
    policy.plan([key_of(100), key_of(12_000), key_of(1000), key_of(500)])
    policy.plan_largest_first()
    found = [policy.next_planned(unavailable=[]) for _ in range(4)]
    assert found == [key_of(1000), key_of(100), key_of(500), None]
    policy.plan_largest_first()
    assert policy.num_planned == 0


def test_idle_captures_take_planned_shapes_then_those_that_lost_most_time() -> None:
    policy = measured()
    for key, steps in ((key_of(100), 1), (key_of(500), 5), (key_of(900, adapter_rank=8), 9)):
        for _ in range(steps):
            policy.is_due(key, None)
    policy.plan([key_of(1000)])
    assert policy.next_idle([]) == key_of(1000)
    assert policy.next_idle([]) == key_of(500)
    assert policy.next_idle([key_of(500)]) == key_of(100)
    assert policy.has_idle_work([key_of(500)]) and not policy.has_idle_work([key_of(500), key_of(100)])


def test_a_longer_capture_needs_a_longer_idle_time() -> None:
    policy = measured(host_s=0.001)
    assert policy.min_idle_s == MIN_IDLE_S
    policy.captured(key_of(100), 0.1)
    assert policy.min_idle_s == pytest.approx(IDLE_SHARE * 0.1)


def test_rare_shapes_are_forgotten_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_policy, "MAX_KNOWN", 8)
    policy = measured()
    for number in range(50):
        for key in (key_of(100), key_of(500, params=PoolingParams(Task.ENTITIES, num_labels=number))):
            policy.note_use(key)
            policy.is_due(key, None)
    assert policy.uses[key_of(100)] == 50 and len(policy.uses) <= 8 and len(policy._lost_s) <= 8


def test_likely_buckets_are_the_same_on_every_start_and_within_the_limits() -> None:
    counts = likely_buckets(512, 8192, 1024)
    assert counts == likely_buckets(512, 8192, 1024) and len(counts) <= MAX_PLANNED
    assert all(bucket == bucket_of(*bucket) and bucket.tokens <= 8192 for bucket in counts)
    assert {bucket.rows for bucket in counts} >= {1, 4, 16, 64, 128}
    assert {bucket.rows for bucket in likely_buckets(512, 8192, 1)} == {1}


class Slow:
    """A capture that takes one second."""

    def __init__(self) -> None:
        self.clock = Clock()

    def __call__(self, work: Work) -> Any:
        self.clock.now += 1.0
        return fake(work)


def test_warm_up_captures_planned_graphs_in_order_within_its_time() -> None:
    slow = Slow()
    _, graphs = make_runner(capture=slow, clock=slow.clock)
    keys = [key_of(tokens) for tokens in (100, 900, 30, 400)]
    graphs.policy.plan(keys)
    warmup.capture_graphs(graphs, 2.5, slow.clock)
    assert list(graphs.captured) == keys[:3] and graphs.policy.num_planned == 1
    assert graphs.has_idle_work and graphs.capture_next() and list(graphs.captured) == keys
    assert not graphs.has_idle_work and not graphs.capture_next()


def test_a_graph_that_was_captured_without_a_step_gives_the_answers_of_the_eager_step() -> None:
    runner, graphs = make_runner()
    plans = [plan_of(40, 50, 60, 41, 30), plan_of(64), plan_of(*[90] * 20), plan_of(3, 300)]
    keys = [graphs.key_of(plan) for plan in plans]
    graphs.policy.plan(key for key in keys if key is not None)
    warmup.capture_graphs(graphs, 60.0)
    assert list(graphs.captured) == keys
    for key, plan in zip(keys, plans, strict=True):
        assert key is not None
        result = runner._replay(graphs, key, plan)
        assert result is not None
        torch.testing.assert_close(result.outputs[0], runner._step(plan).outputs[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"bucket": Bucket(100, 4, 64)},  # not a size of a bucket
        {"bucket": Bucket(128, 4, 100)},
        {"params": PoolingParams(dimensions=64)},
        {"max_cached_keys": 4096},  # there is no KV cache
        {"is_prompt": True, "params": None},
        {"adapter_rank": 8},
    ],
)
def test_a_shape_that_does_not_fit_the_engine_is_not_captured(changes: dict[str, Any]) -> None:
    _, graphs = make_runner()
    key = key_of(100)._replace(**changes)
    assert not graphs.can_capture(key) and graphs.can_capture(key_of(100))
    graphs.policy.plan([key])
    assert graphs.capture_next() and not graphs.captured and not graphs.has_idle_work


def test_forgotten_graphs_are_planned_again_and_those_dropped_for_memory_are_not() -> None:
    runner, graphs = make_runner()
    replayed(runner, graphs, plan_of(40, 50))
    (key,) = graphs.captured
    graphs.forget()
    assert not graphs.captured and graphs.capture_next() and list(graphs.captured) == [key]
    graphs.forget()
    assert runner._replay(graphs, key, plan_of(40, 50)) is not None, "or with the first step that needs it"
    assert list(graphs.captured) == [key]
    graphs.policy.plan([key_of(900)])
    graphs.drop()
    assert not graphs.captured and graphs.policy.num_planned == 0


def test_history_keeps_shapes_in_the_order_of_what_their_graphs_saved(tmp_path: Path) -> None:
    policy = measured()
    used = {key_of(100): 10, key_of(900, rows=16, max_length=200): 500, key_of(12_000, 64): 9000}
    policy.uses.update(used)
    policy.uses[key_of(500, adapter_rank=8)] = 1000
    GraphHistory("model a", tmp_path).save(policy.most_used())
    again = GraphHistory("model a", tmp_path)
    assert again.load() == [key_of(900, rows=16, max_length=200), key_of(100), key_of(12_000, 64)]
    again.save([(key_of(30), 1)])
    third = GraphHistory("model a", tmp_path)
    assert third.load()[0] == key_of(30) and len(third.load()) == 4
    assert GraphHistory("model b", tmp_path).load() == []


def test_every_part_of_a_shape_survives_the_file(tmp_path: Path) -> None:
    params = PoolingParams(Task.TOKEN_EMBED, normalize=False, dtype=OutputDtype.INT8)
    keys = [
        Key(Bucket(128, 4, 64), True, False, params),
        Key(Bucket(128, 4, 64), False, True, None, 4096, is_prompt=True),
    ]
    GraphHistory("m", tmp_path).save((key, 3) for key in keys)
    assert GraphHistory("m", tmp_path).load() == keys


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 1, "identity": "other", "shapes": []}',
        b'{"format": 2, "identity": "m", "shapes": []}',
        b'{"format": 1, "identity": "m", "shapes": [["many", 1, 1]]}',
        b'{"format": 1, "identity": "m", "shapes": []}' + b" " * graph_history.MAX_BYTES,
        b"\xff\xfe",
    ],
)
def test_a_damaged_or_foreign_record_is_ignored_and_logged(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = GraphHistory("m", tmp_path)
    history.file.write_bytes(content)
    with caplog.at_level("INFO", "penstock.graphs"):
        assert history.load() == []
    assert "is ignored" in caplog.text
    history.save([(key_of(100), 1)])
    assert GraphHistory("m", tmp_path).load() == [key_of(100)]


def test_a_history_is_bounded_and_holds_no_more_than_sizes_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_history, "MAX_SHAPES", 5)
    monkeypatch.setattr(graph_history, "MAX_FILES", 2)
    keys = [key_of(size) for size in range(300, 1100, 100)]
    for name in "abc":
        GraphHistory(name, tmp_path).save((key, 1) for key in keys)
    assert len(list(tmp_path.iterdir())) == 2
    record = msgspec.json.decode(GraphHistory("c", tmp_path).file.read_bytes())
    assert set(record) == {"format", "identity", "shapes"} and len(record["shapes"]) == 5


def test_a_read_only_cache_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = GraphHistory("m", tmp_path / "file" / "below")
    history.save([(key_of(100), 1)])
    history.close([(key_of(100), 1)])
    assert history.load() == []


def test_a_runner_captures_what_warm_up_left_one_graph_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, graphs = make_runner()
    assert runner.min_idle_s is None
    monkeypatch.setattr(runner, "_use_device", lambda: None)
    runner.graphs, ensured = graphs, []
    runner.decode = SimpleNamespace(ensure=ensured.append)  # type: ignore[assignment]
    graphs.policy.plan([key_of(100), key_of(900)])
    decode: Any = object()
    runner.planned_decodes.append(decode)
    counts = []
    while runner.min_idle_s is not None:
        runner.run_idle()
        counts.append(len(graphs.captured) + len(ensured))
    assert counts == [1, 2, 3] and ensured == [decode]

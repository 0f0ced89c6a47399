from __future__ import annotations

from typing import Any

import pytest

from penstock.bench import sweep as module
from penstock.bench.load.plan import Traffic
from penstock.bench.report.sweep import sweep_table
from penstock.bench.sweep import Sweep, parse, sweep, traffic_at
from penstock.errors import BadValue


class FakeRun:
    """A server with ten slots: latency is constant up to ten requests, and grows with the queue above."""

    def __init__(self, load: float, unit: str, interrupted: bool = False) -> None:
        from penstock.bench.report.metrics import ClientCost, Spread, Summary

        base_ms, slots = 10.0, 10.0
        if unit == "concurrency":
            done = min(load, slots) / base_ms * 1000
            mean = load / done * 1000
        else:
            done = min(load, 1000.0)
            mean = base_ms / max(0.01, 1 - min(load, 990.0) / 1000)
        self.mean = mean
        e2el = Spread(mean, mean, 0.0, {"99": mean * 1.2})
        zeros: dict[str, Any] = dict.fromkeys(Summary.__struct_fields__, 0)
        self.summary = Summary(
            **zeros
            | {
                "completed": 100,
                "request_throughput": done,
                "spreads": {"e2el": e2el},
                "client": ClientCost(1, 0, 0, 0, 0),
            }
        )
        self.outcome = type("Outcome", (), {"interrupted": interrupted})()


@pytest.fixture(autouse=True)
def _judged_by_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    def share_within_goal(run: Any, goals: dict[str, float]) -> float:
        return float(all(run.mean * 1.2 <= limit for limit in goals.values()))

    monkeypatch.setattr(module, "_share_within_goal", share_within_goal)


def swept(unit: Any, loads: list[float], **goals: float) -> Sweep:
    return sweep(unit, loads, goals, lambda load: FakeRun(load, unit))  # type: ignore[arg-type, return-value]


def test_the_knee_is_where_all_slots_are_busy() -> None:
    found = swept("concurrency", [1, 2, 5, 10, 20, 40])
    assert found.knee is not None
    assert found.knee.load == 10


def test_without_loads_the_concurrency_doubles_until_throughput_stops_growing() -> None:
    found = swept("concurrency", [])
    assert [point.load for point in found.points] == [1, 2, 4, 8, 16, 32, 64]


def test_rates_are_shares_of_the_highest_throughput() -> None:
    found = sweep("rate", [], {}, lambda load: FakeRun(min(load, 2000.0), "rate"))  # type: ignore[arg-type, return-value]
    assert [point.load for point in found.points] == [100, 250, 500, 700, 800, 900, 1000, 1100]


def test_the_highest_load_within_the_goal_is_refined() -> None:
    found = swept("concurrency", [1, 10, 100], e2el=36.0)  # above ten, 1.2 × load ms: up to 30
    assert found.best is not None
    assert 26 <= found.best.load <= 30
    assert [point.load for point in found.points] == sorted(point.load for point in found.points)


def test_a_goal_that_no_load_meets_is_reported() -> None:
    found = swept("concurrency", [1, 2], e2el=1.0)
    assert found.best is None
    assert "none of these" in sweep_table(found)


def test_an_interrupted_sweep_keeps_its_points() -> None:
    runs = iter([FakeRun(1, "concurrency"), FakeRun(2, "concurrency", interrupted=True)])
    found = sweep("concurrency", [1, 2, 4], {}, lambda load: next(runs))  # type: ignore[arg-type, return-value]
    assert [point.load for point in found.points] == [1, 2]


@pytest.mark.parametrize("text", ["", "speed", "rate=", "rate=0", "concurrency=1.5", "concurrency=a"])
def test_an_invalid_sweep_is_refused(text: str) -> None:
    with pytest.raises(BadValue, match="--sweep"):
        parse(text)


def test_loads_are_sorted_and_unique() -> None:
    assert parse("rate=20,5,20") == ("rate", [5.0, 20.0])


def test_a_point_keeps_the_rest_of_the_traffic() -> None:
    base = Traffic(keepalive=False, max_concurrency=7)
    assert traffic_at("rate", 5.0, base).max_concurrency == 7
    point = traffic_at("concurrency", 5.0, base)
    assert (point.max_concurrency, point.keepalive, point.duration_s) == (5, False, 10.0)

"""Sweep over rising loads, to find the knee of throughput over latency, and the highest load that meets a
latency goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from penstock.bench.load.plan import Traffic
from penstock.bench.report.metrics import good_count, measured_ms
from penstock.bench.run import Run
from penstock.errors import BadValue

Unit = Literal["concurrency", "rate"]
DEFAULT_POINT_S = 10.0  # duration of a point without --duration
REQUIRED_SHARE = 0.99  # share of requests that must meet the goal
_MIN_GAIN = 0.05  # a sweep without given loads ends after two points with less growth of throughput
_MAX_CONCURRENCY = 4096
# Rates of a sweep, as shares of the highest throughput.
_RATE_SHARES = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
_MAX_REFINEMENTS = 4  # extra points between the last good load and the first bad one
_CLOSE_ENOUGH = 1.1  # no extra points if the two loads are within this factor


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    load: float
    run: Run
    share_within_goal: float  # share of all requests; 1 without a goal

    @property
    def power(self) -> float:
        """Throughput divided by latency, which is greatest at the knee."""
        mean = self.run.summary.spreads["e2el"].mean
        return self.run.summary.request_throughput / mean if mean else 0.0


@dataclass(slots=True)
class Sweep:
    unit: Unit
    goals: Mapping[str, float]
    points: list[Point] = field(default_factory=list)

    @property
    def knee(self) -> Point | None:
        return max(self.points, key=lambda point: point.power, default=None)

    @property
    def best(self) -> Point | None:
        """The highest load that meets the goal. Loads above the first that misses it do not count."""
        if not self.goals:
            return None
        good: Point | None = None
        for point in sorted(self.points, key=lambda point: point.load):
            if point.share_within_goal < REQUIRED_SHARE:
                break
            good = point
        return good


class Interrupted(Exception):
    """A point was interrupted."""


def parse(text: str) -> tuple[Unit, list[float]]:
    """Parse `concurrency` or `rate`, alone or with loads: `concurrency=1,8,64`."""
    unit, equals, values = text.partition("=")
    try:
        loads = sorted({float(value) for value in values.split(",")}) if equals else []
    except ValueError:
        loads = [-1.0]
    whole = unit != "concurrency" or all(load == int(load) for load in loads)
    if unit not in ("concurrency", "rate") or any(load <= 0 for load in loads) or not whole:
        raise BadValue(
            f"--sweep {text!r}: give concurrency or rate, alone or with loads such as concurrency=1,8,64"
        )
    return ("concurrency" if unit == "concurrency" else "rate"), loads


def sweep(
    unit: Unit, loads: Sequence[float], goals: Mapping[str, float], measure: Callable[[float], Run]
) -> Sweep:
    """Measure the given loads, or loads chosen for the server, then refine around the goal's limit."""
    result = Sweep(unit, goals)

    def add(load: float) -> Point:
        run = measure(load)
        result.points.append(point := Point(load, run, _share_within_goal(run, goals)))
        if run.outcome.interrupted:
            raise Interrupted
        return point

    try:
        if loads:
            for load in loads:
                add(load)
        elif unit == "concurrency":
            _double(add)
        else:
            _by_share(add, result)
        if goals:
            _refine(result, add)
    except Interrupted:
        pass
    result.points.sort(key=lambda point: point.load)
    return result


def traffic_at(unit: Unit, load: float, base: Traffic) -> Traffic:
    duration_s = base.duration_s or DEFAULT_POINT_S
    if load == float("inf"):  # as fast as the server allows
        return msgspec.structs.replace(
            base, max_concurrency=base.max_concurrency or 256, duration_s=duration_s
        )
    if unit == "concurrency":
        return msgspec.structs.replace(base, max_concurrency=int(load), duration_s=duration_s)
    return msgspec.structs.replace(base, request_rate=load, duration_s=duration_s)


def _double(add: Callable[[float], Point]) -> None:
    load, best, flat = 1, 0.0, 0
    while load <= _MAX_CONCURRENCY and flat < 2:
        done = add(load).run.summary.request_throughput
        flat = 0 if done > best * (1 + _MIN_GAIN) else flat + 1
        best, load = max(best, done), load * 2


def _by_share(add: Callable[[float], Point], result: Sweep) -> None:
    highest = add(float("inf")).run.summary.request_throughput
    result.points.clear()  # this point only sets the scale
    if highest <= 0:
        raise BadValue("the server completed no request, so there is no load to sweep")
    for share in _RATE_SHARES:
        add(float(f"{highest * share:.3g}"))


def _refine(result: Sweep, add: Callable[[float], Point]) -> None:
    for _ in range(_MAX_REFINEMENTS):
        low = result.best
        above = [point.load for point in result.points if low is None or point.load > low.load]
        if low is None or not above or min(above) <= low.load * _CLOSE_ENOUGH:
            return
        middle = (low.load * min(above)) ** 0.5
        if result.unit == "concurrency":
            middle = round(middle)
            if middle in (low.load, min(above)):
                return
        add(float(f"{middle:.3g}") if result.unit == "rate" else middle)


def _share_within_goal(run: Run, goals: Mapping[str, float]) -> float:
    summary = run.summary
    total = summary.completed + summary.failed
    if not total:
        return 0.0
    values = measured_ms(run.outcome.samples, run.load.backend.generates)
    return good_count(values, goals, summary.completed) / total

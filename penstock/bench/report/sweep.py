"""The table and the saved result of a sweep."""

from __future__ import annotations

from typing import Any

from penstock.bench.report.result import result_of
from penstock.bench.report.table import WIDTH
from penstock.bench.sweep import REQUIRED_SHARE, Point, Sweep


def sweep_table(found: Sweep) -> str:
    lines = [" Load Sweep ".center(WIDTH + 24, "=")]
    goal = " within goal" if found.goals else ""
    lines.append(
        f"{found.unit:>12} {'req/s':>9} {'tok/s':>10} {'mean ms':>9} {'p50 ms':>9} {'p99 ms':>9}{goal}"
    )
    for point in found.points:
        lines.append(_row(found, point))
    lines.append("=" * (WIDTH + 24))
    if found.knee is not None:
        summary = found.knee.run.summary
        lines.append(
            f"Knee (most throughput for its latency): {found.unit} {found.knee.load:g}, "
            f"{summary.request_throughput:.2f} req/s at {summary.spreads['e2el'].mean:.1f} ms"
        )
    if found.goals:
        goals = " ".join(f"{name}:{limit:g}" for name, limit in found.goals.items())
        best = found.best
        lines.append(
            f"Highest load within {goals} for {REQUIRED_SHARE:.0%} of requests: "
            + (f"{found.unit} {best.load:g}, {_done(best):.2f} req/s" if best else "none of these")
        )
    return "\n".join(lines)


def _row(found: Sweep, point: Point) -> str:
    summary = point.run.summary
    e2el = summary.spreads["e2el"]
    marks = "  ← knee" if point is found.knee else ""
    marks += "  ← highest within the goal" if point is found.best else ""
    marks += f"  {summary.failed} failed" if summary.failed else ""
    kept = f" {point.share_within_goal:>10.1%}" if found.goals else ""
    return (
        f"{point.load:>12g} {summary.request_throughput:>9.1f} {summary.total_token_throughput:>10.0f} "
        f"{e2el.mean:>9.1f} {e2el.median:>9.1f} {e2el.percentiles['99']:>9.1f}{kept}{marks}"
    )


def _done(point: Point) -> float:
    return point.run.summary.request_throughput


def sweep_points(found: Sweep) -> list[dict[str, Any]]:
    """The points of the page's charts."""
    return [
        {
            "load": point.load,
            "request_throughput": _done(point),
            "median_e2el_ms": point.run.summary.spreads["e2el"].median,
            "p99_e2el_ms": point.run.summary.spreads["e2el"].percentiles["99"],
        }
        for point in found.points
    ]


def sweep_result(found: Sweep, settings: dict[str, Any]) -> dict[str, Any]:
    """All points with all their samples."""
    runs = [
        {"load": point.load, "within_goal": point.share_within_goal}
        | result_of({}, point.run.traffic, point.run.outcome, point.run.summary, point.run.is_valid)
        for point in found.points
    ]
    return {
        **settings,
        "sweep": found.unit,
        "goodput": dict(found.goals),
        "knee": found.knee.load if found.knee else None,
        "highest_within_goal": found.best.load if found.best else None,
        "points": runs,
    }

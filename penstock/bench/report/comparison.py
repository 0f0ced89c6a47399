"""The table and the saved result of a comparison: medians, and the ratios within each round."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from penstock.bench.contenders import Contender
from penstock.bench.options import DataOptions, ReportOptions
from penstock.bench.report.result import result_of, settings_of

_RATIOS = {
    "request_throughput": "req/s",
    "input_sequence_throughput": "inputs/s",
    "total_token_throughput": "tok/s",
    "median_e2el": "p50",
    "p99_e2el": "p99",
}


def comparison(contenders: Sequence[Contender]) -> str:
    first, *rest = contenders
    lines = [" Comparison ".center(78, "=")]
    lines.append(f"{'median of rounds':<20}" + "".join(f"{word:>12}" for word in _RATIOS.values()))
    for contender in contenders:
        found = [median(values) if (values := contender.values(name)) else 0.0 for name in _RATIOS]
        lines.append(f"{contender.name:<20}" + "".join(f"{value:>12.2f}" for value in found))
    for contender in rest:
        lines.append(f" {contender.name} / {first.name} ".center(78, "-"))
        for name, word in _RATIOS.items():
            if ratios := ratios_of(contender, first, name):
                lines.append(
                    f"{word:<20} {median(ratios):>8.3f} ×   from {min(ratios):.3f} to {max(ratios):.3f} "
                    f"over {len(ratios)} rounds"
                )
    lines.append("=" * 78)
    return "\n".join(lines)


def ratios_of(contender: Contender, first: Contender, figure: str) -> list[float]:
    """One ratio for each round in which both contenders have a figure."""
    both = zip(contender.values(figure), first.values(figure), strict=False)
    return [value / base for value, base in both if value > 0 and base > 0]


def comparison_result(
    contenders: Sequence[Contender], data: DataOptions, report: ReportOptions
) -> dict[str, Any]:
    servers = {}
    for contender in contenders:
        runs = [
            result_of(
                settings_of(run.load, data, report), run.traffic, run.outcome, run.summary, run.is_valid
            )
            for run in contender.runs
        ]
        servers[contender.name] = {
            "command": contender.server.command if contender.server else None,
            "runs": runs,
        }
    first, *rest = contenders
    ratios = {
        contender.name: {figure: ratios_of(contender, first, figure) for figure in _RATIOS}
        for contender in rest
    }
    return {"baseline": first.name, "ratios": ratios, "servers": servers}

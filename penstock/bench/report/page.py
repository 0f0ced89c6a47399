"""The result page: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from penstock.bench.load.samples import Samples
from penstock.bench.report.charts import Series, axis, bars, lines
from penstock.bench.report.metrics import measured_ms

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2937;--soft:#6b7280;--line:#e5e7eb;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e5e7eb;--soft:#9ca3af;--line:#374151;--paper:#111827}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:2rem auto;
max-width:1340px;padding:0 1rem}h1{font-size:1.4rem}h2{font-size:1rem;margin:.2rem 0}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1rem}
figure{margin:0;border:1px solid var(--line);border-radius:8px;padding:.8rem}
svg{width:100%;height:auto;font-size:11px}svg text{fill:var(--soft)}svg .name{font-weight:600}
svg .grid{stroke:var(--line)}pre{overflow-x:auto;font-size:13px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.15rem .8rem;text-align:right;
border-bottom:1px solid var(--line)}th:first-child,td:first-child{text-align:left}
"""


def page(title: str, blocks: Sequence[str]) -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>"
        + "".join(blocks)
        + "</html>\n"
    )


def run_page(title: str, table: str, samples: Samples, began_s: float, generates: bool) -> str:
    """The page of one run: its table, throughput over time, distribution and CDF of latency."""
    return page(title, [f"<pre>{escape(table)}</pre>", _grid(run_figures(samples, began_s, generates))])


def sweep_page(title: str, table: str, unit: str, points: Sequence[Mapping[str, float]]) -> str:
    return page(title, [f"<pre>{escape(table)}</pre>", _grid(sweep_figures(unit, points))])


def compare_page(title: str, table: str, rounds: Mapping[str, Sequence[float]], what: str) -> str:
    series = [
        Series(name, [(i + 1, value) for i, value in enumerate(values)], dots=True)
        for name, values in rounds.items()
    ]
    x = axis("round", [i + 1 for values in rounds.values() for i in range(len(values))], zero=False)
    y = axis(what, [value for values in rounds.values() for value in values])
    return page(title, [f"<pre>{escape(table)}</pre>", _grid([figure("Rounds", lines(series, x, y))])])


def run_figures(samples: Samples, began_s: float, generates: bool) -> list[str]:
    if not samples.ok.any():
        return []
    values = measured_ms(samples, generates)
    found = [
        figure("Throughput over time", _over_time(samples, began_s)),
        figure("Latency distribution", _histogram(values["e2el"])),
        figure("Latency CDF", _cdf({k: v for k, v in values.items() if k in ("e2el", "ttft")})),
        figure("Latency over time", _latency_over_time(samples, began_s)),
    ]
    if generates and len(values["itl"]):
        found.append(figure("Inter-token latency CDF", _cdf({"itl": values["itl"]})))
    return found


def sweep_figures(unit: str, points: Sequence[Mapping[str, float]]) -> list[str]:
    """Latency against throughput, and throughput against the offered load."""
    done = [point["request_throughput"] for point in points]
    latency = [
        Series(name, [(p["request_throughput"], p[key]) for p in points], dots=True)
        for name, key in (("p50", "median_e2el_ms"), ("p99", "p99_e2el_ms"))
    ]
    heights = [value for one in latency for _, value in one.points]
    offered = [point["load"] for point in points]
    delivered = [Series("req/s", list(zip(offered, done, strict=True)), dots=True)]
    return [
        figure(
            "Latency against load", lines(latency, axis("requests/s", done), axis("ms", heights, log=True))
        ),
        figure(
            f"Throughput against {unit}",
            lines(delivered, axis(unit, offered, log=True), axis("requests/s", done)),
        ),
    ]


def figure(title: str, svg: str) -> str:
    return f"<figure><h2>{escape(title)}</h2>{svg}</figure>"


def _grid(figures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _over_time(samples: Samples, began_s: float) -> str:
    ends = samples["end"][samples.ok] - began_s
    width = max(0.1, float(ends.max()) / 60)
    edges = np.append(np.arange(0, float(ends.max()), width), float(ends.max()) + 1e-9)
    counts, _ = np.histogram(ends, edges)
    rates = counts / np.diff(edges)
    if len(rates) > 1 and edges[-1] - edges[-2] < width / 2:  # the last interval is too short for a rate
        rates = rates[:-1]
    points = [(float(left + width / 2), float(rate)) for left, rate in zip(edges, rates, strict=False)]
    x = axis("seconds", [float(ends.max()), *(at for at, _ in points)])
    return lines([Series("answers/s", points)], x, axis("requests/s", [0, *(1.05 * n for _, n in points)]))


def _latency_over_time(samples: Samples, began_s: float) -> str:
    """p50 and p99 of each slice of the run."""
    ok = samples.ok
    ends, latencies_ms = samples["end"][ok] - began_s, (samples["end"] - samples["start"])[ok] * 1000
    slices = (ends / max(0.1, float(ends.max()) / 40)).astype(int)
    by_slice = [(float(ends[slices == s].mean()), latencies_ms[slices == s]) for s in np.unique(slices)]
    series = [
        Series(f"p{p}", [(at, float(np.percentile(values, p))) for at, values in by_slice]) for p in (50, 99)
    ]
    heights = [value for one in series for _, value in one.points]
    return lines(series, axis("seconds", [0, float(ends.max())]), axis("ms", heights))


def _histogram(values: NDArray[np.float64]) -> str:
    top = float(np.percentile(values, 99.5))
    counts, edges = np.histogram(values[values <= top], bins=50)
    x = axis("ms", [float(edges[0]), float(edges[-1])], zero=False)
    return bars(
        [float(e) for e in edges], [float(c) for c in counts], x, axis("requests", [float(c) for c in counts])
    )


def _cdf(values: Mapping[str, NDArray[np.float64]]) -> str:
    shares = np.concatenate([np.linspace(0, 0.99, 100), np.linspace(0.991, 1, 10)])
    series = [
        Series(
            name,
            [(float(v), float(s) * 100) for v, s in zip(np.quantile(found, shares), shares, strict=True)],
        )
        for name, found in values.items()
    ]
    marks = [value for one in series for value, _ in one.points]
    return lines(series, axis("ms", marks, zero=False, log=True), axis("% of requests", [0, 100]))

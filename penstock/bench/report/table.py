"""The table that a run prints, in the layout of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.bench.load.plan import Traffic
from penstock.bench.report.metrics import Summary

WIDTH = 50
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "ttfb": "Time to First Byte",
}
BUSY = 0.9  # a load process above this share of a core may limit the run


def table(
    summary: Summary,
    traffic: Traffic,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    generates: bool,
    title: str = "Serving Benchmark Result",
) -> str:
    lines = [f" {title} ".center(WIDTH, "=")]
    lines += _counts(summary, traffic)
    lines += _throughput(summary, generates)
    for name in metrics:
        if name in summary.spreads:
            lines += _latency(summary, name, percentiles)
    lines += _client(summary)
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def row(label: str, value: float | int) -> str:
    return f"{label + ':':<40} {value:<10}" if isinstance(value, int) else f"{label + ':':<40} {value:<10.2f}"


def heading(text: str) -> str:
    return text.center(WIDTH, "-")


def _counts(summary: Summary, traffic: Traffic) -> Iterable[str]:
    yield row("Successful requests", summary.completed)
    yield row("Failed requests", summary.failed)
    if summary.given_up:
        yield row("Given up when stopped", summary.given_up)
    if traffic.max_concurrency is not None:
        yield row("Maximum request concurrency", traffic.max_concurrency)
    if traffic.request_rate != float("inf"):
        yield row("Request rate configured (RPS)", traffic.request_rate)
    yield row("Benchmark duration (s)", summary.duration_s)
    yield row("Total input tokens", summary.total_input_tokens)


def _throughput(summary: Summary, generates: bool) -> Iterable[str]:
    if generates:
        yield row("Total generated tokens", summary.total_output_tokens)
    yield row("Request throughput (req/s)", summary.request_throughput)
    if not generates:
        yield row("Input throughput (inputs/s)", summary.input_sequence_throughput)
    if summary.request_goodput is not None:
        yield row("Request goodput (req/s)", summary.request_goodput)
    if generates:
        yield row("Output token throughput (tok/s)", summary.output_throughput)
        yield row("Peak output token throughput (tok/s)", summary.peak_output_tokens_per_s)
    yield row("Peak concurrent requests", summary.peak_concurrency)
    yield row("Total token throughput (tok/s)", summary.total_token_throughput)


def _latency(summary: Summary, name: str, percentiles: Sequence[float]) -> Iterable[str]:
    found, word = summary.spreads[name], name.upper()
    yield heading(_TITLES[name])
    yield row(f"Mean {word} (ms)", found.mean)
    yield row(f"Median {word} (ms)", found.median)
    for percentile in percentiles:
        yield row(f"P{percentile:g} {word} (ms)", found.percentiles[f"{percentile:g}"])


def _client(summary: Summary) -> Iterable[str]:
    cost = summary.client
    yield heading("Load Client")
    yield row("Processes", cost.processes)
    yield row("CPU of the busiest process (%)", 100 * cost.busiest)
    yield row("CPU share of the machine (%)", 100 * cost.machine)
    yield row("Own ceiling, estimated (req/s)", round(cost.ceiling))
    if summary.mean_send_delay_ms >= 0.01:
        yield row("Mean delay behind schedule (ms)", summary.mean_send_delay_ms)


def warnings(summary: Summary, errors: dict[str, int]) -> list[str]:
    """Failures of requests, and a warning if the client may be the limit."""
    lines = [f"{count} × {message}" for message, count in list(errors.items())[:10]]
    if len(errors) > 10:
        lines.append(f"… and {len(errors) - 10} other kinds of failure")
    if summary.client.busiest > BUSY:
        lines.append(
            f"a load process used {summary.client.busiest:.0%} of a core: the client may be the limit; "
            "raise --num-processes or run it on another machine"
        )
    return lines

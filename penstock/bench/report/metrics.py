"""Figures from samples. Latency is measured to the end of the body; metrics are in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.bench.load.fleet import Outcome
from penstock.bench.load.samples import Samples
from penstock.config import available_cpus
from penstock.errors import BadValue

Values = NDArray[np.float64]
METRICS = ("ttft", "tpot", "itl", "e2el", "ttfb")
POOLING_METRICS = ("e2el", "ttfb")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


class Spread(msgspec.Struct, frozen=True):
    mean: float
    median: float
    std: float
    percentiles: dict[str, float]  # "99" → ms


class ClientCost(msgspec.Struct, frozen=True):
    """CPU use of the load client, which shows whether the client limits the result."""

    processes: int
    cpu_s: float
    busiest: float  # share of one core that the busiest process used
    machine: float  # share of all cores that all processes used
    ceiling: float  # estimated requests per second if every process had its own core


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    completed: int
    failed: int
    given_up: int  # requests in flight when the run was stopped
    duration_s: float
    total_input_tokens: int
    total_input_sequences: int
    total_output_tokens: int
    request_throughput: float
    input_sequence_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    peak_concurrency: int
    peak_output_tokens_per_s: float
    body_bytes: int
    mean_send_delay_ms: float  # mean delay of requests behind the schedule of --request-rate
    spreads: dict[str, Spread]  # keys are names of METRICS
    client: ClientCost

    @property
    def failed_share(self) -> float:
        return self.failed / max(1, self.completed + self.failed)


def summarise(
    outcome: Outcome,
    rows: Sequence[int],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
    generates: bool,
) -> Summary:
    """Compute the figures of a run. `rows` are the numbers of inputs of the data set's requests."""
    samples = outcome.samples
    ok = samples.ok
    answered = ok | samples.failed
    ends = samples["end"][answered]
    duration = float(ends.max() - outcome.began_s) if len(ends) else 0.0
    per_s = 1 / duration if duration > 0 else 0.0
    completed = int(ok.sum())
    inputs = int(samples["input_tokens"][ok].clip(min=0).sum())
    outputs = int(samples["output_tokens"][ok].sum())
    sequences = int(np.asarray(rows, np.int64)[samples.columns["request"][ok]].sum())
    values = measured_ms(samples, generates)
    return Summary(
        completed=completed,
        failed=int(samples.failed.sum()),
        given_up=len(samples) - int(answered.sum()),
        duration_s=duration,
        total_input_tokens=inputs,
        total_input_sequences=sequences,
        total_output_tokens=outputs,
        request_throughput=completed * per_s,
        input_sequence_throughput=sequences * per_s,
        output_throughput=outputs * per_s,
        total_token_throughput=(inputs + outputs) * per_s,
        request_goodput=good_count(values, goodput, completed) * per_s if goodput else None,
        peak_concurrency=_peak_concurrency(samples, answered),
        peak_output_tokens_per_s=_peak_tokens(samples, ok) if generates else 0.0,
        body_bytes=int(samples["body_bytes"][ok].sum()),
        mean_send_delay_ms=_mean((samples["start"] - samples["due"])[answered]) * 1000,
        spreads={name: spread(found, percentiles) for name, found in values.items()},
        client=_cost(outcome, duration),
    )


def measured_ms(samples: Samples, generates: bool) -> dict[str, Values]:
    """Each metric's values over the requests that succeeded."""
    ok = samples.ok
    start, end = samples["start"][ok], samples["end"][ok]
    values = {"e2el": (end - start) * 1000, "ttfb": (samples["first_byte"][ok] - start) * 1000}
    if generates:
        first, last = samples["first_token"][ok], samples["last_token"][ok]
        tokens = samples["output_tokens"][ok]
        # The time between tokens of a single token is 0, so it never misses a goal.
        values["ttft"] = (first - start) * 1000
        values["tpot"] = np.where(tokens > 1, (last - first) / np.maximum(tokens - 1, 1), 0.0) * 1000
        values["itl"] = samples.gaps.astype(np.float64) * 1000
    return values


def good_count(values: Mapping[str, Values], goodput: Mapping[str, float], completed: int) -> int:
    """Number of requests within every goal."""
    good = np.ones(completed, dtype=bool)
    for name, limit_ms in goodput.items():
        if name not in values:
            raise BadValue(f"--goodput {name}: only generation has it; use e2el", param="goodput")
        good &= values[name] <= limit_ms
    return int(good.sum())


def spread(values: Values, percentiles: Sequence[float]) -> Spread:
    if not len(values):
        return Spread(0.0, 0.0, 0.0, {f"{p:g}": 0.0 for p in percentiles})
    found: list[float] = np.percentile(values, list(percentiles)).tolist()
    return Spread(
        _mean(values),
        float(np.median(values)),
        float(np.std(values)),
        {f"{p:g}": float(value) for p, value in zip(percentiles, found, strict=True)},
    )


def percentiles_of(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= p <= 100 for p in found):
        raise BadValue(f"--metric-percentiles {text!r}: give numbers from 0 to 100, such as 50,95,99")
    return found


def metrics_of(text: str | None, generates: bool) -> list[str]:
    if text is None:
        return ["ttft", "tpot", "itl"] if generates else ["e2el"]
    names = [part.strip() for part in text.split(",") if part.strip()]
    known = METRICS if generates else POOLING_METRICS
    if unknown := [name for name in names if name not in known]:
        raise BadValue(f"--percentile-metrics {unknown[0]!r} is not there to print; use {', '.join(known)}")
    return names


def goals_of(pairs: Sequence[str]) -> dict[str, float]:
    """Parse limits in milliseconds, such as `e2el:200`."""
    goals = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = -1.0
        if name not in GOODPUT_METRICS or not goals[name] > 0:
            raise BadValue(
                f"--goodput {pair!r}: give NAME:MILLISECONDS with one of {', '.join(GOODPUT_METRICS)}"
            )
    return goals


def _mean(values: Values) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _peak_concurrency(samples: Samples, answered: NDArray[np.bool_]) -> int:
    starts, ends = samples["start"][answered], samples["end"][answered]
    moments = np.concatenate([starts, ends])
    changes = np.concatenate([np.ones(len(starts), int), -np.ones(len(ends), int)])
    order = np.lexsort((changes, moments))  # at equal times, ends come before starts
    return int(np.cumsum(changes[order]).max(initial=0))


def _peak_tokens(samples: Samples, ok: NDArray[np.bool_]) -> float:
    """Maximum number of tokens that arrived in any second of the run."""
    counts = samples.columns["gaps"].astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    moments = [samples["first_token"][ok]]
    for i in np.flatnonzero(ok & (counts > 0)):
        gaps = samples.gaps[offsets[i] : offsets[i + 1]]
        moments.append(samples["first_token"][i] + np.cumsum(gaps, dtype=np.float64))
    flat = np.concatenate(moments)
    return float(np.bincount((flat - flat.min()).astype(int)).max()) if len(flat) else 0.0


def _cost(outcome: Outcome, duration: float) -> ClientCost:
    total = sum(cost.cpu_s for cost in outcome.costs)
    busiest = max((cost.cpu_s for cost in outcome.costs), default=0.0)
    span = duration or float("inf")
    return ClientCost(
        processes=outcome.processes,
        cpu_s=total,
        busiest=busiest / span,
        machine=total / span / available_cpus(),
        ceiling=sum(cost.completed / cost.cpu_s for cost in outcome.costs if cost.cpu_s > 0),
    )

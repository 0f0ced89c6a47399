"""A run as one JSON object: settings, figures and all samples, with the field names of vLLM's results."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np

from penstock import __version__
from penstock.bench.load.fleet import Outcome
from penstock.bench.load.plan import Traffic
from penstock.bench.load.samples import GIVEN_UP, Samples
from penstock.bench.options import DataOptions, ReportOptions
from penstock.bench.prepare import Prepared
from penstock.bench.report.metrics import Summary

Result = dict[str, Any]


def settings_of(load: Prepared, data: DataOptions, report: ReportOptions) -> dict[str, Any]:
    return {
        "label": report.label or load.name.value,
        "backend": load.name.value,
        "url": load.url,
        "model_id": load.model,
        "tokenizer_id": load.tokenizer_name,
        "dataset_name": data.dataset_name.value,
        "num_prompts": data.num_prompts,
        "seed": data.seed,
    }


def result_of(
    settings: dict[str, Any], traffic: Traffic, outcome: Outcome, summary: Summary, valid: bool
) -> Result:
    """The JSON object of a run. `complete` is false if the run was stopped; `valid` is also false if too many
    requests failed."""
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "penstock_version": __version__,
        **settings,
        "request_rate": traffic.request_rate if traffic.request_rate != float("inf") else "inf",
        "burstiness": traffic.burstiness if traffic.burstiness != float("inf") else "inf",
        "max_concurrency": traffic.max_concurrency,
        "complete": not outcome.interrupted and outcome.problem is None,
        "valid": valid,
        "problem": outcome.problem,
        **figures(summary),
        **_samples(outcome.samples, outcome.began_s),
    }


def figures(summary: Summary) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: getattr(summary, name)
        for name in summary.__struct_fields__
        if name not in ("spreads", "client", "duration_s")
    }
    values["duration"] = summary.duration_s
    for name, spread in summary.spreads.items():
        values[f"mean_{name}_ms"] = spread.mean
        values[f"median_{name}_ms"] = spread.median
        values[f"std_{name}_ms"] = spread.std
        values |= {f"p{p}_{name}_ms": value for p, value in spread.percentiles.items()}
    cost = summary.client
    values["client"] = {name: getattr(cost, name) for name in cost.__struct_fields__}
    return values


def _samples(samples: Samples, began_s: float) -> dict[str, Any]:
    """Columns of all requests, ordered by start time. Times are in seconds, rounded to microseconds."""
    start = samples["start"]
    first_token = samples["first_token"]
    errors = samples.columns["error"]
    words = [*samples.messages, "given up when the run was stopped", ""]  # GIVEN_UP is −2, OK is −1
    assert words[GIVEN_UP].startswith("given up")
    values: dict[str, Any] = {
        "requests": samples.columns["request"],
        "start_times": np.round(start - began_s, 6),
        "send_delays": np.round(start - samples["due"], 6),
        "first_bytes": np.round(np.maximum(samples["first_byte"] - start, 0), 6),
        "e2els": np.round(samples["end"] - start, 6),
        "statuses": samples.columns["status"],
        "input_lens": samples.columns["input_tokens"],
        "errors": [words[int(code)] for code in errors],
    }
    if len(samples.gaps) or first_token.any():
        counts = samples.columns["gaps"].astype(np.int64)
        values["output_lens"] = samples.columns["output_tokens"]
        values["ttfts"] = np.round(np.maximum(first_token - start, 0), 6)
        gaps = np.round(samples.gaps.astype(np.float64), 6)
        values["itls"] = [part.tolist() for part in np.split(gaps, np.cumsum(counts)[:-1])]
    return values

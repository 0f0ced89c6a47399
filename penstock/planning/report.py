"""A plan, and its formatting as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.planning.plan import Compute, Corpus, Serving, StoredKind, Traffic
from penstock.planning.predict import ESTIMATE, Rate
from penstock.planning.quantities import shown_bytes, shown_hours, shown_number
from penstock.planning.rates import recorded_rates

CPU = "cpu"


@dataclass(frozen=True)
class Memory:
    """Memory on the device."""

    parameters: int
    weights: float  # bytes
    activations: float | None  # bytes of one step; None: unknown
    device: float | None  # bytes of the GPU; None: unknown


@dataclass(frozen=True)
class Plan:
    model: str
    gpu: str | None  # None: the user gave a rate
    corpus: Corpus
    rate: Rate
    compute: Compute
    stored: list[StoredKind]
    traffic: Traffic
    memory: Memory
    serving: Serving | None = None
    within_hours: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """The name of the unit that hours refer to: machine or GPU."""
        return "machine" if self.gpu == CPU else "GPU"

    @property
    def tokens_per_s(self) -> float:
        return self.corpus.tokens / self.compute.gpu_hours / 3600

    def as_json(self) -> dict[str, Any]:
        corpus, compute, rate = self.corpus, self.compute, self.rate
        return {
            "model": self.model,
            "gpu": self.gpu,
            "docs": corpus.docs,
            "tokens": {
                "total": corpus.tokens,
                "mean": corpus.mean_tokens,
                "p50": corpus.quantile(0.5),
                "p95": corpus.quantile(0.95),
                "from_sample": corpus.from_sample,
            },
            "rate": {
                "tokens_per_s": self.tokens_per_s,
                "basis": rate.basis,
                "low": self.tokens_per_s / rate.high,
                "high": self.tokens_per_s / rate.low,
                "limit": "host" if rate.is_limited_by_host(corpus.mean_tokens) else "device",
            },
            "gpu_hours": compute.gpu_hours,
            "gpu_hours_range": [compute.low_hours, compute.high_hours],
            "gpus": compute.gpus,
            "wall_hours": compute.wall_hours,
            "gpus_within_hours": None
            if self.within_hours is None
            else {"hours": self.within_hours, "gpus": compute.gpus_within(self.within_hours)},
            "cost": compute.cost,
            "storage": [
                {
                    "kind": kind.kind,
                    "dtype": kind.dtype,
                    "bytes_per_doc": kind.bytes_per_doc,
                    "bytes": kind.total(corpus.docs),
                }
                for kind in self.stored
            ],
            "network": {
                "text_bytes": self.traffic.text,
                "token_id_bytes": self.traffic.token_ids,
                "vector_bytes": self.traffic.vectors,
            },
            "memory": {
                "parameters": self.memory.parameters,
                "weight_bytes": self.memory.weights,
                "activation_bytes": self.memory.activations,
                "device_bytes": self.memory.device,
            },
            "serving": None if self.serving is None else _serving_json(self.serving),
            "notes": list(self.notes),
        }

    def as_text(self) -> str:
        lines = list(self._lines())
        width = max(len(label) for label, _ in lines) + 2
        text = [f"{label:<{width}}{value}" if label else "" for label, value in lines]
        return "\n".join([*text, *(f"note: {note}" for note in self.notes)])

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield "model", self.model
        yield from self._corpus_lines()
        yield "", ""
        yield from self._compute_lines()
        yield "", ""
        for kind in self.stored:
            total = shown_bytes(kind.total(self.corpus.docs))
            yield f"{kind.kind}, {kind.dtype}", f"{total} ({shown_bytes(kind.bytes_per_doc)} a text)"
        yield "", ""
        yield from self._traffic_lines()
        yield from self._memory_lines()
        if self.serving is not None:
            yield "", ""
            yield from _serving_lines(self.serving, self.unit)

    def _corpus_lines(self) -> Iterator[tuple[str, str]]:
        corpus = self.corpus
        spread = ""
        if corpus.from_sample:
            spread = f" (p50 {corpus.quantile(0.5):,.0f}, p95 {corpus.quantile(0.95):,.0f}, of your sample)"
        yield "texts", f"{corpus.docs:,} of {shown_number(corpus.mean_tokens)} tokens{spread}"
        yield "tokens", shown_number(corpus.tokens)

    def _compute_lines(self) -> Iterator[tuple[str, str]]:
        compute, rate, unit = self.compute, self.rate, self.unit
        where = self.gpu or "your GPU"
        bounds = ""
        if rate.low != rate.high:
            low, high = self.tokens_per_s / rate.high, self.tokens_per_s / rate.low
            bounds = f", {shown_number(low)} to {shown_number(high)}"
        yield "rate", f"{shown_number(self.tokens_per_s)} tokens/s on one {where} ({rate.basis}{bounds})"
        hours = shown_number(compute.gpu_hours)
        if rate.low != rate.high:
            hours += f" ({shown_number(compute.low_hours)} to {shown_number(compute.high_hours)})"
        yield f"{unit} hours", hours + (", an estimate" if rate.basis == ESTIMATE else "")
        plural = f"{compute.gpus} {unit}{'' if compute.gpus == 1 else 's'}"
        yield f"time with {plural}", shown_hours(compute.wall_hours)
        if self.within_hours is not None:
            count = compute.gpus_within(self.within_hours)
            yield f"{unit}s for {shown_hours(self.within_hours)}", f"{count:,}"
        if compute.cost is not None:
            yield "cost", f"{compute.cost:,.2f} at {compute.price:g} per {unit} hour"

    def _traffic_lines(self) -> Iterator[tuple[str, str]]:
        vectors = ", ".join(f"{shown_bytes(size)} as {name}" for name, size in self.traffic.vectors.items())
        ids = shown_bytes(self.traffic.token_ids)
        yield "network in", f"{shown_bytes(self.traffic.text)} of text, or {ids} of token ids"
        yield "network out", f"{vectors}, in float32"

    def _memory_lines(self) -> Iterator[tuple[str, str]]:
        memory = self.memory
        parts = [f"{shown_bytes(memory.weights)} of weights"]
        if memory.activations is not None:
            parts.append(f"about {shown_bytes(memory.activations)} of activations a step")
        of = "" if memory.device is None else f", of {shown_bytes(memory.device)}"
        yield f"{self.unit} memory", " and ".join(parts) + of


def _serving_json(serving: Serving) -> dict[str, Any]:
    return {
        "qps": serving.qps,
        "query_tokens": serving.query_tokens,
        "utilization": serving.utilization,
        "qps_per_gpu": serving.qps_per_gpu,
        "limit": serving.limit,
        "gpus": serving.gpus,
    }


def _serving_lines(serving: Serving, unit: str) -> Iterator[tuple[str, str]]:
    host = recorded_rates().serving
    why = (
        f"its host's {host.cores} cores are the limit"
        if serving.limit == "host"
        else f"the {unit} is the limit"
    )
    yield (
        "queries",
        f"{shown_number(serving.qps)} a second of {shown_number(serving.query_tokens)} tokens, one a request",
    )
    yield (
        f"{unit}s for them",
        f"{serving.gpus:,} at {serving.utilization:.0%} load: {shown_number(serving.qps_per_gpu)} a second "
        f"each; {why}",
    )

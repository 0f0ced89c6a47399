"""The rate of a model on a GPU: measured, interpolated, extrapolated, or scaled to another GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from penstock.errors import BadValue
from penstock.planning.fit import CostModel, Fit
from penstock.planning.rates import Gpu, Measurements, recorded_rates
from penstock.planning.shape import ModelShape

MEASURED, BETWEEN, BEYOND, ESTIMATE = "measured", "fitted", "extrapolated", "estimate, not measured"
GIVEN, MEASURED_HERE = "given by --rate", "measured here"
BEYOND_FACTOR = 2.0  # assumed range of an extrapolation, not a measured one


@dataclass(frozen=True)
class Rate:
    """The time of rows on one GPU, and its uncertainty."""

    basis: str
    low: float = 1.0  # `low` and `high` are the range of the time, as factors
    high: float = 1.0
    tokens_per_s: float | None = None  # if it does not depend on the row
    model: CostModel | None = None
    shape: ModelShape | None = None
    fit: Fit | None = None  # its measurements correct the prediction
    max_tokens_per_s: float | None = None  # limit of the tokenisation on one host
    notes: tuple[str, ...] = ()

    def seconds_of_rows(self, lengths: Sequence[float]) -> float:
        """Sum the seconds of rows with these numbers of tokens."""
        if self.tokens_per_s is not None:
            return sum(lengths) / self.tokens_per_s
        known: dict[float, float] = {}
        for length in lengths:
            known[length] = known.get(length, 0) + 1
        return sum(count * length * self.seconds_per_token(length) for length, count in known.items())

    def seconds_per_token(self, length: float) -> float:
        if self.tokens_per_s is not None:
            return 1.0 / self.tokens_per_s
        return max(self.device_seconds_per_token(length), 1.0 / (self.max_tokens_per_s or float("inf")))

    def device_seconds_per_token(self, length: float) -> float:
        assert self.model is not None and self.shape is not None
        seconds = self.model.seconds_per_token(self.shape, length)
        if self.fit is not None and (correction := self.fit.correction(self.shape, length)) is not None:
            seconds *= correction
        return seconds

    def is_limited_by_host(self, length: float) -> bool:
        if self.tokens_per_s is not None or self.max_tokens_per_s is None:
            return False
        return self.device_seconds_per_token(length) * self.max_tokens_per_s < 1.0


def given_rate(tokens_per_s: float) -> Rate:
    return Rate(GIVEN, tokens_per_s=tokens_per_s)


def predicted_rate(gpu: str, shape: ModelShape, lengths: Sequence[float], *, texts: bool = True) -> Rate:
    """Predict the rate of a model of this shape.

    `lengths` are relevant row lengths: the shortest, a typical one, the longest. `texts` is set if the host
    also tokenises.
    """
    rates = recorded_rates()
    if gpu not in rates.gpu:
        raise BadValue(
            f"--gpu {gpu} is not known; use one of {', '.join(sorted(rates.gpu))}, or cpu with --measure or "
            "--rate",
            param="--gpu",
        )
    measured = next((each for each in rates.measured if each.gpu == gpu), None)
    host = rates.host.tokens_per_s if texts else None
    if measured is not None:
        return _recorded(measured, shape, lengths, host)
    known = rates.measured[0]
    return _scaled(known, rates.gpu[known.gpu], gpu, rates.gpu[gpu], shape, lengths, host)


@cache
def fit_of(gpu: str) -> Fit:
    """Fit the measurements of a GPU."""
    return Fit(next(each for each in recorded_rates().measured if each.gpu == gpu).points)


def _recorded(
    measured: Measurements, shape: ModelShape, lengths: Sequence[float], host: float | None
) -> Rate:
    fit = fit_of(measured.gpu)
    basis, notes = _basis(fit, shape, lengths)
    errors = fit.between_machines if basis == MEASURED else fit.unseen_model
    low, high = _range(fit.expected(errors, shape, _typical(lengths)).common)
    if basis == BEYOND:
        low, high = 1 / BEYOND_FACTOR, BEYOND_FACTOR
    return Rate(
        basis, low, high, model=fit.model, shape=shape, fit=fit, max_tokens_per_s=host, notes=tuple(notes)
    )


def _scaled(
    measured: Measurements,
    known: Gpu,
    name: str,
    wanted: Gpu,
    shape: ModelShape,
    lengths: Sequence[float],
    host: float | None,
) -> Rate:
    """Scale a rate by the published figures of two GPUs.

    The range spans from all terms scaled by the better of the two ratios to all scaled by the worse, widened
    by the error of the fit.
    """
    fit = fit_of(measured.gpu)
    model = fit.model.scaled(known, wanted)
    ratios = (known.tflops / wanted.tflops, known.bandwidth / wanted.bandwidth)
    length = _typical(lengths)
    seconds = model.seconds_per_token(shape, length)
    bounds = [fit.model.scaled_whole(ratio).seconds_per_token(shape, length) / seconds for ratio in ratios]
    low, high = _range(fit.expected(fit.unseen_model, shape, length).common)
    basis, notes = _basis(fit, shape, lengths)
    if basis == BEYOND:
        low, high = 1 / BEYOND_FACTOR, BEYOND_FACTOR
    notes.insert(
        0,
        f"no rate was measured on {name}: {measured.gpu}'s is scaled by published figures "
        f"({wanted.tflops:g} against {known.tflops:g} TFLOP/s, {wanted.bandwidth:g} against "
        f"{known.bandwidth:g} GB/s)",
    )
    return Rate(
        ESTIMATE,
        low * min(1.0, *bounds),
        high * max(1.0, *bounds),
        model=model,
        shape=shape,
        max_tokens_per_s=host,
        notes=tuple(notes),
    )


def _typical(lengths: Sequence[float]) -> float:
    return sorted(lengths)[len(lengths) // 2]


def _range(error: float) -> tuple[float, float]:
    """Convert a relative error of the rate to factors on the time."""
    return 1 / (1 + error), 1 / (1 - min(error, 0.9))


def _basis(fit: Fit, shape: ModelShape, lengths: Sequence[float]) -> tuple[str, list[str]]:
    """Classify the basis of a rate. For an extrapolation, also list the reasons."""
    if all(fit.correction(shape, length) is not None for length in lengths):
        return MEASURED, []
    points = fit.points
    notes = []
    sizes = [point.shape.dense_flops + point.shape.expert_flops for point in points]
    size = shape.dense_flops + shape.expert_flops
    if not min(sizes) <= size <= max(sizes):
        notes.append(
            f"a token of this model takes {size / 1e9:.3g} GFLOP; models from {min(sizes) / 1e9:.3g} to "
            f"{max(sizes) / 1e9:.3g} GFLOP were measured"
        )
    longest = max(point.length for point in points)
    shortest = min(point.length for point in points)
    if not shortest <= min(lengths) or not max(lengths) <= longest:
        notes.append(f"rows of {shortest} to {longest:,} tokens were measured")
    if shape.expert_flops and len({p.model for p in points if p.shape.expert_flops}) < 2:
        notes.append("one model with experts was measured")
    if shape.local_layers:
        notes.append("no model with local attention was measured")
    return (BEYOND if notes else BETWEEN), notes

"""The cost model: seconds per token as a sum of six terms, fitted to measured rates.

    seconds/token =   products / F  +  expert products / Fe  +  attention / Fa
                    + bytes moved / B  +  r / row length  +  c

No coefficient is negative. Errors of the fit are estimated by leaving measurements out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.planning.rates import Gpu, Point
from penstock.planning.shape import ModelShape

Floats = NDArray[np.float64]
TERMS = ("products", "expert_products", "attention", "bytes_moved", "row", "token")
_SCALED_BY_FLOPS, _SCALED_BY_BANDWIDTH = slice(0, 3), slice(3, 4)
_COMMON_SHARE = 0.9  # share of errors that `ModelError.common` covers
_HOST_SHARE = 0.2  # above this share of a row's time, it counts as dependent on the host


def work(shape: ModelShape, length: float) -> Floats:
    """Compute the work of one token in the unit of each term."""
    attention = shape.attention_flops(length)
    return np.array([shape.dense_flops, shape.expert_flops, attention, shape.moved_bytes, 1.0 / length, 1.0])


@dataclass(frozen=True)
class CostModel:
    """Seconds per unit of each term."""

    seconds: Floats  # [terms]

    @classmethod
    def fit(cls, points: Sequence[Point]) -> CostModel:
        """Fit by least squares of relative errors. Terms with negative coefficients are left out."""
        measured = np.array([1.0 / point.tokens_per_s for point in points])
        table = np.stack([work(point.shape, point.length) for point in points]) / measured[:, None]
        scale = np.maximum(table.max(axis=0), np.finfo(float).tiny)
        kept = [term for term in range(len(TERMS)) if table[:, term].any()]
        while True:
            found = np.linalg.lstsq(table[:, kept] / scale[kept], np.ones(len(points)), rcond=None)[0]
            if found.min() >= 0:
                break
            kept.pop(int(found.argmin()))
        seconds = np.zeros(len(TERMS))
        seconds[kept] = found / scale[kept]
        return cls(seconds)

    def seconds_per_token(self, shape: ModelShape, length: float) -> float:
        return float(self.seconds @ work(shape, length))

    def depends_on_host(self, shape: ModelShape, length: float) -> bool:
        """Whether the host's terms, which differ between machines, take much of the time."""
        times = self.seconds * work(shape, length)
        return float(times[_SCALED_BY_BANDWIDTH.stop :].sum()) > _HOST_SHARE * float(times.sum())

    def scaled(self, known: Gpu, wanted: Gpu) -> CostModel:
        """Scale to another GPU by the published figures of both. The host's terms are unchanged."""
        seconds = self.seconds.copy()
        seconds[_SCALED_BY_FLOPS] *= known.tflops / wanted.tflops
        seconds[_SCALED_BY_BANDWIDTH] *= known.bandwidth / wanted.bandwidth
        return CostModel(seconds)

    def scaled_whole(self, factor: float) -> CostModel:
        """Multiply all terms of the device by `factor`."""
        seconds = self.seconds.copy()
        seconds[: _SCALED_BY_BANDWIDTH.stop] *= factor
        return CostModel(seconds)


@dataclass(frozen=True)
class ModelError:
    """Absolute errors of predictions, as shares of the measured rate."""

    median: float
    common: float  # 90 % of errors are at most this
    largest: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> ModelError:
        sizes = np.abs(np.array(errors))
        return cls(float(np.median(sizes)), float(np.quantile(sizes, _COMMON_SHARE)), float(sizes.max()))


Errors = list[tuple[Point, float]]


@dataclass(frozen=True)
class Fit:
    """The cost model of one GPU, and its errors."""

    points: Sequence[Point]

    @cached_property
    def model(self) -> CostModel:
        return CostModel.fit(self.points)

    @cached_property
    def fitted(self) -> Errors:
        """Errors of the fit on its own measurements."""
        return [(point, _error(self.model, point)) for point in self.points]

    @cached_property
    def between_machines(self) -> Errors:
        """Deviations of single machines from the mean of all machines on the same rows."""
        several = [same for same in self._by_row.values() if len(same) > 1]
        return [(point, point.tokens_per_s / _mean_rate(same) - 1.0) for same in several for point in same]

    @cached_property
    def unseen_row(self) -> Errors:
        """Errors if one row length of a model is left out of the fit, on all machines."""
        errors: Errors = []
        for same in self._by_row.values():
            model = CostModel.fit([point for point in self.points if point not in same])
            errors += [(point, _error(model, point)) for point in same]
        return errors

    @cached_property
    def unseen_model(self) -> Errors:
        """Errors if all measurements of a model are left out of the fit, as for an unmeasured model.

        The only model with experts is never left out, because the others give no data about experts.
        """
        errors: Errors = []
        for name in dict.fromkeys(point.model for point in self.points):
            own = [point for point in self.points if point.model == name]
            others = [point for point in self.points if point.model != name]
            has_experts = bool(own[0].shape.expert_flops)
            if others and (not has_experts or any(point.shape.expert_flops for point in others)):
                model = CostModel.fit(others)
                errors += [(point, _error(model, point)) for point in own]
        return errors

    def expected(self, errors: Errors, shape: ModelShape, length: float) -> ModelError:
        """Summarise the errors of measurements that are as dependent on the host as this row."""
        depends = self.model.depends_on_host(shape, length)
        alike = [
            error
            for point, error in errors
            if self.model.depends_on_host(point.shape, point.length) == depends
        ]
        return ModelError.of(alike or [error for _, error in errors])

    def correction(self, shape: ModelShape, length: float) -> float | None:
        """Interpolate measured over predicted seconds at this row length, for a model that was measured.

        None for models that were not measured, and beyond the measured lengths.
        """
        own = {
            points[0].length: self.model.seconds_per_token(shape, points[0].length) * _mean_rate(points)
            for points in self._by_row.values()
            if points[0].shape.same_work == shape.same_work
        }
        if not own or not min(own) <= length <= max(own):
            return None
        lengths = sorted(own)
        ratios = [1.0 / own[each] for each in lengths]
        return float(np.interp(np.log(length), np.log(lengths), ratios))

    @cached_property
    def _by_row(self) -> dict[tuple[str, int], list[Point]]:
        """Measurements by model and row length."""
        found: dict[tuple[str, int], list[Point]] = {}
        for point in self.points:
            found.setdefault((point.model, point.length), []).append(point)
        return found


def _mean_rate(points: Sequence[Point]) -> float:
    """Compute the geometric mean of the rates."""
    return float(np.exp(np.mean(np.log([point.tokens_per_s for point in points]))))


def _error(model: CostModel, point: Point) -> float:
    predicted = 1.0 / model.seconds_per_token(point.shape, point.length)
    return predicted / point.tokens_per_s - 1.0

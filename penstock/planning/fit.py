"""The cost model: seconds per token as a sum of six terms, fitted to measured rates.

    seconds/token =   products / F  +  expert products / Fe  +  attention / Fa
                    + bytes moved / B  +  r / row length  +  c

Every coefficient is at least 0. The errors of the fit come from leaving measurements out.
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
_COMMON_SHARE = 0.9  # of the errors that the stated one covers
_HOST_SHARE = 0.2  # of the time of a row, above which the host decides much of it


def work(shape: ModelShape, length: float) -> Floats:
    """What one token costs, in the units of each term."""
    attention = shape.attention_flops(length)
    return np.array([shape.dense_flops, shape.expert_flops, attention, shape.moved_bytes, 1.0 / length, 1.0])


@dataclass(frozen=True)
class CostModel:
    """Seconds for each unit of each term."""

    seconds: Floats  # [terms]

    @classmethod
    def fit(cls, points: Sequence[Point]) -> CostModel:
        """Least squares of relative errors. A term whose coefficient would be negative is left out."""
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
        """Whether terms of the host take much of the time: these differ from machine to machine."""
        times = self.seconds * work(shape, length)
        return float(times[_SCALED_BY_BANDWIDTH.stop :].sum()) > _HOST_SHARE * float(times.sum())

    def scaled(self, known: Gpu, wanted: Gpu) -> CostModel:
        """The same model on another GPU, by the published figures of both. Host terms stay."""
        seconds = self.seconds.copy()
        seconds[_SCALED_BY_FLOPS] *= known.tflops / wanted.tflops
        seconds[_SCALED_BY_BANDWIDTH] *= known.bandwidth / wanted.bandwidth
        return CostModel(seconds)

    def scaled_whole(self, factor: float) -> CostModel:
        """All terms of the device slower by `factor`."""
        seconds = self.seconds.copy()
        seconds[: _SCALED_BY_BANDWIDTH.stop] *= factor
        return CostModel(seconds)


@dataclass(frozen=True)
class ModelError:
    """How far predictions were from measurements that the fit had not seen: shares of the measured rate."""

    median: float
    common: float  # nine of ten errors are below it
    largest: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> ModelError:
        sizes = np.abs(np.array(errors))
        return cls(float(np.median(sizes)), float(np.quantile(sizes, _COMMON_SHARE)), float(sizes.max()))


Errors = list[tuple[Point, float]]


@dataclass(frozen=True)
class Fit:
    """The cost model of one GPU with its errors."""

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
        """How far single machines were from the mean of all on the same rows."""
        several = [same for same in self._by_row.values() if len(same) > 1]
        return [(point, point.tokens_per_s / _mean_rate(same) - 1.0) for same in several for point in same]

    @cached_property
    def unseen_row(self) -> Errors:
        """Errors where one row length of a model was left out, on all machines."""
        errors: Errors = []
        for same in self._by_row.values():
            model = CostModel.fit([point for point in self.points if point not in same])
            errors += [(point, _error(model, point)) for point in same]
        return errors

    @cached_property
    def unseen_model(self) -> Errors:
        """Errors where all measurements of a model were left out: what a new model has to expect. A model
        that alone has experts is not among them: the others say nothing about experts."""
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
        """The errors of measurements that depend on the host as much as this row does."""
        depends = self.model.depends_on_host(shape, length)
        alike = [
            error
            for point, error in errors
            if self.model.depends_on_host(point.shape, point.length) == depends
        ]
        return ModelError.of(alike or [error for _, error in errors])

    def correction(self, shape: ModelShape, length: float) -> float | None:
        """Measured over predicted seconds of a model that was measured itself, at this row length; None for
        others, and beyond the measured lengths."""
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
        """The measurements of each model at each row length."""
        found: dict[tuple[str, int], list[Point]] = {}
        for point in self.points:
            found.setdefault((point.model, point.length), []).append(point)
        return found


def _mean_rate(points: Sequence[Point]) -> float:
    """The geometric mean."""
    return float(np.exp(np.mean(np.log([point.tokens_per_s for point in points]))))


def _error(model: CostModel, point: Point) -> float:
    predicted = 1.0 / model.seconds_per_token(point.shape, point.length)
    return predicted / point.tokens_per_s - 1.0

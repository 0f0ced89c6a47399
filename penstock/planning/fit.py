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


@dataclass(frozen=True)
class Fit:
    """The cost model of one GPU with its errors."""

    points: Sequence[Point]

    @cached_property
    def model(self) -> CostModel:
        return CostModel.fit(self.points)

    @cached_property
    def fitted(self) -> ModelError:
        """Errors of the fit on its own measurements."""
        return ModelError.of([_error(self.model, point) for point in self.points])

    @cached_property
    def unseen_point(self) -> ModelError:
        """Errors where a single measurement was left out."""
        return ModelError.of(
            [
                _error(CostModel.fit([other for other in self.points if other is not point]), point)
                for point in self.points
            ]
        )

    @cached_property
    def unseen_model(self) -> ModelError:
        """Errors where all measurements of a model were left out: what a new model has to expect."""
        return ModelError.of([error for errors in self.errors_by_model().values() for error in errors])

    def errors_by_model(self) -> dict[str, list[float]]:
        """The errors of each model's measurements where the others alone were fitted. A model that alone has
        experts is not among them: the others say nothing about experts."""
        errors = {}
        for name in dict.fromkeys(point.model for point in self.points):
            own = [point for point in self.points if point.model == name]
            others = [point for point in self.points if point.model != name]
            has_experts = bool(own[0].shape.expert_flops)
            if others and (not has_experts or any(point.shape.expert_flops for point in others)):
                model = CostModel.fit(others)
                errors[name] = [_error(model, point) for point in own]
        return errors

    def correction(self, shape: ModelShape, length: float) -> float | None:
        """Measured over predicted seconds of a model that was measured itself, at this row length; None for
        others, and beyond the measured lengths."""
        own = sorted(
            (point for point in self.points if point.shape.same_work == shape.same_work),
            key=lambda point: point.length,
        )
        if not own or not own[0].length <= length <= own[-1].length:
            return None
        ratios = [
            1.0 / point.tokens_per_s / self.model.seconds_per_token(point.shape, point.length)
            for point in own
        ]
        return float(np.interp(np.log(length), np.log([point.length for point in own]), ratios))


def _error(model: CostModel, point: Point) -> float:
    predicted = 1.0 / model.seconds_per_token(point.shape, point.length)
    return predicted / point.tokens_per_s - 1.0

"""A pooler from what the model's files say: methods × heads."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.spec import DenseSpec, ModelSpec
from penstock.core import PoolingParams, Variant
from penstock.layers.batch import Batch
from penstock.layers.linear import Linear
from penstock.pooling.heads import Dense, cast, unit
from penstock.pooling.methods import METHODS
from penstock.weights.stream import open_weights


class Pooler:
    """Pools a step once, then finishes each variant of its rows."""

    def __init__(self, spec: ModelSpec, dense: list[Dense]) -> None:
        self.methods = [METHODS[name] for name in spec.pooling.methods]
        self.dense = dense
        self.normalize = spec.pooling.normalize

    def __call__(
        self, hidden: Tensor, batch: Batch, variants: tuple[Variant, ...], index: list[Tensor | None]
    ) -> list[Tensor]:
        """One tensor a variant. `index` holds the variants' rows as device integers, None for all."""
        pooled = self._pool(hidden, batch)
        return [
            self._finish(pooled if rows is None else pooled.index_select(0, rows), variant.params)
            for variant, rows in zip(variants, index, strict=True)
        ]

    def _pool(self, hidden: Tensor, batch: Batch) -> Tensor:
        parts = [method(hidden, batch) for method in self.methods]
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        for dense in self.dense:
            pooled = dense(pooled)
        return pooled

    def _finish(self, pooled: Tensor, params: PoolingParams) -> Tensor:
        """Cut, normalise, cast. A cut vector is renormalised unless the caller declines."""
        normalize = self.normalize or params.dimensions is not None
        if params.dimensions is not None:
            pooled = pooled[:, : params.dimensions]
        if normalize if params.normalize is None else params.normalize:
            pooled = unit(pooled)
        return cast(pooled, params.dtype)


def build_pooler(spec: ModelSpec, load_format: str, seed: int, device: torch.device) -> Pooler:
    """Heads are small and stand last, so they stay in fp32 whatever the model runs in."""
    return Pooler(spec, [_dense(spec, dense, load_format, seed, device) for dense in spec.pooling.dense])


def _dense(spec: ModelSpec, dense: DenseSpec, load_format: str, seed: int, device: torch.device) -> Dense:
    weights = open_weights(spec.path / dense.folder, load_format, seed, torch.float32, device)
    weight = weights.take("linear.weight", dense.out_features, dense.in_features)
    bias = weights.take("linear.bias", dense.out_features) if dense.bias else None
    residual = None
    if dense.residual and dense.in_features != dense.out_features:
        residual = Linear(weights.take("residual.weight", dense.out_features, dense.in_features), None)
    weights.finish(())
    return Dense(Linear(weight, bias, dense.activation), residual, dense.residual)

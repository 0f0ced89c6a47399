"""A pooler from what the model's files say: methods × heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.spec import DenseSpec, ModelSpec, label_count
from penstock.core import PoolingParams, Task, Variant
from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.layers.linear import Linear
from penstock.pooling.heads import Dense, unit
from penstock.pooling.methods import CARRIED, METHODS, has_kernel, pool
from penstock.pooling.sparse import Splade, lexical_head
from penstock.weights.stream import open_weights


class Pooler:
    """Finishes each variant of a step's rows; what several variants need is computed once."""

    def __init__(self, spec: ModelSpec, heads: Mapping[Task, TaskHead], dense: list[Dense]) -> None:
        self.methods = [METHODS[name] for name in spec.pooling.methods]
        self.carries = any(name in CARRIED for name in spec.pooling.methods)
        self.dense = dense
        # Where pooling is one method and nothing else, it is finished in the same pass.
        self.alone = spec.pooling.methods[0] if len(spec.pooling.methods) == 1 and not dense else None
        self.heads = heads
        self.normalize = spec.pooling.normalize
        self.activate = softmax_or_sigmoid(spec.config)
        self.splade: Splade | None = None
        if spec.sparse is not None and spec.sparse.kind == "splade":
            self.splade = Splade(heads[Task.SPARSE], spec.sparse)

    def __call__(
        self, hidden: Tensor, batch: Batch, variants: tuple[Variant, ...], index: list[Tensor | None]
    ) -> list[Tensor]:
        """One tensor a variant. `index` holds the variants' rows (or tokens) as device integers, None for
        all."""
        done: dict[Task, Tensor] = {}
        if batch.memory is not None and self.carries:
            done[Task.EMBED] = self._pool(hidden, batch)  # sums go on even where no row ends
        out = []
        for variant, chosen in zip(variants, index, strict=True):
            task = variant.params.task
            if task is Task.SPARSE and self.splade is not None:
                out.append(self.splade(hidden, batch, variant, chosen))
                continue
            if task is Task.EMBED and self.alone is not None and has_kernel(hidden, batch):
                dims, normalize = self._cut(variant.params)
                out.append(pool(self.alone, hidden, batch, rows=chosen, dims=dims, normalize=normalize))
                continue
            if task not in done:
                done[task] = self._of_task(task, hidden, batch)
            values = done[task] if chosen is None else done[task].index_select(0, chosen)
            out.append(self._finish(values, variant.params))
        return out

    def _of_task(self, task: Task, hidden: Tensor, batch: Batch) -> Tensor:
        """Values of the whole run: [rows, width], or [tokens, width] of per-token tasks."""
        if task is Task.EMBED:
            return self._pool(hidden, batch)
        if task is Task.TOKEN_EMBED:
            return hidden  # made fp32 once it is chosen and cut
        head = self.heads[task]
        read = hidden if head.method == "all" else METHODS[head.method](hidden, batch).to(hidden.dtype)
        return head.project(read).float()

    def _pool(self, hidden: Tensor, batch: Batch) -> Tensor:
        parts = [method(hidden, batch) for method in self.methods]
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        for dense in self.dense:
            pooled = dense(pooled)
        return pooled

    def _finish(self, values: Tensor, params: PoolingParams) -> Tensor:
        """Cut, normalise or activate, in fp32."""
        if params.task in (Task.EMBED, Task.TOKEN_EMBED):
            dims, normalize = self._cut(params)
            values = unit(values[:, :dims]) if normalize else values[:, :dims].float()
        elif params.task is not Task.SPARSE and params.normalize is not False:
            values = self.activate(values)
        return values

    def _cut(self, params: PoolingParams) -> tuple[int | None, bool]:
        """How many components stay, and whether the vector is normalised: a cut one is, unless the caller
        declines."""
        normalize = self.normalize or params.dimensions is not None
        return params.dimensions, normalize if params.normalize is None else params.normalize


def softmax_or_sigmoid(config: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """A classifier's activation: sigmoid for one label or several at once, softmax otherwise."""
    several = config.get("problem_type") == "multi_label_classification"
    if several or label_count(config) == 1:
        return torch.sigmoid
    return lambda values: torch.softmax(values, dim=-1)


def build_pooler(
    spec: ModelSpec, heads: Mapping[Task, TaskHead], load_format: str, seed: int, device: torch.device
) -> Pooler:
    """Dense modules are small and stand last, so they stay in fp32 whatever the model runs in."""
    dense = [_dense(spec, dense, load_format, seed, device) for dense in spec.pooling.dense]
    if spec.sparse is not None and spec.sparse.kind == "lexical":
        heads = {**heads, Task.SPARSE: lexical_head(spec, spec.sparse, load_format, seed, device)}
    return Pooler(spec, heads, dense)


def _dense(spec: ModelSpec, dense: DenseSpec, load_format: str, seed: int, device: torch.device) -> Dense:
    weights = open_weights(spec.path / dense.folder, load_format, seed, torch.float32, device)
    weight = weights.take("linear.weight", dense.out_features, dense.in_features)
    bias = weights.take("linear.bias", dense.out_features) if dense.bias else None
    residual = None
    if dense.residual and dense.in_features != dense.out_features:
        residual = Linear(weights.take("residual.weight", dense.out_features, dense.in_features), None)
    weights.finish(())
    return Dense(Linear(weight, bias, dense.activation), residual, dense.residual)

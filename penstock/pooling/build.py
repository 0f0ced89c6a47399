"""Builds the pooler from the model's files: pooling methods × heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.dense import DenseSpec, ModuleSpec, UnitSpec
from penstock.checkpoint.labels import label_count
from penstock.checkpoint.spec import ModelSpec
from penstock.layers.batch import Batch
from penstock.layers.head import Stack, TaskHead
from penstock.layers.labels import LabelTensors
from penstock.layers.linear import Linear
from penstock.pooling.heads import BINARY_DTYPES, Dense, LayerNorm, VectorModule, quantize, unit
from penstock.pooling.methods import CARRIED, METHODS, has_kernel, pool
from penstock.pooling.score import ScoreHead
from penstock.pooling.side_heads import lexical_head, multi_vector_head
from penstock.pooling.sparse import Splade
from penstock.scoring.pairs import PairScorer, PairTensors
from penstock.types import PoolingParams, Task, Variant
from penstock.weights.stream import open_weights

# A task, and whether its head reads every token although it could read pooled rows.
_ValuesKey = tuple[Task, bool]


class VariantTensors(NamedTuple):
    """The parts of a `Variant` that the pooler needs on the device."""

    selected: Tensor | None = None  # int32 indices of rows or tokens; None: all
    pairs: PairTensors | None = None  # if the variant scores pairs
    labels: LabelTensors | None = None  # if the variant's prompts name labels


class Pooler:
    """Pools each variant of a step. Values that several variants need are computed once."""

    def __init__(
        self, spec: ModelSpec, heads: Mapping[Task, TaskHead], modules: Sequence[VectorModule]
    ) -> None:
        self.names = spec.pooling.methods
        self.methods = [METHODS[name] for name in self.names]
        self.carries = any(name in CARRIED for name in self.names)
        self.modules = modules
        # If pooling is a single method, one kernel pools, truncates and normalises.
        self.quantizes = spec.pooling.quantizes
        is_plain = len(self.names) == 1 and not modules and not self.quantizes
        self.single_method = self.names[0] if is_plain else None
        # Set by a model that computes row means itself, so that hidden states of tokens are not needed.
        self.row_means: Callable[[Batch], Tensor] | None = None
        self.heads = {Task.REWARD: heads[Task.CLASSIFY], **heads} if Task.CLASSIFY in heads else heads
        self.normalize = spec.pooling.normalize
        self.activates = spec.pooling.activates
        self.normalize_tokens = spec.pooling.normalize if spec.late is None else spec.late.normalize
        self.normalize_tokens |= spec.multi_vector is not None
        self.activate = softmax_or_sigmoid(spec.config)
        self.scorer: PairScorer | None = None  # set if the model scores pairs by their vectors
        self.score_head = None if spec.score is None else ScoreHead(spec.score)
        self.splade: Splade | None = None
        if spec.sparse is not None and spec.sparse.kind == "splade":
            self.splade = Splade(heads[Task.SPARSE], spec.sparse)

    def __call__(
        self,
        hidden: Tensor,
        batch: Batch,
        variants: tuple[Variant, ...],
        tensors: Sequence[VariantTensors],
    ) -> list[Tensor]:
        """Return one tensor for each variant."""
        done: dict[_ValuesKey, Tensor] = {}
        if batch.kv is not None and self.carries:
            done[Task.EMBED, False] = self._pool(hidden, batch)  # updates running sums even if no row ends
        out = []
        for variant, (selected, pairs, labels) in zip(variants, tensors, strict=True):
            task = variant.params.task
            if labels is not None:
                out.append(self._label_scores(task, hidden, labels))
                continue
            if pairs is not None:
                out.append(self._scores(hidden, batch, selected, pairs, done))
                continue
            if task is Task.SPARSE and self.splade is not None:
                out.append(self.splade(hidden, batch, variant, selected))
                continue
            if (
                task is Task.EMBED
                and self.single_method is not None
                and self.row_means is None
                and has_kernel(hidden, batch)
            ):
                dims, normalize = self._cut(variant.params)
                out.append(
                    pool(self.single_method, hidden, batch, rows=selected, dims=dims, normalize=normalize)
                )
                continue
            values = self._values((task, variant.params.steps), hidden, batch, done)
            if selected is not None:
                values = values.index_select(0, selected)
            out.append(self._finish(values, variant.params))
        return out

    def reads_tokens(self, variants: tuple[Variant, ...]) -> bool:
        """Whether any variant needs the hidden states of tokens."""
        if self.row_means is None:
            return True
        return any(variant.pairs is None and variant.params.task is not Task.EMBED for variant in variants)

    def reads(self, variants: tuple[Variant, ...]) -> str | None:
        """The pooling method that all variants use; None if they use several or read all tokens."""
        found: set[str] = set()
        for variant in variants:
            task = variant.params.task
            if variant.pairs is not None or variant.params.per_token or task is Task.SPARSE:
                return None
            if variant.labels is not None:
                return None
            if task is Task.EMBED:
                found.update(self.names)
            elif (head := self.heads.get(task) or self.heads.get(Task.CLASSIFY)) is not None:
                found.add(head.method)
            else:
                return None
        return found.pop() if len(found) == 1 and found <= METHODS.keys() else None

    def _scores(
        self,
        hidden: Tensor,
        batch: Batch,
        tokens: Tensor | None,
        pairs: PairTensors,
        done: dict[_ValuesKey, Tensor],
    ) -> Tensor:
        """Score pairs, [pairs, 1], by the vectors that `embed` or `token_embed` would return."""
        if self.scorer is None:
            raise ValueError("a plan that scores pairs needs a pooler with a scorer")
        store = self.scorer.store
        if self.scorer.late and not len(hidden):  # all vectors are stored; `hidden` may have any dtype
            return self.scorer(store[:0], pairs)
        task = Task.TOKEN_EMBED if self.scorer.late else Task.EMBED
        vectors = self._values((task, False), hidden, batch, done)
        if self.scorer.late:
            return self.scorer(unit(vectors, tokens, store.dtype), pairs)
        if self.quantizes:
            vectors = quantize(vectors)
        return self.scorer(unit(vectors) if self.normalize else vectors, pairs)

    def _label_scores(self, task: Task, hidden: Tensor, labels: LabelTensors) -> Tensor:
        score = self.heads[task].score_labels
        if score is None:
            raise ValueError(f"the head for {task.value} reads no labels")
        return score(hidden, labels)

    def _values(
        self, key: _ValuesKey, hidden: Tensor, batch: Batch, done: dict[_ValuesKey, Tensor]
    ) -> Tensor:
        """Values of the whole batch: [rows, width], or [tokens, width] for per-token tasks."""
        if key not in done:
            done[key] = self._compute_values(*key, hidden, batch)
        return done[key]

    def _compute_values(self, task: Task, steps: bool, hidden: Tensor, batch: Batch) -> Tensor:
        if task is Task.EMBED:
            return self._pool(hidden, batch)
        if batch.adapters is not None:
            batch.adapters.use("tokens")
        if task is Task.TOKEN_EMBED:  # cast to fp32 after selection and truncation
            return hidden if task not in self.heads else self.heads[task].project(hidden)
        head = self.heads.get(task) or self.heads[Task.CLASSIFY]  # also used for scores and rewards
        if head.pools_outputs and not steps:
            return METHODS[head.method](head.project(hidden), batch)
        all_tokens = steps or head.method == "all"
        read = hidden if all_tokens else METHODS[head.method](hidden, batch).to(hidden.dtype)
        if not all_tokens and batch.adapters is not None:
            batch.adapters.use("rows")
        values = head.project(read).float()
        return self.score_head(values) if task is Task.SCORE and self.score_head is not None else values

    def _pool(self, hidden: Tensor, batch: Batch) -> Tensor:
        if self.row_means is not None:
            pooled = self.row_means(batch)
        else:
            parts = [method(hidden, batch) for method in self.methods]
            pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        for module in self.modules:
            pooled = module(pooled)
        return pooled

    def _finish(self, values: Tensor, params: PoolingParams) -> Tensor:
        """Truncate, normalise or activate, in fp32."""
        if params.task in (Task.EMBED, Task.TOKEN_EMBED):
            dims, normalize = self._cut(params)
            if self.quantizes and params.task is Task.EMBED and params.dtype not in BINARY_DTYPES:
                values = quantize(values)  # binary outputs keep the signs of the unquantised vector
            values = unit(values[:, :dims]) if normalize else values[:, :dims].float()
        elif params.task is not Task.SPARSE and self._activates(params):
            score_head = self.score_head if params.task is Task.SCORE else None
            values = self.activate(values) if score_head is None else score_head.activate(values)
        return values

    def _cut(self, params: PoolingParams) -> tuple[int | None, bool]:
        """Return the number of components to keep (None: all), and whether to normalise.

        A truncated vector is normalised, unless the request declines it or the model's vectors are integers.
        """
        own = self.normalize_tokens if params.task is Task.TOKEN_EMBED else self.normalize
        normalize = own or (params.dimensions is not None and not self.quantizes)
        return params.dimensions, normalize if params.normalize is None else params.normalize

    def _activates(self, params: PoolingParams) -> bool:
        """Whether to activate. Labels become probabilities unless the request or the configuration declines;
        the reward of a whole text is a raw score."""
        if params.normalize is not None:
            return params.normalize
        if self.activates is not None:
            return self.activates
        return params.task is not Task.REWARD or params.steps


def softmax_or_sigmoid(config: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """A classifier's activation: sigmoid if it has one label or is multi-label, otherwise softmax."""
    is_multi_label = config.get("problem_type") == "multi_label_classification"
    if is_multi_label or label_count(config) == 1:
        return torch.sigmoid
    return lambda values: torch.softmax(values, dim=-1)


def build_pooler(
    spec: ModelSpec,
    heads: Mapping[Task, TaskHead],
    load_format: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Pooler:
    """Build the pooler.

    Modules on pooled vectors are small, so they are in fp32. Modules on every token use the model's `dtype`.
    """
    modules = [_module(spec, module, load_format, seed, device) for module in spec.pooling.modules]
    if spec.late is not None and spec.late.dense and Task.TOKEN_EMBED not in heads:
        layers = [_dense(spec, dense, load_format, seed, device, dtype) for dense in spec.late.dense]
        heads = {**heads, Task.TOKEN_EMBED: TaskHead("all", Stack(*layers), spec.late.dim)}
    if spec.sparse is not None and spec.sparse.kind == "lexical":
        heads = {**heads, Task.SPARSE: lexical_head(spec, spec.sparse.file, load_format, seed, device)}
    if spec.multi_vector is not None:
        vectors = multi_vector_head(spec, spec.multi_vector, load_format, seed, device)
        heads = {**heads, Task.TOKEN_EMBED: vectors}
    return Pooler(spec, heads, modules)


def _module(
    spec: ModelSpec, module: ModuleSpec, load_format: str, seed: int, device: torch.device
) -> VectorModule:
    if isinstance(module, UnitSpec):
        return unit
    if isinstance(module, DenseSpec):
        return _dense(spec, module, load_format, seed, device)
    source = open_weights(spec.root_path / module.folder, load_format, seed, torch.float32, device)
    with closing(source) as weights:
        norm = LayerNorm(weights.take("norm.weight", module.size), weights.take("norm.bias", module.size))
        weights.check_all_read(())
    return norm


def _dense(
    spec: ModelSpec,
    dense: DenseSpec,
    load_format: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Dense:
    with closing(open_weights(spec.root_path / dense.folder, load_format, seed, dtype, device)) as weights:
        weight = weights.take("linear.weight", dense.out_features, dense.in_features)
        bias = weights.take("linear.bias", dense.out_features) if dense.bias else None
        residual = None
        if dense.residual and dense.in_features != dense.out_features:
            residual = Linear(weights.take("residual.weight", dense.out_features, dense.in_features), None)
        weights.check_all_read(())
    return Dense(Linear(weight, bias, dense.activation), residual, dense.residual)

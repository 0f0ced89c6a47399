"""DeBERTa v2 and v3: post-norm encoders whose attention scores distances separately from content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.kernels.quantize import Activations
from penstock.layers.adapter_state import StepAdapters
from penstock.layers.attention import AttentionKind, attend_fused
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.disentangled import Distances, DistanceTerms, attend_disentangled, disentangled_scale
from penstock.layers.embedding import EncoderEmbedding
from penstock.layers.head import TaskHead
from penstock.layers.linear import LinearLayer
from penstock.layers.mlp import MLP
from penstock.layers.ragged_conv import RaggedConv1d
from penstock.layers.residual import connect_post_norms, post_norm_residual
from penstock.models.heads import BERT_MLM, DEBERTA_MLM, MaskedLMShape, add_head, add_masked_lm_head
from penstock.models.options import require
from penstock.types import Task

IGNORED = ("pooler.", "cls.", "lm_predictions.", "mask_predictions.", "position_embeddings", "position_ids")


class DebertaLayer:
    is_last = False  # whether this is the model's last layer, whose output only a pooler reads

    def __init__(
        self, build: LayerBuilder, prefix: str, config: Mapping[str, Any], relative: RelativeTable | None
    ) -> None:
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        eps, act = config.get("layer_norm_eps", 1e-7), config.get("hidden_act", "gelu")
        own = prefix + "attention.self."
        self.heads: int = config["num_attention_heads"]
        self.qkv = build.linear([own + n for n in ("query_proj", "key_proj", "value_proj")], hidden, hidden)
        self.scale = disentangled_scale(hidden // self.heads, 1 + len(_terms(config)))
        self.relative = relative
        self.projections = _projections(build, own, config, self.qkv)
        self.terms = None if relative is None else self._project(relative)
        self.out = build.linear(prefix + "attention.output.dense", hidden, hidden)
        self.attention_norm = build.norm(prefix + "attention.output.LayerNorm", hidden, eps)
        self.mlp = MLP(
            build.linear(prefix + "intermediate.dense", hidden, inner, act),
            build.linear(prefix + "output.dense", inner, hidden),
        )
        self.output_norm = build.norm(prefix + "output.LayerNorm", hidden, eps)

    def __call__(self, hidden: Tensor, layer_input: Activations, batch: Batch) -> tuple[Tensor, Activations]:
        """`layer_input` is `hidden`, quantised if the first product of the layer needs it. Returns the same
        pair for the next layer."""
        qkv = self.qkv(layer_input)
        if self.terms is None:
            context = attend_fused(qkv, self.heads, batch, AttentionKind(scale=self.scale))
        else:
            query, key, value = qkv.view(len(qkv), 3, self.heads, -1).unbind(1)
            terms = self.terms if batch.adapters is None else self._adapted_terms(batch.adapters)
            context = attend_disentangled(query, key, value, batch, terms, self.scale)
        if self.is_last:
            context, hidden = batch.select_outputs(context, hidden)
        hidden, layer_input = post_norm_residual(self.out, self.attention_norm, context, hidden)
        return post_norm_residual(self.mlp, self.output_norm, layer_input, hidden)

    def _project(self, relative: RelativeTable) -> DistanceTerms:
        """Project the table once, because it does not depend on the input."""
        key, query = (None if each is None else each(relative.table) for each in self.projections)
        return DistanceTerms(relative.distances, self._by_head(key), self._by_head(query))

    def _adapted_terms(self, adapters: StepAdapters) -> DistanceTerms:
        """The projections of the table with each adapter of the step, and which of them each row uses."""
        assert self.relative is not None
        table, size = self.relative.table, len(self.relative.table)
        slots, of_row = adapters.distinct_slots()
        adapters.use_runs(slots, np.full(len(slots), size, dtype=np.int32))
        every = table.repeat(len(slots), 1)
        found = [None if each is None else each(every) for each in self.projections]
        adapters.use("tokens")
        key, query = (
            None if x is None else x.view(len(slots), size, self.heads, -1).transpose(1, 2) for x in found
        )
        return DistanceTerms(self.relative.distances, key, query, of_row)

    def _by_head(self, rows: Tensor | None) -> Tensor | None:
        """[rows, hidden] → [heads, rows, dim]."""
        return None if rows is None else rows.view(len(rows), self.heads, -1).transpose(0, 1).contiguous()


def _projections(
    build: LayerBuilder, own: str, config: Mapping[str, Any], qkv: LinearLayer
) -> tuple[Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None]:
    """The projections of the distance table to keys and to queries; None for a term that the model lacks."""
    wanted, hidden = _terms(config), config["hidden_size"]
    key: Callable[[Tensor], Tensor] | None = None
    query: Callable[[Tensor], Tensor] | None = None
    if not config.get("relative_attention"):
        return None, None
    if config.get("share_att_key"):
        if "c2p" in wanted:
            key = lambda table: qkv(table).chunk(3, dim=-1)[1]  # noqa: E731
        if "p2c" in wanted:
            query = lambda table: qkv(table).chunk(3, dim=-1)[0]  # noqa: E731
        return key, query
    if "c2p" in wanted:
        key = build.linear(own + "pos_key_proj", hidden, hidden)
    if "p2c" in wanted:
        query = build.linear(own + "pos_query_proj", hidden, hidden)
    return key, query


class RelativeTable:
    """Embeddings of distances, shared by all layers."""

    def __init__(self, build: LayerBuilder, prefix: str, config: Mapping[str, Any]) -> None:
        hidden, limit = config["hidden_size"], config["max_position_embeddings"]
        max_distance = config.get("max_relative_positions", -1)
        max_distance = limit if max_distance < 1 else max_distance
        buckets = config.get("position_buckets", -1)
        span = buckets if buckets > 0 else max_distance
        table = build.table(prefix + "encoder.rel_embeddings", 2 * span, hidden)
        norms = {part.strip() for part in str(config.get("norm_rel_ebd", "none")).lower().split("|")}
        if not norms <= {"none", "layer_norm"}:
            raise ModelLoadError(
                f"config.json has norm_rel_ebd = {config['norm_rel_ebd']!r}, which is not supported; "
                "supported: none, layer_norm"
            )
        if "layer_norm" in norms:
            table = build.norm(prefix + "encoder.LayerNorm", hidden, config.get("layer_norm_eps", 1e-7))(
                table
            )
        self.table = table  # [2 · span, hidden]
        self.distances = Distances(span, limit, table.device, buckets=buckets, max_distance=max_distance)


class Deberta:
    """token ids → hidden states [tokens, hidden]."""

    def __init__(self, build: LayerBuilder, config: Mapping[str, Any]) -> None:
        hidden: int = config["hidden_size"]
        eps = config.get("layer_norm_eps", 1e-7)
        self.prefix = build.weights.prefix_of("embeddings.word_embeddings.weight")
        self.embedding, self.widen = _embedding(build, self.prefix + "embeddings.", config)
        self.embedding_norm = build.norm(self.prefix + "embeddings.LayerNorm", hidden, eps)
        relative = RelativeTable(build, self.prefix, config) if config.get("relative_attention") else None
        self.layers = [
            DebertaLayer(build, f"{self.prefix}encoder.layer.{i}.", config, relative)
            for i in range(config["num_hidden_layers"])
        ]
        connect_post_norms(self.layers)
        self.conv = _conv(build, self.prefix + "encoder.conv.", config)
        if self.conv is not None:
            self.conv_norm = build.norm(self.prefix + "encoder.conv.LayerNorm", hidden, eps)
        self.prunes_last_layer = self.conv is None or len(self.layers) > 1
        self.layers[-1].is_last = self.prunes_last_layer
        self.hidden_size = hidden
        self.is_causal = False
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors: tuple[str, ...] = IGNORED

    def __call__(self, batch: Batch) -> Tensor:
        embedded = self.embedding(batch)
        if self.widen is not None:
            embedded = self.widen(embedded)
        embedded = self.embedding_norm(embedded)
        hidden, layer_input = self.layers[0](embedded, embedded, batch)
        if self.conv is not None:  # runs in parallel to the first layer
            hidden = layer_input = self.conv_norm(hidden + self.conv(embedded, batch))
        for layer in self.layers[1:]:
            hidden, layer_input = layer(hidden, layer_input, batch)
        return hidden


def deberta(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Deberta:
    hidden = config["hidden_size"]
    require(config, attention_head_size=hidden // config["num_attention_heads"], pooler_hidden_size=hidden)
    if config.get("relative_attention") and not _terms(config):
        raise ModelLoadError(
            "config.json has relative_attention, but no pos_att_type; it has to name c2p, p2c or both"
        )
    if unknown := set(_terms(config)) - {"c2p", "p2c"}:
        raise ModelLoadError(
            f"config.json has pos_att_type {', '.join(sorted(unknown))}, which is not supported; "
            "supported: c2p, p2c"
        )
    model = Deberta(build, config)
    if head is Task.CLASSIFY:
        dense = build.linear("pooler.dense", hidden, hidden, config.get("pooler_hidden_act", "gelu"))
        add_head(model, build, config, head, "classifier", dense)
    elif head is Task.TOKEN_CLASSIFY:
        add_head(model, build, config, head, "classifier")
    elif head is Task.SPARSE:
        names = DEBERTA_MLM if build.weights.has(f"{DEBERTA_MLM.dense}.weight") else BERT_MLM
        act, eps = config.get("hidden_act", "gelu"), config.get("layer_norm_eps", 1e-7)
        shape = MaskedLMShape(names=names, act=act, eps=eps)
        add_masked_lm_head(model, build, config, model.embedding.words, shape)
    return model


def _terms(config: Mapping[str, Any]) -> list[str]:
    named = config.get("pos_att_type") or []
    return [part.strip() for part in named.lower().split("|")] if isinstance(named, str) else list(named)


def _embedding(
    build: LayerBuilder, tables: str, config: Mapping[str, Any]
) -> tuple[EncoderEmbedding, LinearLayer | None]:
    """The embedding, and the projection after it if its tables are narrower than the model."""
    size = config.get("embedding_size") or config["hidden_size"]
    segments = config.get("type_vocab_size", 0)
    positions = config["max_position_embeddings"] if config.get("position_biased_input", True) else 0
    embedding = EncoderEmbedding(
        build.table(tables + "word_embeddings", config["vocab_size"], size),
        build.table(tables + "position_embeddings", positions, size) if positions else None,
        build.table(tables + "token_type_embeddings", segments, size) if segments else None,
    )
    build.adapt_embedding(embedding, tables)
    if size == config["hidden_size"]:
        return embedding, None
    return embedding, build.linear(tables + "embed_proj", size, config["hidden_size"], bias=False)


def _conv(build: LayerBuilder, prefix: str, config: Mapping[str, Any]) -> RaggedConv1d | None:
    kernel, groups = config.get("conv_kernel_size") or 0, config.get("conv_groups") or 1
    if kernel <= 0:
        return None
    if kernel % 2 == 0:
        raise ModelLoadError(f"config.json has conv_kernel_size = {kernel}; it has to be odd")
    hidden = config["hidden_size"]
    return RaggedConv1d(
        build.weights.take(prefix + "conv.weight", hidden, hidden // groups, kernel),
        build.weights.take(prefix + "conv.bias", hidden),
        config.get("conv_act", "tanh"),
        groups,
    )

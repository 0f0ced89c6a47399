"""Post-norm encoders with learned positions: BERT, RoBERTa, XLM-R, CamemBERT, DistilBERT, MPNet, ELECTRA,
ALBERT and ERNIE.

They share the wiring. They differ in tensor names, in the first position and in a few parts: MPNet has a
position bias on attention scores, ELECTRA and ALBERT have narrow word tables, ALBERT repeats its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.kernels.quantize import Activations
from penstock.layers.attention import BIDIRECTIONAL, ScoreBias, attend_fused
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.distance_bias import distance_bucket
from penstock.layers.embedding import EncoderEmbedding
from penstock.layers.head import TaskHead
from penstock.layers.linear import LinearLayer, scratch_width
from penstock.layers.mlp import MLP
from penstock.layers.parallel import Units
from penstock.layers.residual import connect_post_norms, post_norm_residual
from penstock.models.heads import (
    ALBERT_MLM,
    BERT_MLM,
    DISTILBERT_MLM,
    ELECTRA_MLM,
    ROBERTA_MLM,
    MaskedLMNames,
    MaskedLMShape,
    add_head,
    add_masked_lm_head,
    add_pooler_head,
    add_two_step_head,
)
from penstock.models.options import option
from penstock.types import Task


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The tensor names of a family, below its prefix."""

    layer: str = "encoder.layer.{}."
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    output_norm: str = "output.LayerNorm"


BERT_NAMES = TensorNames()
DISTILBERT_NAMES = TensorNames(
    layer="transformer.layer.{}.",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    output_norm="output_layer_norm",
)
MPNET_NAMES = TensorNames(
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
)

ALBERT_NAMES = TensorNames(
    layer="encoder.albert_layer_groups.{}.albert_layers.{}.",
    query="attention.query",
    key="attention.key",
    value="attention.value",
    out="attention.dense",
    attention_norm="attention.LayerNorm",
    up="ffn",
    down="ffn_output",
    output_norm="full_layer_layer_norm",
)

# Heads and buffers that no model here reads.
IGNORED = ("pooler.", "cls.", "lm_head.", "vocab_", "qa_outputs.", "position_ids")
ELECTRA_HEADS = ("discriminator_predictions.", "generator_predictions.", "generator_lm_head.")
ALBERT_HEADS = ("predictions.", "sop_classifier.")


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    positions: int
    segments: int  # 0: the family has no segments
    first_position: int
    act: str
    eps: float
    names: TensorNames
    bias_buckets: int = 0  # MPNet
    embedding: int = 0  # width of the word table; 0: the width of the model
    widen: str = ""  # name of the projection after a narrower table
    layer_names: tuple[str, ...] = ()  # name of each layer, if layers are repeated
    tasks: int = 0  # rows of ERNIE's table of tasks; only the first is used
    ignored: tuple[str, ...] = ()  # names of unused heads, in addition to `IGNORED`

    @property
    def layer_prefixes(self) -> tuple[str, ...]:
        return self.layer_names or tuple(self.names.layer.format(i) for i in range(self.layers))


class EncoderLayer:
    is_last = False  # whether this is the model's last layer, whose output only a pooler reads

    def __init__(self, build: LayerBuilder, prefix: str, shape: Shape) -> None:
        names, hidden = shape.names, shape.hidden
        heads, inner = Units(shape.heads, hidden // shape.heads), Units(shape.intermediate)
        self.heads = build.num_heads(shape.heads)
        projections = [prefix + name for name in (names.query, names.key, names.value)]
        self.qkv = build.column(projections, hidden, [heads] * 3)
        self.out = build.row(prefix + names.out, heads, hidden)
        self.attention_norm = build.norm(prefix + names.attention_norm, hidden, shape.eps)
        self.mlp = MLP(
            build.column(prefix + names.up, hidden, [inner], shape.act),
            build.row(prefix + names.down, inner, hidden),
        )
        self.output_norm = build.norm(prefix + names.output_norm, hidden, shape.eps)
        self.widths = tuple(map(scratch_width, (self.qkv, self.out, self.mlp.up, self.mlp.down)))

    def repeated(self) -> EncoderLayer:
        """The same weights at another depth. Norms are copied, because other layers may follow them there."""
        layer = copy(self)
        layer.attention_norm, layer.output_norm = copy(self.attention_norm), copy(self.output_norm)
        return layer

    def __call__(
        self, hidden: Tensor, layer_input: Activations, batch: Batch, bias: ScoreBias | None
    ) -> tuple[Tensor, Activations]:
        """`layer_input` is `hidden`, quantised if the first product of the layer needs it. Returns the same
        pair for the next layer."""
        qkv, between, middle, last = batch.scratch_buffers(self.widths, hidden)
        context = attend_fused(self.qkv(layer_input, out=qkv), self.heads, batch, BIDIRECTIONAL, bias)
        if self.is_last and batch.output_tokens is not None:
            context, hidden = batch.select_outputs(context, hidden)
            between = middle = last = None
        hidden, layer_input = post_norm_residual(self.out, self.attention_norm, context, hidden, between)
        return post_norm_residual(
            partial(self.mlp, scratch=middle), self.output_norm, layer_input, hidden, last
        )


class Encoder:
    """token ids → hidden states [tokens, hidden]."""

    def __init__(self, build: LayerBuilder, shape: Shape) -> None:
        prefix = build.weights.prefix_of("embeddings.word_embeddings.weight")
        self.embedding, self.widen = _embedding(build, prefix, shape)
        made: dict[str, EncoderLayer] = {}
        self.layers = []
        for name in shape.layer_prefixes:
            layer = made[name].repeated() if name in made else EncoderLayer(build, prefix + name, shape)
            made.setdefault(name, layer)
            self.layers.append(layer)
        self.layers[-1].is_last = True
        connect_post_norms(self.layers)
        self.bias = _RelativeBias(build, prefix, shape) if shape.bias_buckets else None
        self.hidden_size = shape.hidden
        self.is_causal = False
        self.prunes_last_layer = True
        self.prefix = prefix
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors = (*IGNORED, *shape.ignored)

    def __call__(self, batch: Batch) -> Tensor:
        hidden = self.embedding(batch)
        if self.widen is not None:
            hidden = self.widen(hidden)
        layer_input: Activations = hidden
        for layer in self.layers:
            hidden, layer_input = layer(hidden, layer_input, batch, self.bias)
        return hidden


def _embedding(build: LayerBuilder, prefix: str, shape: Shape) -> tuple[EncoderEmbedding, LinearLayer | None]:
    """The embedding, and the projection after it if its tables are narrower than the model."""
    tables, width = prefix + "embeddings.", shape.embedding or shape.hidden
    segments = (
        build.table(tables + "token_type_embeddings", shape.segments, width) if shape.segments else None
    )
    positions = build.table(tables + "position_embeddings", shape.positions, width)
    if shape.tasks:
        positions = positions + build.table(tables + "task_type_embeddings", shape.tasks, width)[0]
    embedding = EncoderEmbedding(
        build.table(tables + "word_embeddings", shape.vocabulary, width),
        positions,
        segments,
        shape.first_position,
        build.norm(tables + "LayerNorm", width, shape.eps),
    )
    build.adapt_embedding(embedding, tables)
    return embedding, build.linear(prefix + shape.widen, width, shape.hidden) if shape.widen else None


class _RelativeBias:
    """MPNet's bias by bucketed distance, shared by all layers and cached for a few lengths."""

    MAX_CACHED_LENGTHS = 32

    def __init__(self, build: LayerBuilder, prefix: str, shape: Shape) -> None:
        table = build.table(prefix + "encoder.relative_attention_bias", shape.bias_buckets, shape.heads)
        self.table = build.own_heads(table)  # [buckets, heads]
        self.buckets = shape.bias_buckets
        self._by_length: dict[int, Tensor] = {}

    def __call__(self, length: int) -> Tensor:
        if length not in self._by_length:
            if len(self._by_length) >= self.MAX_CACHED_LENGTHS:
                self._by_length.pop(next(iter(self._by_length)))
            self._by_length[length] = self._make(length)
        return self._by_length[length]

    def _make(self, length: int) -> Tensor:
        position = torch.arange(length, device=self.table.device)
        bucket = distance_bucket(position[None, :] - position[:, None], self.buckets)
        return self.table[bucket].permute(2, 0, 1).contiguous()  # [heads, length, length]


def bert(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Encoder:
    tasks = config.get("task_type_vocab_size", 3) if config.get("use_task_id") else 0  # ERNIE
    model = Encoder(build, replace(_bert_shape(config, first_position=0), tasks=tasks))
    add_pooler_head(model, build, config, head)
    if head is Task.SPARSE:
        _add_masked_lm(model, build, config, BERT_MLM, config.get("hidden_act", "gelu"))
    return model


def roberta(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Encoder:
    model = Encoder(build, _bert_shape(config, first_position=int(config.get("pad_token_id", 1)) + 1))
    add_two_step_head(model, build, config, head)
    if head is Task.SPARSE:
        _add_masked_lm(model, build, config, ROBERTA_MLM, "gelu")
    return model


def distilbert(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Encoder:
    shape = Shape(
        hidden=config["dim"],
        layers=config["n_layers"],
        heads=config["n_heads"],
        intermediate=config["hidden_dim"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        segments=0,
        first_position=0,
        act=config.get("activation", "gelu"),
        eps=1e-12,
        names=DISTILBERT_NAMES,
    )
    model = Encoder(build, shape)
    if head is Task.CLASSIFY:
        dense = build.linear("pre_classifier", shape.hidden, shape.hidden, "relu")
        add_head(model, build, config, head, "classifier", dense)
    elif head is Task.TOKEN_CLASSIFY:
        add_head(model, build, config, head, "classifier")
    elif head is Task.SPARSE:
        _add_masked_lm(model, build, config, DISTILBERT_MLM, shape.act, eps=shape.eps)
    return model


def mpnet(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Encoder:
    shape = _bert_shape(
        config,
        first_position=int(config.get("pad_token_id", 1)) + 1,
        names=MPNET_NAMES,
        bias_buckets=config.get("relative_attention_num_buckets", 32),
        segments=0,
    )
    model = Encoder(build, shape)
    add_two_step_head(model, build, config, head)
    if head is Task.SPARSE:
        _add_masked_lm(model, build, config, ROBERTA_MLM, "gelu")
    return model


def electra(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Encoder:
    shape = _bert_shape(config, first_position=0)
    width = option(config, "embedding_size")
    widen = "embeddings_project" if width != shape.hidden else ""
    model = Encoder(build, replace(shape, embedding=width, widen=widen, ignored=ELECTRA_HEADS))
    add_two_step_head(model, build, config, head, act="gelu")
    if head is Task.SPARSE:
        _add_masked_lm(model, build, config, ELECTRA_MLM, "gelu")
    return model


def albert(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Encoder:
    """ALBERT. Each group of layers is repeated, and may have several layers."""
    act = config.get("hidden_act", "gelu_new")
    shape = replace(_bert_shape(config, first_position=0, names=ALBERT_NAMES), act=act)
    groups, inner = config.get("num_hidden_groups", 1), config.get("inner_group_num", 1)
    names = [
        ALBERT_NAMES.layer.format(int(i / (shape.layers / groups)), j)
        for i in range(shape.layers)
        for j in range(inner)
    ]
    width = option(config, "embedding_size")
    narrow = {"embedding": width, "widen": "encoder.embedding_hidden_mapping_in"}
    model = Encoder(build, replace(shape, layer_names=tuple(names), ignored=ALBERT_HEADS, **narrow))
    if head is Task.CLASSIFY:
        dense = build.linear(model.prefix + "pooler", shape.hidden, shape.hidden, "tanh")
        add_head(model, build, config, head, "classifier", dense)
    elif head is Task.TOKEN_CLASSIFY:
        add_head(model, build, config, head, "classifier")
    elif head is Task.SPARSE:
        _add_masked_lm(model, build, config, ALBERT_MLM, act)
    return model


def _add_masked_lm(
    model: Encoder,
    build: LayerBuilder,
    config: Mapping[str, Any],
    names: MaskedLMNames,
    act: str,
    *,
    eps: float | None = None,
) -> None:
    """`eps` is for families that do not read it from config.json."""
    shape = MaskedLMShape(names=names, act=act, eps=eps or config.get("layer_norm_eps", 1e-12))
    add_masked_lm_head(model, build, config, model.embedding.words, shape)


def _bert_shape(
    config: Mapping[str, Any],
    *,
    first_position: int,
    names: TensorNames = BERT_NAMES,
    bias_buckets: int = 0,
    segments: int | None = None,
) -> Shape:
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelLoadError(
            f"config.json has position_embedding_type = {kind!r}, which is not supported; supported: absolute"
        )
    return Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        segments=config.get("type_vocab_size", 2) if segments is None else segments,
        first_position=first_position,
        act=config.get("hidden_act", "gelu"),
        eps=config.get("layer_norm_eps", 1e-12),
        names=names,
        bias_buckets=bias_buckets,
    )

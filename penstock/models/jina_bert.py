"""JinaBERT: jina-embeddings-v2 and jina-reranker-v1. BERT with ALiBi instead of learned positions and with
gated feed-forward blocks. The code models also normalise queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.kernels.quantize import Activations
from penstock.layers.attention import AttentionKind, attend, attend_fused
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.distance_bias import DistanceBias, alibi_slopes
from penstock.layers.embedding import EncoderEmbedding
from penstock.layers.head import TaskHead
from penstock.layers.linear import scratch_width
from penstock.layers.mlp import MLP, GatedMLP
from penstock.layers.residual import connect_post_norms, post_norm_residual
from penstock.models.encoder import IGNORED
from penstock.models.heads import BERT_MLM, MaskedLMShape, add_masked_lm_head, add_pooler_head
from penstock.models.options import require
from penstock.types import Task

GATES = {"geglu": "gelu", "reglu": "relu"}


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Tensor names that differ between the two layouts, below the prefix of a layer."""

    gate_up: str
    up: str  # in a block without a gate
    down: str
    plain_down: str  # `down` in a block without a gate
    attention_norm: str
    output_norm: str
    plain_output_norm: str
    gate_first: bool
    plain_bias: bool  # whether `up` has a bias
    normalizes_heads: bool = False  # normalise queries and keys, and attention's output twice


FIRST = TensorNames(
    gate_up="mlp.gated_layers",
    up="intermediate.dense",
    down="mlp.wo",
    plain_down="output.dense",
    attention_norm="attention.output.LayerNorm",
    output_norm="mlp.layernorm",
    plain_output_norm="output.LayerNorm",
    gate_first=True,
    plain_bias=True,
)
CODE = TensorNames(  # jina-bert-v2-qk-post-norm
    gate_up="mlp.up_gated_layer",
    up="mlp.up_layer",
    down="mlp.down_layer",
    plain_down="mlp.down_layer",
    attention_norm="layer_norm_1",
    output_norm="layer_norm_2",
    plain_output_norm="layer_norm_2",
    gate_first=False,
    plain_bias=False,
    normalizes_heads=True,
)


class JinaBertLayer:
    is_last = False  # whether this is the model's last layer, whose output only a pooler reads

    def __init__(
        self,
        build: LayerBuilder,
        prefix: str,
        names: TensorNames,
        config: Mapping[str, Any],
        kind: AttentionKind,
    ) -> None:
        hidden, eps = config["hidden_size"], config.get("layer_norm_eps", 1e-12)
        own = prefix + "attention.self."
        self.heads: int = config["num_attention_heads"]
        self.kind = kind
        self.qkv = build.linear([own + name for name in ("query", "key", "value")], hidden, hidden)
        self.out = build.linear(prefix + "attention.output.dense", hidden, hidden)
        self.head_norms = self.inner_norm = None
        if names.normalizes_heads:
            self.head_norms = tuple(build.norm(f"{own}layer_norm_{part}", hidden, eps) for part in "qk")
            self.inner_norm = build.norm(prefix + "attention.output.LayerNorm", hidden, eps)
        self.attention_norm = build.norm(prefix + names.attention_norm, hidden, eps)
        self.mlp, output_norm = _mlp(build, prefix, names, config)
        self.output_norm = build.norm(prefix + output_norm, hidden, eps)
        parts = (self.qkv, self.out, self.mlp.input_layer, self.mlp.down)
        self.widths = tuple(map(scratch_width, parts))

    def __call__(self, hidden: Tensor, layer_input: Activations, batch: Batch) -> tuple[Tensor, Activations]:
        """`layer_input` is `hidden`, quantised if the first product of the layer needs it. Returns the same
        pair for the next layer."""
        place, between, middle, last = batch.scratch_buffers(self.widths, hidden)
        context = self._attend(self.qkv(layer_input, out=place), batch)
        if self.is_last and batch.output_tokens is not None:
            context, hidden = batch.select_outputs(context, hidden)
            between = middle = last = None
        if self.inner_norm is None:
            hidden, layer_input = post_norm_residual(self.out, self.attention_norm, context, hidden, between)
        else:
            once, _ = post_norm_residual(self.out, self.inner_norm, context, hidden, between)
            hidden, layer_input = self.attention_norm.post_norm(once, hidden)
        return post_norm_residual(
            partial(self.mlp, scratch=middle), self.output_norm, layer_input, hidden, last
        )

    def _attend(self, qkv: Tensor, batch: Batch) -> Tensor:
        if self.head_norms is None:
            return attend_fused(qkv, self.heads, batch, self.kind)
        query, key, value = qkv.chunk(3, dim=-1)
        shape = (len(qkv), self.heads, -1)
        query, key = self.head_norms[0](query).view(shape), self.head_norms[1](key).view(shape)
        return attend(query, key, value.unflatten(-1, shape[1:]), batch, self.kind)


class JinaBert:
    """token ids → hidden states [tokens, hidden]."""

    def __init__(self, build: LayerBuilder, config: Mapping[str, Any]) -> None:
        hidden, eps = config["hidden_size"], config.get("layer_norm_eps", 1e-12)
        self.prefix = build.weights.prefix_of("embeddings.word_embeddings.weight")
        tables = self.prefix + "embeddings."
        self.embedding = EncoderEmbedding(
            build.table(tables + "word_embeddings", config["vocab_size"], hidden),
            None,
            build.table(tables + "token_type_embeddings", config.get("type_vocab_size", 2), hidden),
            norm=build.norm(tables + "LayerNorm", hidden, eps),
        )
        build.adapt_embedding(self.embedding, tables)
        slopes = torch.tensor(alibi_slopes(config["num_attention_heads"]), device=build.weights.device)
        kind = AttentionKind(bias=DistanceBias(slopes, reach=0))
        names = self._names(build, config)
        self.layers = [
            JinaBertLayer(build, f"{self.prefix}encoder.layer.{i}.", names, config, kind)
            for i in range(config["num_hidden_layers"])
        ]
        self.layers[-1].is_last = True
        connect_post_norms(self.layers)
        self.hidden_size = hidden
        self.is_causal = False
        self.prunes_last_layer = True
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors = IGNORED

    def __call__(self, batch: Batch) -> Tensor:
        hidden = self.embedding(batch)
        layer_input: Activations = hidden
        for layer in self.layers:
            hidden, layer_input = layer(hidden, layer_input, batch)
        return hidden

    def _names(self, build: LayerBuilder, config: Mapping[str, Any]) -> TensorNames:
        """The layout of the checkpoint, by the tensors of its feed-forward block."""
        is_gated = _gate(config) is not None
        first = f"{self.prefix}encoder.layer.0."
        tensors = {
            names: f"{first}{names.gate_up if is_gated else names.up}.weight" for names in (FIRST, CODE)
        }
        for names, tensor in tensors.items():
            if build.weights.has(tensor):
                return names
        raise ModelLoadError(f"the checkpoint has none of the tensors {', '.join(tensors.values())}")


def jina_bert(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> JinaBert:
    kind = config.get("position_embedding_type", "absolute")
    if kind != "alibi":
        raise ModelLoadError(
            f"config.json has position_embedding_type = {kind!r}, which is not supported; supported: alibi"
        )
    require(config, is_decoder=False, add_cross_attention=False, emb_pooler="mean", alibi_scaling=1)
    model = JinaBert(build, config)
    add_pooler_head(model, build, config, head)
    if head is Task.SPARSE:
        act, eps = config.get("hidden_act", "gelu"), config.get("layer_norm_eps", 1e-12)
        shape = MaskedLMShape(names=BERT_MLM, act=act, eps=eps)
        add_masked_lm_head(model, build, config, model.embedding.words, shape)
    return model


def _gate(config: Mapping[str, Any]) -> str | None:
    """The activation of the gate; None for a block without a gate."""
    kind = config.get("feed_forward_type", "original")
    if kind != "original" and kind not in GATES:
        raise ModelLoadError(
            f"config.json has feed_forward_type = {kind!r}, which is not supported; "
            f"supported: original, {', '.join(GATES)}"
        )
    return GATES.get(kind)


def _mlp(
    build: LayerBuilder, prefix: str, names: TensorNames, config: Mapping[str, Any]
) -> tuple[MLP | GatedMLP, str]:
    """The feed-forward block, and the name of the norm after it."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if (gate := _gate(config)) is not None:
        gate_up = build.linear(prefix + names.gate_up, hidden, 2 * inner, bias=False)
        down = build.linear(prefix + names.down, inner, hidden)
        return GatedMLP(gate_up, down, gate, names.gate_first), names.output_norm
    act = config.get("hidden_act", "gelu")
    up = build.linear(prefix + names.up, hidden, inner, act, bias=names.plain_bias)
    return MLP(up, build.linear(prefix + names.plain_down, inner, hidden)), names.plain_output_norm

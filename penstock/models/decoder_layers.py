"""The wiring that decoder families share: their shape, attention, layers and the whole stack.

`decoder.py` sets the shape of each family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.attention import AttentionKind, attend
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.clamped_experts import ClampedExperts, ClampedExpertShape
from penstock.layers.head import TaskHead
from penstock.layers.mlp import GatedMLP
from penstock.layers.moe import CompilingBeside, ExpertShape, SparseMLP, make_sparse_mlp, read_experts
from penstock.layers.mrope import SectionedRotary
from penstock.layers.norm import RMSNorm, sandwich
from penstock.layers.parallel import Units
from penstock.layers.residual import Part, ScaledPart, pre_norm_residual
from penstock.layers.rotary import Angles, NoRotary, Rope, Rotary
from penstock.models.options import require
from penstock.types import Task

# Heads and buffers that no model here reads.
IGNORED = ("lm_head.", "rotary_emb.inv_freq")


class QueryGrowth(NamedTuple):
    """The growth of queries with their position p, by 1 + beta · log(1 + ⌊p / trained⌋). It keeps attention
    sharp in texts longer than the training texts."""

    beta: float
    trained: int  # number of trained positions


@dataclass(frozen=True, slots=True)
class DecoderShape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    act: str
    eps: float
    causal: bool
    rope: Rope
    sliding: tuple[bool, ...]  # whether a layer has a window of `reach` and uses `local_rope`
    reach: int | None
    local_rope: Rope
    scale: float | None = None  # factor on attention scores; None: 1 / sqrt(head_dim)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # normalise each head of queries and keys
    wide_qk_norm: bool = False  # normalise all query heads together, and all key heads together
    rotates: tuple[bool, ...] = ()  # whether a layer has rotary positions; (): all layers do
    sandwich: bool = False  # norms both before and after attention and MLP
    post_norm: bool = False  # norms only after attention and MLP
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP
    norm_plus_one: bool = False  # the checkpoint stores norm weights minus one
    embedding_scale: float = 1.0
    generate_reach: int | None = None  # window for generation, if the model embeds without a window
    query_growth: QueryGrowth | None = None
    softcap: float | None = None  # soft cap on attention scores
    fused_projections: bool = False  # the checkpoint stores qkv as one tensor, and gate and up as one
    experts: ExpertShape | None = None  # experts of the layers that are `sparse`
    sparse: tuple[bool, ...] = ()
    clamped_experts: ClampedExpertShape | None = None  # experts of all layers
    sinks: bool = False  # attention sinks: each head has a score without a value
    interleaved: bool = False  # components that are rotated as a pair are adjacent
    pair_axes: tuple[int, ...] = ()  # M-RoPE: the axis that rotates each pair; (): there is only one axis


class DecoderAttention:
    def __init__(
        self, build: LayerBuilder, prefix: str, shape: DecoderShape, layer: int, rotary: Rotary
    ) -> None:
        dim = shape.head_dim
        names = [prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        queries, keys = Units(shape.heads, dim), Units(shape.kv_heads, dim)
        if shape.fused_projections:
            names = [prefix + "qkv_proj"]
        self.qkv = build.column(names, shape.hidden, [queries, keys, keys], bias=shape.qkv_bias)
        self.out = build.row(prefix + "o_proj", queries, shape.hidden, bias=shape.out_bias)
        self.norms = None
        if shape.qk_norm:
            query_norm, key_norm = (_norm(build, prefix + name, dim, shape) for name in ("q_norm", "k_norm"))
            self.norms = (query_norm, key_norm)
        self.heads, self.kv_heads = build.num_heads(shape.heads), build.num_kv_heads(shape.kv_heads)
        self.head_dim = dim
        self.wide_norms: tuple[RMSNorm, ...] = ()
        if shape.wide_qk_norm:
            named = {"q_norm": shape.heads * dim, "k_norm": shape.kv_heads * dim}
            self.wide_norms = tuple(_norm(build, prefix + name, size, shape) for name, size in named.items())
        reach = shape.reach if shape.sliding[layer] else None
        self.kind = AttentionKind(shape.causal, reach, shape.scale, shape.softcap)
        self.generating = (
            self.kind if shape.causal else replace(self.kind, causal=True, window=shape.generate_reach)
        )
        self.sinks = build.weights.take(prefix + "sinks", shape.heads).float() if shape.sinks else None
        self.layer = layer
        self.rotary = rotary

    def __call__(
        self, hidden: Activations, batch: Batch, angles: Angles, growth: Tensor | None = None
    ) -> Tensor:
        """The context vectors, [tokens, heads · dim], before the output projection. `growth` [tokens, 1, 1]
        scales the queries."""
        kind = self.generating if batch.is_generation else self.kind
        keep = None
        if batch.kv is not None and self.rotary.can_write_cache(self.head_dim):
            keep = batch.kv.write_target(self.layer, capped=kind.softcap is not None)
        qkv, first = self.qkv(hidden), 0
        for norm in self.wide_norms:  # first queries, then keys
            part = qkv[:, first : first + norm.shape[0]]
            part.copy_(norm(part))
            first += norm.shape[0]
        query, key, value = self.rotary.rotate_qkv(qkv, self.heads, angles, self.kv_heads, self.norms, keep)
        if growth is not None:
            query = query.mul_(growth)
        return attend(
            query, key, value, batch, kind, layer=self.layer, kv_written=keep is not None, sinks=self.sinks
        )


class DecoderLayer:
    is_last = False  # whether this is the model's last layer, whose output only a pooler reads

    def __init__(
        self, build: LayerBuilder, prefix: str, shape: DecoderShape, layer: int, rotary: Rotary
    ) -> None:
        def norm(name: str) -> RMSNorm:
            return _norm(build, prefix + name, shape.hidden, shape)

        self.attention = DecoderAttention(build, prefix + "self_attn.", shape, layer, rotary)
        self.mlp: GatedMLP | SparseMLP | ClampedExperts
        if shape.clamped_experts is not None:
            self.mlp = ClampedExperts(build, prefix + "mlp.", shape.hidden, shape.clamped_experts)
        elif shape.experts is not None and shape.sparse[layer]:
            self.mlp = _sparse_mlp(build, prefix + "mlp.", shape, shape.experts)
        else:
            self.mlp = _gated_mlp(build, prefix + "mlp.", shape)
        self.out_part: Part = self.attention.out
        self.mlp_part: Part = self.mlp
        if shape.residual_scale != 1:
            self.out_part = ScaledPart(self.attention.out, shape.residual_scale)
            self.mlp_part = ScaledPart(self.mlp, shape.residual_scale)
        self.after_attention = self.after_mlp = None
        self.mlp_norm: RMSNorm | None
        if shape.post_norm:
            self.after_attention = norm("post_attention_layernorm")
            self.mlp_norm = None
            self.after_mlp = norm("post_feedforward_layernorm")
        elif shape.sandwich:
            self.after_attention = norm("post_attention_layernorm")
            self.mlp_norm = norm("pre_feedforward_layernorm")
            self.after_mlp = norm("post_feedforward_layernorm")
        else:
            self.mlp_norm = norm("post_attention_layernorm")
        if isinstance(self.mlp, GatedMLP) and self.mlp_norm is not None:
            self.mlp_norm.quantize_for(self.mlp.input_layer)

    def __call__(
        self,
        hidden: Tensor,
        normed: Activations,
        batch: Batch,
        angles: Angles,
        next_norm: RMSNorm | None,
        growth: Tensor | None = None,
    ) -> tuple[Tensor, Activations]:
        """The hidden states after this layer, plain and normalised by `next_norm`."""
        context = self.attention(normed, batch, angles, growth)
        if self.is_last:
            context, hidden = batch.select_outputs(context, hidden)
        if self.mlp_norm is None or next_norm is None:
            return self._post_norm(context, hidden, next_norm)
        if self.after_attention is None or self.after_mlp is None:
            hidden, normed = pre_norm_residual(self.out_part, self.mlp_norm, context, hidden)
            return pre_norm_residual(self.mlp_part, next_norm, normed, hidden)
        out = self.attention.out
        hidden, normed = sandwich(out(context), hidden, self.after_attention, self.mlp_norm)
        return sandwich(self.mlp(normed), hidden, self.after_mlp, next_norm)

    def _post_norm(
        self, context: Tensor, hidden: Tensor, next_norm: RMSNorm | None
    ) -> tuple[Tensor, Activations]:
        """The rest of a post-norm layer, after attention. `next_norm` is None or the model's final norm."""
        assert self.after_attention is not None and self.after_mlp is not None
        hidden = hidden + self.after_attention(self.attention.out(context))
        hidden = hidden + self.after_mlp(self.mlp(hidden))
        return hidden, hidden if next_norm is None else next_norm(hidden)


class Decoder:
    """token ids → hidden states after the last norm, [tokens, hidden]."""

    def __init__(self, build: LayerBuilder, shape: DecoderShape) -> None:
        prefix = build.weights.prefix_of("embed_tokens.weight")
        self.embedding = build.table(prefix + "embed_tokens", shape.vocabulary, shape.hidden)
        self.adapted_words = build.adapted_table(prefix + "embed_tokens", self.embedding)
        # Gemma's scale is rounded to the model's precision before it is applied.
        self.embedding_scale = float(torch.tensor(shape.embedding_scale, dtype=build.weights.dtype))
        rotaries = _rotaries(build, shape)
        self.rotaries = list(dict.fromkeys(rotaries))
        self.layers: list[DecoderLayer] = []
        with CompilingBeside() as compiling:
            for i, rotary in enumerate(rotaries):
                self.layers.append(DecoderLayer(build, f"{prefix}layers.{i}.", shape, i, rotary))
                compiling.start(self.layers[-1].mlp)
        self.layers[-1].is_last = True
        # Norm i feeds the attention of layer i; it runs together with layer i - 1.
        self.norms: list[RMSNorm | None] = [None] * shape.layers
        if not shape.post_norm:
            names = [f"{prefix}layers.{i}.input_layernorm" for i in range(shape.layers)]
            self.norms = [_norm(build, name, shape.hidden, shape) for name in names]
        for before, layer in zip(self.norms, self.layers, strict=True):
            if before is not None:
                before.quantize_for(layer.attention.qkv)
        self.norms.append(_norm(build, prefix + "norm", shape.hidden, shape))
        self.growth = _growth(shape, build)
        self.shape = shape
        self.hidden_size = shape.hidden
        self.is_causal = shape.causal
        self.prunes_last_layer = True
        self.kv_shape = (shape.layers, build.num_kv_heads(shape.kv_heads), shape.head_dim)
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors: tuple[str, ...] = IGNORED

    def __call__(self, batch: Batch) -> Tensor:
        hidden = F.embedding(batch.token_ids, self.embedding)
        if self.adapted_words is not None:
            self.adapted_words.change_(hidden, batch.token_ids)
        if self.embedding_scale != 1.0:
            hidden.mul_(self.embedding_scale)
        if batch.images is not None:
            hidden = batch.images.embed(hidden)
        angles = {rotary: rotary.angles(batch) for rotary in self.rotaries}
        growth = None if self.growth is None else self.growth.index_select(0, batch.positions)
        first = self.norms[0]
        normed: Activations = hidden if first is None else first(hidden)
        levels = () if batch.images is None else batch.images.levels(self.shape.hidden)
        for number, (layer, next_norm) in enumerate(zip(self.layers, self.norms[1:], strict=True)):
            at = angles[layer.attention.rotary]
            hidden, normed = layer(hidden, normed, batch, at, next_norm, growth)
            if number < len(levels) and batch.images is not None and next_norm is not None:
                hidden = hidden.index_add_(0, batch.images.tokens, levels[number].to(hidden.dtype))
                normed = next_norm(hidden)
        return dequantize(normed)


def _gated_mlp(build: LayerBuilder, prefix: str, shape: DecoderShape) -> GatedMLP:
    names, inner = [prefix + "gate_proj", prefix + "up_proj"], Units(shape.intermediate)
    if shape.fused_projections:
        names = [prefix + "gate_up_proj"]
    gate_up = build.column(names, shape.hidden, [inner, inner], bias=shape.mlp_bias)
    down = build.row(prefix + "down_proj", inner, shape.hidden, bias=shape.mlp_bias)
    return GatedMLP(gate_up, down, shape.act)


def _sparse_mlp(build: LayerBuilder, prefix: str, shape: DecoderShape, experts: ExpertShape) -> SparseMLP:
    router = build.weights.take(prefix + "gate.weight", experts.num_experts, shape.hidden)
    gate_up, down = read_experts(build, prefix + "experts.", experts, shape.hidden, shape.act)
    return make_sparse_mlp(build, router, gate_up, down, experts, shape.act)


def _norm(build: LayerBuilder, name: str, size: int, shape: DecoderShape) -> RMSNorm:
    return build.rms_norm(name, size, shape.eps, plus_one=shape.norm_plus_one)


def _rotaries(build: LayerBuilder, shape: DecoderShape) -> list[Rotary]:
    """The rotary positions of each layer. Layers with the same options share one object."""
    full = _rotary(build, shape, shape.rope)
    local = full if shape.local_rope == shape.rope else _rotary(build, shape, shape.local_rope)
    none = NoRotary(shape.head_dim, device=build.weights.device, dtype=build.weights.dtype)
    rotates = shape.rotates or (True,) * shape.layers
    return [
        (local if slides else full) if rotated else none
        for slides, rotated in zip(shape.sliding, rotates, strict=True)
    ]


def _rotary(build: LayerBuilder, shape: DecoderShape, rope: Rope) -> Rotary:
    weights = build.weights
    require(rope.scaling, partial_rotary_factor=1.0)
    if shape.pair_axes:
        return SectionedRotary(
            shape.head_dim,
            shape.positions,
            rope.base,
            shape.pair_axes,
            scaling=rope.scaling,
            device=weights.device,
            dtype=weights.dtype,
        )
    return Rotary(
        shape.head_dim,
        shape.positions,
        rope.base,
        scaling=rope.scaling,
        interleaved=shape.interleaved,
        device=weights.device,
        dtype=weights.dtype,
    )


def _growth(shape: DecoderShape, build: LayerBuilder) -> Tensor | None:
    """The factor on queries at each position, [positions, 1, 1]; None if it is always 1."""
    if shape.query_growth is None or shape.positions <= shape.query_growth.trained:
        return None
    beta, trained = shape.query_growth
    times = torch.arange(shape.positions, dtype=torch.int64) // trained
    factors = 1 + beta * torch.log1p(times.float())
    return factors[:, None, None].to(dtype=build.weights.dtype, device=build.weights.device)

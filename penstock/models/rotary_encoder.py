"""Post-norm encoders with rotary positions: NomicBERT, GTE, Jina's XLM-R.

They share the wiring. They differ in tensor names, in biases and in the feed-forward block. A checkpoint uses
the names of its original code or of a transformers port. Its tensors decide which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.kernels.quantize import Activations
from penstock.layers.attention import attend, attend_fused
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.embedding import EncoderEmbedding
from penstock.layers.head import TaskHead
from penstock.layers.linear import LinearLayer, scratch_width
from penstock.layers.mlp import MLP, GatedMLP
from penstock.layers.moe import (
    CompilingBeside,
    ExpertShape,
    SparseMLP,
    make_sparse_mlp,
    read_joined_experts,
)
from penstock.layers.parallel import Units
from penstock.layers.residual import connect_post_norms, post_norm_residual
from penstock.layers.rotary import Angles, Rope, Rotary
from penstock.types import Task


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The tensor names of a checkpoint, below its prefix."""

    layer: str
    qkv: tuple[str, ...]  # one fused tensor, or three
    out: str
    attention_norm: str
    up: tuple[str, ...]  # in a gated block, gate and up, fused or separate
    down: str
    output_norm: str
    embedding_norm: str = "embeddings.LayerNorm"


def ported(*, up: tuple[str, ...], down: str) -> TensorNames:
    """The names in transformers ports, which differ from each other only in the feed-forward block."""
    return TensorNames(
        layer="layers.{}.",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        attention_norm="post_attention_layernorm",
        up=up,
        down=down,
        output_norm="post_mlp_layernorm",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    positions: int
    segments: int  # 0: no segments
    act: str
    eps: float
    rope: Rope | None  # None: learned positions
    rope_fraction: float = 1.0  # part of each head that is rotated
    rope_interleaved: bool = False
    first_position: int = 0  # first learned position in use
    gated: bool = False
    gate_first: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    experts: ExpertShape | None = None  # experts of the layers in `expert_layers`
    expert_layers: frozenset[int] = frozenset()


class RotaryEncoderLayer:
    is_last = False  # whether this is the model's last layer, whose output only a pooler reads

    def __init__(
        self,
        build: LayerBuilder,
        prefix: str,
        names: TensorNames,
        shape: Shape,
        rotary: Rotary | None,
        experts: ExpertShape | None = None,
    ) -> None:
        hidden = shape.hidden
        heads = Units(shape.heads, hidden // shape.heads)
        self.heads = build.num_heads(shape.heads)
        self.rotary = rotary
        projections = [prefix + name for name in names.qkv]
        self.qkv = build.column(projections, hidden, [heads] * 3, bias=shape.qkv_bias)
        self.out = build.row(prefix + names.out, heads, hidden, bias=shape.out_bias)
        self.attention_norm = build.norm(prefix + names.attention_norm, hidden, shape.eps)
        self.mlp: MLP | GatedMLP | SparseMLP
        inner: tuple[LinearLayer, ...] = ()
        if experts is not None:
            self.mlp = _sparse_mlp(build, prefix + "mlp.", shape, experts)
        else:
            self.mlp = _mlp(build, prefix, names, shape)
            inner = (self.mlp.input_layer, self.mlp.down)
        self.output_norm = build.norm(prefix + names.output_norm, hidden, shape.eps)
        widths = [scratch_width(layer) for layer in (self.qkv, self.out, *inner)]
        self.widths = (*widths, 0, 0)[:4]

    def __call__(
        self, hidden: Tensor, layer_input: Activations, batch: Batch, angles: Angles | None
    ) -> tuple[Tensor, Activations]:
        """`layer_input` is `hidden`, quantised if the first product of the layer needs it. Returns the same
        pair for the next layer."""
        place, between, middle, last = batch.scratch_buffers(self.widths, hidden)
        qkv = self.qkv(layer_input, out=place)
        if self.rotary is None or angles is None:
            context = attend_fused(qkv, self.heads, batch)
        else:
            context = attend(*self.rotary.rotate_qkv(qkv, self.heads, angles), batch)
        if self.is_last and batch.output_tokens is not None:
            context, hidden = batch.select_outputs(context, hidden)
            between = middle = last = None
        hidden, layer_input = post_norm_residual(self.out, self.attention_norm, context, hidden, between)
        return post_norm_residual(
            partial(self.mlp, scratch=middle), self.output_norm, layer_input, hidden, last
        )


class RotaryEncoder:
    """token ids → hidden states [tokens, hidden]."""

    def __init__(
        self,
        build: LayerBuilder,
        shape: Shape,
        layouts: tuple[TensorNames, ...],
        ignored_tensors: tuple[str, ...],
    ) -> None:
        weights = build.weights
        self.prefix = weights.prefix_of("embeddings.word_embeddings.weight")
        names = self._names(build, layouts)
        tables = self.prefix + "embeddings."
        self.embedding = EncoderEmbedding(
            build.table(tables + "word_embeddings", shape.vocabulary, shape.hidden),
            build.table(tables + "position_embeddings", shape.positions, shape.hidden)
            if shape.rope is None
            else None,
            build.table(tables + "token_type_embeddings", shape.segments, shape.hidden)
            if shape.segments
            else None,
            shape.first_position,
            build.norm(self.prefix + names.embedding_norm, shape.hidden, shape.eps),
        )
        build.adapt_embedding(self.embedding, tables)
        self.rotary = None if shape.rope is None else _rotary(build, shape, shape.rope)
        self.layers: list[RotaryEncoderLayer] = []
        with CompilingBeside() as compiling:
            for i in range(shape.layers):
                prefix = self.prefix + names.layer.format(i)
                experts = shape.experts if i in shape.expert_layers else None
                self.layers.append(RotaryEncoderLayer(build, prefix, names, shape, self.rotary, experts))
                compiling.start(self.layers[-1].mlp)
        for other in (layout for layout in layouts if layout is not names):
            self._add_aliases(build, names, other, shape.layers)
        self.layers[-1].is_last = True
        connect_post_norms(self.layers)
        self.hidden_size = shape.hidden
        self.is_causal = False
        self.prunes_last_layer = True
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors = ignored_tensors

    def __call__(self, batch: Batch) -> Tensor:
        hidden = self.embedding(batch)
        layer_input: Activations = hidden
        angles = None if self.rotary is None else self.rotary.angles(batch)
        for layer in self.layers:
            hidden, layer_input = layer(hidden, layer_input, batch, angles)
        return hidden

    def _add_aliases(self, build: LayerBuilder, own: TensorNames, other: TensorNames, layers: int) -> None:
        """Let adapters use the module names of the other layout (original code or port)."""
        pairs = [
            (own.qkv, other.qkv),
            ((own.out,), (other.out,)),
            (own.up, other.up),
            ((own.down,), (other.down,)),
        ]
        for i in range(layers):
            prefixes = self.prefix + own.layer.format(i), other.layer.format(i)
            for names, others in pairs:
                build.alias(prefixes[0], names, prefixes[1], others)

    def _names(self, build: LayerBuilder, layouts: tuple[TensorNames, ...]) -> TensorNames:
        candidates = [f"{self.prefix}{names.layer.format(0)}{names.down}.weight" for names in layouts]
        for names, tensor in zip(layouts, candidates, strict=True):
            if build.weights.has(tensor):
                return names
        raise ModelLoadError(f"the checkpoint has none of the tensors {', '.join(candidates)}")


def _rotary(build: LayerBuilder, shape: Shape, rope: Rope) -> Rotary:
    return Rotary(
        int(shape.hidden // shape.heads * shape.rope_fraction),
        shape.positions,
        rope.base,
        device=build.weights.device,
        dtype=build.weights.dtype,
        scaling=rope.scaling,
        interleaved=shape.rope_interleaved,
    )


def _mlp(build: LayerBuilder, prefix: str, names: TensorNames, shape: Shape) -> MLP | GatedMLP:
    hidden, inner = shape.hidden, Units(shape.intermediate)
    projections = [prefix + name for name in names.up]
    down = build.row(prefix + names.down, inner, hidden, bias=shape.down_bias)
    if shape.gated:
        up = build.column(projections, hidden, [inner, inner], bias=shape.up_bias)
        return GatedMLP(up, down, shape.act, shape.gate_first)
    return MLP(build.column(projections, hidden, [inner], shape.act, bias=shape.up_bias), down)


def _sparse_mlp(build: LayerBuilder, prefix: str, shape: Shape, experts: ExpertShape) -> SparseMLP:
    """Nomic's experts: two tensors for all experts, and one bias, added to the sum of a token's experts."""
    hidden = shape.hidden
    router = build.weights.take(prefix + "router.layer.weight", experts.num_experts, hidden)
    names = ("mlp.w1", "mlp.w2")
    up, down = read_joined_experts(build, prefix + "experts.", names, experts, hidden, shape.act)
    bias = build.weights.take(prefix + "experts.bias", hidden)
    return make_sparse_mlp(build, router, up, down, experts, shape.act, bias)

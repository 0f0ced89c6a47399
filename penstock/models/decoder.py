"""Decoders: pre-norm, rotary positions, grouped-query attention, gated MLPs.

Llama, Mistral, Ministral3, Phi3, Qwen2, Qwen3 (also with experts), Gemma, Gemma2, Gemma3, Granite, SmolLM3,
OLMo 2 and 3, and EXAONE 4 share one wiring with flags. So do variants trained with bidirectional attention
(embeddinggemma, nemotron-embed, GritLM, pplx-embed, voyage-4-nano).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.labels import label_count, reward_count
from penstock.checkpoint.pooling import pooling_method
from penstock.checkpoint.score import MARK_DIM
from penstock.errors import ModelLoadError
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.attention import AttentionKind, attend
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.clamped_experts import ClampedExperts, ClampedExpertShape
from penstock.layers.head import Stack, TaskHead
from penstock.layers.mlp import GatedMLP
from penstock.layers.moe import CompilingBeside, ExpertShape, SparseMLP, read_experts
from penstock.layers.norm import RMSNorm, sandwich
from penstock.layers.residual import Part, ScaledPart, pre_norm_residual
from penstock.layers.rotary import Angles, NoRotary, Rope, Rotary
from penstock.models.heads import add_language_head
from penstock.models.options import option, require, rope_options, with_defaults, with_values
from penstock.types import Task

log = logging.getLogger("penstock.models")

# Heads and buffers that no model here reads.
IGNORED = ("lm_head.", "rotary_emb.inv_freq")
_IMAGE_TENSORS = ("vision_tower.", "multi_modal_projector.")
_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
# Options that change the computation or the files in ways that are not supported.
_REFUSED = ("attn_logit_softcapping", "text_config")
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}  # whether the window slides


class QueryGrowth(NamedTuple):
    """Queries grow with their position p by 1 + beta · log(1 + ⌊p / trained⌋), so that attention stays sharp
    in texts longer than those of the training."""

    beta: float
    trained: int  # positions


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
    sliding: tuple[bool, ...]  # layers that see only `reach` tokens and use `local_rope`
    reach: int | None
    local_rope: Rope
    scale: float | None = None  # of attention scores; None: 1 / sqrt(head_dim)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # each head of queries and keys is normalised
    wide_qk_norm: bool = False  # all heads of queries and of keys are normalised together
    rotates: tuple[bool, ...] = ()  # layers that rotate queries and keys by their position; (): all
    sandwich: bool = False  # norms after attention and MLP as well as before
    post_norm: bool = False  # norms after attention and MLP alone
    residual_scale: float = 1.0  # of what attention and MLP add to the residual
    norm_plus_one: bool = False  # the checkpoint stores norm weights minus one
    embedding_scale: float = 1.0
    generate_reach: int | None = None  # window while generating, for a model that embeds without one
    query_growth: QueryGrowth | None = None
    softcap: float | None = None  # of attention scores
    fused_projections: bool = False  # the checkpoint stores qkv as one tensor, and gate and up as one
    experts: ExpertShape | None = None  # of layers that are `sparse`
    sparse: tuple[bool, ...] = ()
    clamped_experts: ClampedExpertShape | None = None  # of all layers
    sinks: bool = False  # each head has a score without a value
    interleaved: bool = False  # pairs of components that are rotated together are neighbours


class DecoderAttention:
    def __init__(
        self, build: LayerBuilder, prefix: str, shape: DecoderShape, layer: int, rotary: Rotary
    ) -> None:
        dim = shape.head_dim
        names = [prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        widths = [heads * dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        if shape.fused_projections:
            names, widths = [prefix + "qkv_proj"], [sum(widths)]
        self.qkv = build.linear(names, shape.hidden, widths, bias=shape.qkv_bias)
        self.out = build.linear(prefix + "o_proj", shape.heads * dim, shape.hidden, bias=shape.out_bias)
        self.norms = None
        if shape.qk_norm:
            query_norm, key_norm = (_norm(build, prefix + name, dim, shape) for name in ("q_norm", "k_norm"))
            self.norms = (query_norm, key_norm)
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, dim
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
        for norm in self.wide_norms:  # of queries, then of keys
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
    is_last = False  # of its model: only a pooler reads its output

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
        """What follows attention where no part's input is normalised; `next_norm` is the model's last."""
        assert self.after_attention is not None and self.after_mlp is not None
        hidden = hidden + self.after_attention(self.attention.out(context))
        hidden = hidden + self.after_mlp(self.mlp(hidden))
        return hidden, hidden if next_norm is None else next_norm(hidden)


class Decoder:
    """token ids → hidden states after the last norm, [tokens, hidden]."""

    def __init__(self, build: LayerBuilder, shape: DecoderShape) -> None:
        prefix = build.weights.prefix_of("embed_tokens.weight")
        self.embedding = build.table(prefix + "embed_tokens", shape.vocabulary, shape.hidden)
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
        self.kv_shape = (shape.layers, shape.kv_heads, shape.head_dim)
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors: tuple[str, ...] = IGNORED

    def __call__(self, batch: Batch) -> Tensor:
        hidden = F.embedding(batch.token_ids, self.embedding)
        if self.embedding_scale != 1.0:
            hidden.mul_(self.embedding_scale)
        angles = {rotary: rotary.angles(batch) for rotary in self.rotaries}
        growth = None if self.growth is None else self.growth.index_select(0, batch.positions)
        first = self.norms[0]
        normed: Activations = hidden if first is None else first(hidden)
        for layer, next_norm in zip(self.layers, self.norms[1:], strict=True):
            at = angles[layer.attention.rotary]
            hidden, normed = layer(hidden, normed, batch, at, next_norm, growth)
        return dequantize(normed)


def llama(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    return _with_head(Decoder(build, llama_shape(config)), build, config, head)


def llama_bidirectional(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """nemotron-embed, and its reranker, which pools before the projection."""
    model = Decoder(build, llama_shape(config))
    if head is not Task.CLASSIFY:
        return _with_head(model, build, config, head)
    temperature = float(config.get("temperature", 1.0))
    score = build.linear("score", model.hidden_size, label_count(config), bias=False)
    method = pooling_method(str(config.get("pooling", "mean")))
    model.heads[head] = TaskHead(method, Stack(score, lambda x: x / temperature), label_count(config))
    return model


def mistral(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    return _with_head(Decoder(build, mistral_shape(config)), build, config, head)


def ministral3(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Mistral with YaRN and queries that grow with their position; also Nemotron-3-Embed."""
    rope = config.get("rope_parameters") or {}
    beta, trained = (rope.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if not isinstance(beta, int | float) or not isinstance(trained, int) or trained < 1:
        raise ModelLoadError(
            "rope_parameters in config.json needs the numbers llama_4_scaling_beta and "
            "original_max_position_embeddings, which set how queries grow with their position"
        )
    window = config.get("sliding_window")
    shape = replace(
        _shape(config, window, lambda layer: window is not None),
        eps=config.get("rms_norm_eps", 1e-5),
        query_growth=QueryGrowth(float(beta), trained),
    )
    return _with_head(Decoder(build, shape), build, config, head)


def gritlm(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Mistral, trained to embed with bidirectional attention and without its window."""
    shape = mistral_shape(config)
    if not shape.causal:
        reach = shape.reach - 1 if shape.reach and all(shape.sliding) else None
        shape = replace(shape, sliding=(False,) * shape.layers, generate_reach=reach)
    return _with_head(Decoder(build, shape), build, config, head)


def qwen2(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    shape = replace(_qwen_shape(config), qkv_bias=True)
    return _with_head(Decoder(build, shape), build, config, head)


def qwen3(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    return _with_head(Decoder(build, qwen3_shape(config)), build, config, head)


class ProjectedDecoder(Decoder):
    """A decoder whose final states pass through one more layer without bias, the tensor `linear.weight`."""

    def __init__(self, build: LayerBuilder, shape: DecoderShape, width: int) -> None:
        super().__init__(build, shape)
        self.project = build.linear("linear", shape.hidden, width, bias=False)
        self.hidden_size = width

    def __call__(self, batch: Batch) -> Tensor:
        return self.project(super().__call__(batch))


def voyage(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """voyage-4-nano: a bidirectional Qwen3 that projects every state to `num_labels` numbers."""
    return ProjectedDecoder(build, qwen3_shape(config), option(config, "num_labels"))


def qwen3_moe(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Qwen3 with experts in all or some layers."""
    bias = bool(config.get("attention_bias"))
    shape = _qwen_shape(config)
    plain, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    experts = ExpertShape(
        option(config, "num_experts", "num_local_experts"),
        option(config, "num_experts_per_tok", default=8),
        option(config, "moe_intermediate_size", default=768),
        bool(config.get("norm_topk_prob", False)),
    )
    sparse = tuple(layer not in plain and (layer + 1) % every == 0 for layer in range(shape.layers))
    shape = replace(shape, qkv_bias=bias, out_bias=bias, qk_norm=True, experts=experts, sparse=sparse)
    return _with_head(Decoder(build, shape), build, config, head)


def phi3(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    window = config.get("sliding_window")
    shape = _shape(config, window, lambda layer: window is not None)
    shape = replace(shape, fused_projections=True, eps=config.get("rms_norm_eps", 1e-5))
    return _with_head(Decoder(build, shape), build, config, head)


def granite(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Llama with multipliers on embeddings, scores, residuals and logits."""
    shape = replace(
        llama_shape(config),
        embedding_scale=float(option(config, "embedding_multiplier", default=1.0)),
        scale=float(option(config, "attention_multiplier", default=1.0)),
        residual_scale=float(option(config, "residual_multiplier", default=1.0)),
    )
    return _with_head(Decoder(build, shape), build, config, head)


def smollm3(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Llama, some of whose layers do not rotate queries and keys."""
    config = with_defaults(config, rope_theta=2e6)
    layers, every = config["num_hidden_layers"], option(config, "no_rope_layer_interval", default=4)
    rotates = option(
        config, "no_rope_layers", default=[int((layer + 1) % every != 0) for layer in range(layers)]
    )
    if len(rotates) < layers:
        raise ModelLoadError(f"no_rope_layers in config.json has {len(rotates)} entries for {layers} layers")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    bias = bool(config.get("attention_bias"))
    shape = replace(
        _shape(config, window, lambda layer: window is not None and not rotates[layer]),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
        rotates=tuple(map(bool, rotates[:layers])),
    )
    return _with_head(Decoder(build, shape), build, config, head)


def olmo(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """OLMo 2, and OLMo 3, most of whose layers have a sliding window and rotate without scaling."""
    bias, window = bool(config.get("attention_bias")), None
    if config.get("model_type") == "olmo3":
        window = config.get("sliding_window", 4096)
        config = with_defaults(config, rope_theta=5e5)
    shape = replace(
        _shape(config, window, lambda layer: window is not None and (layer + 1) % 4 != 0),
        eps=config.get("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        out_bias=bias,
        wide_qk_norm=True,
        post_norm=True,
        local_rope=rope_options(
            config, "rope_theta", default=10_000.0, layer_type="sliding_attention", scaled=False
        ),
    )
    return _with_head(Decoder(build, shape), build, config, head)


def exaone4(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Where some layers have a sliding window, those that have none do not rotate."""
    window, every = config.get("sliding_window", 4096), int(config.get("sliding_window_pattern", 4) or 1)
    shape = _shape(config, window, lambda layer: window is not None and (layer + 1) % every != 0)
    rotates = shape.sliding if window else ()
    shape = replace(
        shape, eps=config.get("rms_norm_eps", 1e-5), qk_norm=True, post_norm=True, rotates=rotates
    )
    return _with_head(Decoder(build, shape), build, config, head)


def gpt_oss(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Every other layer has a sliding window; heads have sinks, and MLPs are clamped experts."""
    config = _with_yarn(config)
    shape = _shape(config, config.get("sliding_window", 128), lambda layer: layer % 2 == 0)
    shape = replace(_with_clamped_experts(shape, config, interleaved=True), sinks=True)
    return _with_head(Decoder(build, shape), build, config, head)


def privacy_filter(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """gpt-oss that looks both ways, within a window in every layer, and labels tokens."""
    require(config, is_causal=False, layer_types=None)
    config = _with_yarn(config)
    shape = _shape(config, config.get("sliding_window", 128), lambda layer: True)
    shape = _with_clamped_experts(shape, config, interleaved=False)
    shape = replace(shape, sinks=True, interleaved=True)
    return _with_head(Decoder(build, shape), build, config, head)


def jina_ranking(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """jina-reranker-v3: Qwen3 that reads a whole list and projects one marker token per text."""
    model = qwen3(build, config, None)
    inner = model.hidden_size // 2
    project = Stack(
        build.linear("projector.0", model.hidden_size, inner, "relu", bias=False),
        build.linear("projector.2", inner, MARK_DIM, bias=False),
    )
    model.heads[Task.SCORE] = TaskHead("all", project, MARK_DIM)
    return model


def gemma(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """The first Gemma, used by bge-reranker-v2-gemma."""
    bias = bool(config.get("attention_bias"))
    shape = replace(
        _shape(config, None, lambda layer: False),
        act=config.get("hidden_activation") or "gelu_pytorch_tanh",
        qkv_bias=bias,
        out_bias=bias,
        norm_plus_one=True,
        embedding_scale=math.sqrt(config["hidden_size"]),
    )
    return _with_head(Decoder(build, shape), build, config, head)


def gemma2(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Every other layer has a sliding window, and scores are soft-capped."""
    window, bias = config.get("sliding_window", 4096), bool(config.get("attention_bias"))
    shape = replace(
        _shape(config, window, lambda layer: layer % 2 == 0, capped=True),
        act=config.get("hidden_activation") or "gelu_pytorch_tanh",
        scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        softcap=config.get("attn_logit_softcapping", 50.0),
        qkv_bias=bias,
        out_bias=bias,
        sandwich=True,
        norm_plus_one=True,
        embedding_scale=math.sqrt(config["hidden_size"]),
    )
    return _with_head(Decoder(build, shape), build, config, head)


def gemma3(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    window, bias = config.get("sliding_window", 4096), bool(config.get("attention_bias"))
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    shape = replace(
        _shape(config, window, lambda layer: (layer + 1) % every != 0),
        act=config.get("hidden_activation") or "gelu_pytorch_tanh",
        rope=rope_options(config, "rope_theta", default=1_000_000.0),
        local_rope=rope_options(
            config, "rope_local_base_freq", default=10_000.0, layer_type="sliding_attention", scaled=False
        ),
        scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        sandwich=True,
        norm_plus_one=True,
        embedding_scale=math.sqrt(config["hidden_size"]),
    )
    if window and config.get("use_bidirectional_attention") and not shape.causal:
        shape = replace(shape, reach=window // 2)  # this window counts both sides
    return _with_head(Decoder(build, shape), build, config, head)


def gemma3_tower(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    return _text_only(gemma3(build, config, head), config)


def mistral3_tower(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    require(config, text_model_type="mistral")
    return _text_only(mistral(build, config, head), config)


def _text_only(model: Decoder, config: Mapping[str, Any]) -> Decoder:
    """The text tower of a model that reads images too, which requests cannot send."""
    named = config.get("architectures") or [config.get("model_type")]
    log.warning("%s is served for text: its image tower is not loaded", named[0])
    model.ignored_tensors = (*IGNORED, *_IMAGE_TENSORS)
    return model


def _with_yarn(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with the rotation of gpt-oss, where it does not say."""
    rope = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    found = with_defaults(config, rope_theta=150_000.0)
    if config.get("rope_scaling") or config.get("rope_parameters"):
        return found
    return with_values(found, rope_scaling=rope)


def _with_clamped_experts(
    shape: DecoderShape, config: Mapping[str, Any], *, interleaved: bool
) -> DecoderShape:
    count = option(config, "num_local_experts", "num_experts")
    chosen = option(config, "num_experts_per_tok", "experts_per_token", default=4)
    if not 1 <= chosen <= count:
        raise ModelLoadError(
            f"config.json has num_experts_per_tok = {chosen}; it has to be from 1 to "
            f"num_local_experts = {count}"
        )
    experts = ClampedExpertShape(
        count,
        chosen,
        shape.intermediate,
        float(option(config, "swiglu_alpha", default=1.702)),
        float(option(config, "swiglu_limit", default=7.0)),
        interleaved,
    )
    bias = bool(config.get("attention_bias", True))
    eps = config.get("rms_norm_eps", 1e-5)
    return replace(shape, eps=eps, qkv_bias=bias, out_bias=bias, clamped_experts=experts)


def llama_shape(config: Mapping[str, Any]) -> DecoderShape:
    bias = bool(config.get("attention_bias"))
    shape = _shape(config, config.get("sliding_window"), lambda layer: False)
    return replace(shape, qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias")))


def mistral_shape(config: Mapping[str, Any]) -> DecoderShape:
    window = config.get("sliding_window", 4096)
    return _shape(config, window, lambda layer: window is not None)


def _qwen_shape(config: Mapping[str, Any]) -> DecoderShape:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    return _shape(config, window, lambda layer: window is not None and layer >= first)


def qwen3_shape(config: Mapping[str, Any]) -> DecoderShape:
    bias = bool(config.get("attention_bias"))
    return replace(_qwen_shape(config), qkv_bias=bias, out_bias=bias, qk_norm=True)


def _shape(
    config: Mapping[str, Any],
    window: int | None,
    sliding: Callable[[int], bool],  # for layers that config.json does not list
    *,
    capped: bool = False,
) -> DecoderShape:
    """What all families share. A causal window of n is the token and the n - 1 before it; a bidirectional one
    reaches n tokens each way."""
    _check(config, _REFUSED[1:] if capped else _REFUSED)
    hidden, heads, causal = config["hidden_size"], config["num_attention_heads"], config["is_causal"]
    kv_heads = config.get("num_key_value_heads") or heads
    slides = _sliding_layers(config, sliding)
    if any(slides) and not window:
        raise ModelLoadError("config.json has layers with sliding attention, but no sliding_window")
    return DecoderShape(
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        act=config.get("hidden_act") or "silu",
        eps=config.get("rms_norm_eps", 1e-6),
        causal=causal,
        rope=rope_options(config, "rope_theta", default=10_000.0),
        sliding=slides,
        reach=(window - 1 if causal else window) if window else None,
        local_rope=rope_options(config, "rope_theta", default=10_000.0, layer_type="sliding_attention"),
    )


def _check(config: Mapping[str, Any], refused: Sequence[str]) -> None:
    """Refuse missing keys, and options that would be computed wrongly."""
    if missing := [name for name in _REQUIRED if not isinstance(config.get(name), int)]:
        raise ModelLoadError(f"config.json has no integer {', '.join(missing)}")
    for name in refused:
        if config.get(name) is not None:
            raise ModelLoadError(f"config.json has {name} = {config[name]!r}, which is not supported")
    require(config, partial_rotary_factor=1.0)


def _sliding_layers(config: Mapping[str, Any], default: Callable[[int], bool]) -> tuple[bool, ...]:
    layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        return tuple(default(layer) for layer in range(layers))
    if len(types) < layers:
        raise ModelLoadError(f"layer_types in config.json has {len(types)} entries for {layers} layers")
    if unknown := sorted(set(types) - set(_LAYER_TYPES)):
        raise ModelLoadError(
            f"layer_types in config.json has {unknown[0]!r}; supported: {', '.join(_LAYER_TYPES)}"
        )
    return tuple(_LAYER_TYPES[kind] for kind in types[:layers])


def _gated_mlp(build: LayerBuilder, prefix: str, shape: DecoderShape) -> GatedMLP:
    names, widths = [prefix + "gate_proj", prefix + "up_proj"], [shape.intermediate] * 2
    if shape.fused_projections:
        names, widths = [prefix + "gate_up_proj"], [sum(widths)]
    gate_up = build.linear(names, shape.hidden, widths, bias=shape.mlp_bias)
    down = build.linear(prefix + "down_proj", shape.intermediate, shape.hidden, bias=shape.mlp_bias)
    return GatedMLP(gate_up, down, shape.act)


def _sparse_mlp(build: LayerBuilder, prefix: str, shape: DecoderShape, experts: ExpertShape) -> SparseMLP:
    router = build.weights.take(prefix + "gate.weight", experts.num_experts, shape.hidden)
    gate_up, down = read_experts(build, prefix + "experts.", experts, shape.hidden, shape.act)
    return SparseMLP(router, gate_up, down, experts, shape.act)


def _norm(build: LayerBuilder, name: str, size: int, shape: DecoderShape) -> RMSNorm:
    return build.rms_norm(name, size, shape.eps, plus_one=shape.norm_plus_one)


def _rotaries(build: LayerBuilder, shape: DecoderShape) -> list[Rotary]:
    """The rotation of each layer. Layers that rotate alike share one."""
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
    """The factor on the queries at every position, [positions, 1, 1]; None if it is 1 at all of them."""
    if shape.query_growth is None or shape.positions <= shape.query_growth.trained:
        return None
    beta, trained = shape.query_growth
    times = torch.arange(shape.positions, dtype=torch.int64) // trained
    factors = 1 + beta * torch.log1p(times.float())
    return factors[:, None, None].to(dtype=build.weights.dtype, device=build.weights.device)


def _with_head(model: Decoder, build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Add the head of the checkpoint, which reads the last token of a sequence or every token; for sparse
    weights, its language-model head."""
    if head is Task.SPARSE:
        add_language_head(model, build, config, head)
    elif head is Task.REWARD:
        hidden, labels = model.hidden_size, reward_count(config)
        layers = [build.linear("score.0", hidden, hidden, "relu"), build.linear("score.2", hidden, labels)]
        model.heads[head] = TaskHead("last", Stack(*layers), labels)
    elif head is not None:
        per_token = head is Task.TOKEN_CLASSIFY
        bias = per_token and bool(config.get("token_classification_bias", True))
        labels = label_count(config)
        score = build.linear("score", model.hidden_size, labels, bias=bias)
        model.heads[head] = TaskHead("all" if per_token else "last", score, labels)
    return model

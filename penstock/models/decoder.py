"""Decoders: pre-norm, rotary positions, grouped-query attention, gated MLPs.

Llama, Mistral, Ministral3, Phi3, Qwen2, Qwen3 (also with experts), Gemma, Gemma2, Gemma3, Granite, SmolLM3,
OLMo 2 and 3, EXAONE 4 and gpt-oss share one wiring with flags. So do variants trained with bidirectional
attention (embeddinggemma, nemotron-embed, GritLM, pplx-embed, voyage-4-nano, the privacy filter). The wiring
is in `decoder_layers.py`. This module sets the flags of each family.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from penstock.checkpoint.labels import label_count, reward_count
from penstock.checkpoint.pooling import pooling_method
from penstock.checkpoint.score import MARK_DIM
from penstock.errors import ModelLoadError
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.clamped_experts import ClampedExpertShape
from penstock.layers.head import Stack, TaskHead
from penstock.layers.moe import ExpertShape
from penstock.layers.rotary import Rope
from penstock.models.decoder_layers import IGNORED, Decoder, DecoderShape, QueryGrowth
from penstock.models.heads import add_language_head
from penstock.models.options import option, require, rope_options, with_defaults, with_values
from penstock.types import Task

log = logging.getLogger("penstock.models")

_IMAGE_TENSORS = ("vision_tower.", "multi_modal_projector.")
_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
# Refused options: they change the computation or the files in ways that are not supported.
_REFUSED = ("attn_logit_softcapping", "text_config")
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}  # whether the layer has a sliding window


def llama(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    return _with_head(Decoder(build, llama_shape(config)), build, config, head)


def llama_bidirectional(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """nemotron-embed and its reranker, which pools before the score projection."""
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
    """Mistral that embeds with bidirectional attention and without a sliding window."""
    shape = mistral_shape(config)
    if not shape.causal:
        reach = shape.reach - 1 if shape.reach and all(shape.sliding) else None
        shape = replace(shape, sliding=(False,) * shape.layers, generate_reach=reach)
    return _with_head(Decoder(build, shape), build, config, head)


def qwen2(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    return _with_head(Decoder(build, qwen2_shape(config)), build, config, head)


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
    """Qwen3 with experts in some or all layers."""
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
    """Llama with some layers that do not rotate queries and keys (NoPE)."""
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
    """OLMo 2, and OLMo 3, in which most layers have a sliding window and unscaled rotary positions."""
    bias, window, ropes = bool(config.get("attention_bias")), None, None
    if config.get("model_type") == "olmo3":
        window = config.get("sliding_window", 4096)
        ropes = Ropes(
            rope_options(config, "rope_theta", default=5e5, layer_type="full_attention"),
            rope_options(config, "rope_theta", default=5e5, layer_type="sliding_attention", scaled=False),
        )
    shape = replace(
        _shape(config, window, lambda layer: window is not None and (layer + 1) % 4 != 0, ropes=ropes),
        eps=config.get("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        out_bias=bias,
        wide_qk_norm=True,
        post_norm=True,
    )
    return _with_head(Decoder(build, shape), build, config, head)


def exaone4(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """EXAONE 4. If some layers have a sliding window, the layers without one do not rotate."""
    window, every = config.get("sliding_window", 4096), int(config.get("sliding_window_pattern", 4) or 1)
    shape = _shape(config, window, lambda layer: window is not None and (layer + 1) % every != 0)
    rotates = shape.sliding if window else ()
    shape = replace(
        shape, eps=config.get("rms_norm_eps", 1e-5), qk_norm=True, post_norm=True, rotates=rotates
    )
    return _with_head(Decoder(build, shape), build, config, head)


def gpt_oss(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """gpt-oss: a sliding window in every other layer, attention sinks, and clamped experts as MLPs."""
    config = _with_yarn(config)
    shape = _shape(config, config.get("sliding_window", 128), lambda layer: layer % 2 == 0)
    shape = replace(_with_clamped_experts(shape, config, interleaved=True), sinks=True)
    return _with_head(Decoder(build, shape), build, config, head)


def privacy_filter(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """A bidirectional gpt-oss with a window in every layer, which classifies tokens."""
    require(config, is_causal=False, layer_types=None)
    config = _with_yarn(config)
    shape = _shape(config, config.get("sliding_window", 128), lambda layer: True)
    shape = _with_clamped_experts(shape, config, interleaved=False)
    shape = replace(shape, sinks=True, interleaved=True)
    return _with_head(Decoder(build, shape), build, config, head)


def jina_ranking(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """jina-reranker-v3: a Qwen3 that reads a whole list and projects one marker token per text."""
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
    return _with_head(Decoder(build, gemma_shape(config)), build, config, head)


def gemma2(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Gemma 2: a sliding window in every other layer, and soft-capped attention scores."""
    return _with_head(Decoder(build, gemma2_shape(config)), build, config, head)


def gemma3(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    window, bias = config.get("sliding_window", 4096), bool(config.get("attention_bias"))
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    ropes = Ropes(
        rope_options(config, "rope_theta", default=1_000_000.0, layer_type="full_attention"),
        rope_options(
            config, "rope_local_base_freq", default=10_000.0, layer_type="sliding_attention", scaled=False
        ),
    )
    shape = replace(
        _shape(config, window, lambda layer: (layer + 1) % every != 0, ropes=ropes),
        act=config.get("hidden_activation") or "gelu_pytorch_tanh",
        scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        sandwich=True,
        norm_plus_one=True,
        embedding_scale=math.sqrt(config["hidden_size"]),
    )
    if window and config.get("use_bidirectional_attention") and not shape.causal:
        shape = replace(shape, reach=window // 2)  # here, the window includes both sides
    return _with_head(Decoder(build, shape), build, config, head)


def gemma3_tower(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    return _text_only(gemma3(build, config, head), config)


def mistral3_tower(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    require(config, text_model_type="mistral")
    return _text_only(mistral(build, config, head), config)


def _text_only(model: Decoder, config: Mapping[str, Any]) -> Decoder:
    """The text tower of a model that could also read images. Penstock does not load its image tower."""
    named = config.get("architectures") or [config.get("model_type")]
    log.warning("%s is served for text: its image tower is not loaded", named[0])
    model.ignored_tensors = (*IGNORED, *_IMAGE_TENSORS)
    return model


def _with_yarn(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with gpt-oss's rotary options as defaults."""
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


def gemma_shape(config: Mapping[str, Any]) -> DecoderShape:
    bias = bool(config.get("attention_bias"))
    return replace(
        _shape(config, None, lambda layer: False),
        act=config.get("hidden_activation") or "gelu_pytorch_tanh",
        qkv_bias=bias,
        out_bias=bias,
        norm_plus_one=True,
        embedding_scale=math.sqrt(config["hidden_size"]),
    )


def gemma2_shape(config: Mapping[str, Any]) -> DecoderShape:
    window, bias = config.get("sliding_window", 4096), bool(config.get("attention_bias"))
    return replace(
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


def qwen2_shape(config: Mapping[str, Any]) -> DecoderShape:
    return replace(_qwen_shape(config), qkv_bias=True)


def qwen3_shape(config: Mapping[str, Any]) -> DecoderShape:
    bias = bool(config.get("attention_bias"))
    return replace(_qwen_shape(config), qkv_bias=bias, out_bias=bias, qk_norm=True)


class Ropes(NamedTuple):
    """Rotary options of layers with full attention and of layers with a sliding window."""

    full: Rope
    sliding: Rope


def _shape(
    config: Mapping[str, Any],
    window: int | None,
    sliding: Callable[[int], bool],  # default by layer, if config.json has no layer_types
    *,
    capped: bool = False,
    ropes: Ropes | None = None,  # None: all layers have the same rotary options
) -> DecoderShape:
    """The shape from options that all families share. A causal window of n is the token and the n - 1 tokens
    before it. A bidirectional window of n reaches n tokens each way."""
    _check(config, _REFUSED[1:] if capped else _REFUSED)
    hidden, heads, causal = config["hidden_size"], config["num_attention_heads"], config["is_causal"]
    kv_heads = config.get("num_key_value_heads") or heads
    slides = _sliding_layers(config, sliding)
    if ropes is None:
        rope = rope_options(config, "rope_theta", default=10_000.0)
        ropes = Ropes(rope, rope)
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
        rope=ropes.full,
        sliding=slides,
        reach=(window - 1 if causal else window) if window else None,
        local_rope=ropes.sliding,
    )


def _check(config: Mapping[str, Any], refused: Sequence[str]) -> None:
    """Refuse missing keys and options that are not supported."""
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


def _with_head(model: Decoder, build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Add the checkpoint's head, which reads the last token of a sequence or every token. For sparse weights,
    it is the language-model head."""
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

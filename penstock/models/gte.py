"""GTE's second encoder ("new"): gte-multilingual, gte-en-v1.5, arctic-embed-m-v2.0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.layers.build import LayerBuilder
from penstock.models.heads import ROBERTA_MLM, MaskedLMShape, add_masked_lm_head, add_pooler_head
from penstock.models.options import require, rope_options
from penstock.models.rotary_encoder import RotaryEncoder, Shape, TensorNames, ported
from penstock.types import Task

PACKED = TensorNames(
    layer="encoder.layer.{}.",
    qkv=("attention.qkv_proj",),
    out="attention.o_proj",
    attention_norm="attn_ln",
    up=("mlp.up_gate_proj",),
    down="mlp.down_proj",
    output_norm="mlp_ln",
)
UNPACKED = replace(PACKED, qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"))
PORTED = ported(up=("mlp.up_proj", "mlp.gate_proj"), down="mlp.down_proj")
ORIGINAL_MLM = replace(ROBERTA_MLM, norm="lm_head.norm")
IGNORED = ("pooler.", "lm_head.")


def new(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> RotaryEncoder:
    """Checkpoints of the original code."""
    return _build(build, config, head, _shape(config, rope_theta=10_000, segments=2))


def gte(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> RotaryEncoder:
    """Checkpoints of the transformers port, which has other defaults."""
    return _build(build, config, head, _shape(config, rope_theta=160_000, segments=1), mlm_act="gelu")


def _build(
    build: LayerBuilder,
    config: Mapping[str, Any],
    head: Task | None,
    shape: Shape,
    mlm_act: str | None = None,
) -> RotaryEncoder:
    """`mlm_act`: the activation in the masked-language head; None: the activation of the layers."""
    require(
        config,
        position_embedding_type="rope",
        layer_norm_type="layer_norm",
        logn_attention_scale=False,
    )
    # gte-multilingual-base is an embedder that also stores a token classifier.
    classifies = head in (Task.CLASSIFY, Task.TOKEN_CLASSIFY)
    ignored_tensors = IGNORED if classifies else (*IGNORED, "classifier.")
    packed = PACKED if config.get("pack_qkv", True) else UNPACKED
    model = RotaryEncoder(build, shape, (packed, PORTED), ignored_tensors)
    add_pooler_head(model, build, config, head)
    if head is Task.SPARSE:
        names = ORIGINAL_MLM if build.weights.has(f"{ORIGINAL_MLM.norm}.weight") else ROBERTA_MLM
        head_shape = MaskedLMShape(names=names, act=mlm_act or shape.act, eps=shape.eps)
        add_masked_lm_head(model, build, config, model.embedding.words, head_shape)
    return model


def _shape(config: Mapping[str, Any], *, rope_theta: float, segments: int) -> Shape:
    """`rope_theta` and `segments` are defaults for keys that config.json leaves out."""
    rope = rope_options(config, "rope_theta", default=rope_theta)
    return Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        segments=config.get("type_vocab_size", segments),
        act=config.get("hidden_act", "gelu"),
        eps=config.get("layer_norm_eps", 1e-12),
        rope=rope,
        gated=True,
        gate_first=False,
        up_bias=False,
    )

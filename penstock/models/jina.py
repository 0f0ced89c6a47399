"""Jina's XLM-R: jina-embeddings-v3, and others with the layout of its flash implementation.

jina-embeddings-v3 carries task adapters. With `lora_task` (through `--hf-overrides`) that one is merged
into the weights; otherwise each request chooses, and without a choice the model runs as it was before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.adapters import adapter_names
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.models.adapted import AdaptedBuilder, AdaptedEncoder
from penstock.models.encoder import Encoder, roberta
from penstock.models.heads import ROBERTA_MLM, add_masked_lm_head, add_two_step_head
from penstock.models.options import option, require, rope_options
from penstock.models.rotary_encoder import RotaryEncoder, Shape, TensorNames, ported
from penstock.types import Task
from penstock.weights.adapters import Adapter, AdapterSet, MergedSource

FLASH = TensorNames(
    layer="encoder.layers.{}.",
    qkv=("mixer.Wqkv",),
    out="mixer.out_proj",
    attention_norm="norm1",
    up=("mlp.fc1",),
    down="mlp.fc2",
    output_norm="norm2",
    embedding_norm="emb_ln",
)
PORTED = ported(up=("mlp.fc1",), down="mlp.fc2")
UNNEEDED = ("pooler.", "lm_head.", ".lora_A", ".lora_B")


def xlm_roberta(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Encoder | RotaryEncoder:
    """XLM-R's class names stand for two layouts; the options of the flash implementation tell which."""
    named = " ".join(str(place) for place in (config.get("auto_map") or {}).values())
    rotary = config.get("position_embedding_type") == "rotary"
    if rotary or "use_flash_attn" in config or "xlm-roberta-flash" in named:
        return _build(build, config, head, _shape(config, positions="absolute", rope_theta=10_000))
    return roberta(build, config, head)


def jina_embeddings_v3(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> RotaryEncoder:
    """The transformers port, whose defaults differ."""
    return _build(build, config, head, _shape(config, positions="rotary", rope_theta=20_000))


def _build(build: LayerBuilder, config: Mapping[str, Any], head: Task | None, shape: Shape) -> RotaryEncoder:
    require(config, use_reg_tokens=False)
    adapter = _adapter(config)
    source = MergedSource(build.weights, adapter)
    model: RotaryEncoder
    if adapter is None and (chosen := _all_adapters(config)) is not None:
        build = AdaptedBuilder(source, chosen, build.quantization, build.unquantized)
        model = AdaptedEncoder(build, shape, (FLASH, PORTED), UNNEEDED)
    else:
        build = LayerBuilder(source, build.quantization, build.unquantized)
        model = RotaryEncoder(build, shape, (FLASH, PORTED), UNNEEDED)
    add_two_step_head(model, build, config, head)
    if head is Task.SPARSE:
        eps = config.get("layer_norm_eps", 1e-5)
        add_masked_lm_head(model, build, config, ROBERTA_MLM, model.embedding.words, "gelu", eps)
    return model


def _shape(config: Mapping[str, Any], *, positions: str, rope_theta: float) -> Shape:
    """`positions` and `rope_theta` are defaults for what config.json leaves out."""
    kind = config.get("position_embedding_type") or positions
    if kind not in ("rotary", "absolute"):
        raise ModelLoadError(f"position_embedding_type {kind!r} is not supported; 'rotary', 'absolute' are")
    rope = rope_options(config, "rotary_emb_base", default=rope_theta)
    return Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        segments=config.get("type_vocab_size", 1),
        act=config.get("hidden_act", "gelu"),
        eps=config.get("layer_norm_eps", 1e-5),
        rope=rope if kind == "rotary" else None,
        first_position=int(option(config, "pad_token_id", default=1)) + 1,
    )


def _adapter(config: Mapping[str, Any]) -> Adapter | None:
    task, known = config.get("lora_task"), config.get("lora_adaptations") or []
    if task is None:
        return None
    if task not in known:
        have = ", ".join(known) or "none"
        raise ModelLoadError(f"lora_task {task!r} is not among the model's adapters: {have}")
    return Adapter(known.index(task), len(known), *_rank_and_scale(config))


def _all_adapters(config: Mapping[str, Any]) -> AdapterSet | None:
    known = adapter_names(config)
    return AdapterSet(len(known), *_rank_and_scale(config)) if known else None


def _rank_and_scale(config: Mapping[str, Any]) -> tuple[int, float]:
    rank = int(option(config, "lora_rank", default=4))
    return rank, float(option(config, "lora_alpha", default=1)) / rank

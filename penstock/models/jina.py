"""Jina's XLM-R: jina-embeddings-v3, and other models with the layout of its flash implementation.

jina-embeddings-v3 has task adapters. `lora_task` (through `--hf-overrides`) merges one of them into the
weights. Otherwise, each request may choose an adapter; without a choice the model runs without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.adapters import adapter_names
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.layers.lora import AdapterSites
from penstock.models.encoder import Encoder, roberta
from penstock.models.heads import ROBERTA_MLM, MaskedLMShape, add_masked_lm_head, add_two_step_head
from penstock.models.options import option, require, rope_options
from penstock.models.rotary_encoder import RotaryEncoder, Shape, TensorNames, ported
from penstock.types import Task
from penstock.weights.adapters import (
    Adapter,
    AdapterSet,
    MergedSource,
    ModuleWeights,
    PartWeights,
    TableWeights,
)

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
IGNORED = ("pooler.", "lm_head.", ".lora_A", ".lora_B")


def xlm_roberta(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Encoder | RotaryEncoder:
    """XLM-R's class names are used for two layouts. Options of the flash implementation distinguish them."""
    named = " ".join(str(place) for place in (config.get("auto_map") or {}).values())
    rotary = config.get("position_embedding_type") == "rotary"
    if rotary or "use_flash_attn" in config or "xlm-roberta-flash" in named:
        return _build(build, config, head, _shape(config, positions="absolute", rope_theta=10_000))
    return roberta(build, config, head)


def jina_embeddings_v3(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> RotaryEncoder:
    """Checkpoints of the transformers port, which has other defaults."""
    return _build(build, config, head, _shape(config, positions="rotary", rope_theta=20_000))


def _build(build: LayerBuilder, config: Mapping[str, Any], head: Task | None, shape: Shape) -> RotaryEncoder:
    require(config, use_reg_tokens=False)
    adapter = _adapter(config)
    own = _all_adapters(config) if adapter is None else None
    source = MergedSource(build.weights, adapter)
    if own is not None and build.adapters is None:
        build.adapters = AdapterSites(own.count, own.rank)
    merged = LayerBuilder(source, build.quantization, build.unquantized)
    merged.shard, merged.adapters = build.shard, build.adapters
    build = merged
    model = RotaryEncoder(build, shape, (FLASH, PORTED), IGNORED)
    if own is not None and build.adapters is not None:
        _read_own(build.adapters, source, own)
    add_two_step_head(model, build, config, head)
    if head is Task.SPARSE:
        head_shape = MaskedLMShape(names=ROBERTA_MLM, act="gelu", eps=config.get("layer_norm_eps", 1e-5))
        add_masked_lm_head(model, build, config, model.embedding.words, head_shape)
    return model


def _read_own(sites: AdapterSites, source: MergedSource, own: AdapterSet) -> None:
    """Read the task adapters, which the checkpoint stores next to the weights that they change."""
    sites.grow(0, own.rank)
    found: list[ModuleWeights] = [{} for _ in range(own.count)]
    for name, (layer, number) in sites.layers.items():
        if source.has_adapters(weight := f"{name}.weight"):
            left, right = source.adapters(weight, (layer.part_size(number), layer.in_features), own)
            for i, each in enumerate(found):
                up = (left[i].float() * own.scale).to(source.dtype)
                each[name] = PartWeights(right[i].to(source.dtype), up)
    for name, table in sites.tables.items():
        if source.has_adapters(weight := f"{name}.weight"):
            left, right = source.adapters(weight, (table.rows, table.width), own)
            for i, each in enumerate(found):
                up = (right[i].t().float() * own.scale).to(source.dtype).contiguous()
                each[name] = TableWeights(left[i].to(source.dtype), up)
    sites.own = found


def _shape(config: Mapping[str, Any], *, positions: str, rope_theta: float) -> Shape:
    """`positions` and `rope_theta` are defaults for keys that config.json leaves out."""
    kind = config.get("position_embedding_type") or positions
    if kind not in ("rotary", "absolute"):
        raise ModelLoadError(
            f"config.json has position_embedding_type = {kind!r}, which is not supported; "
            "supported: rotary, absolute"
        )
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
        names = ", ".join(known) or "none"
        raise ModelLoadError(f"lora_task is {task!r}, which is not among the model's adapters: {names}")
    return Adapter(known.index(task), len(known), *_rank_and_scale(config))


def _all_adapters(config: Mapping[str, Any]) -> AdapterSet | None:
    known = adapter_names(config)
    return AdapterSet(len(known), *_rank_and_scale(config)) if known else None


def _rank_and_scale(config: Mapping[str, Any]) -> tuple[int, float]:
    rank = int(option(config, "lora_rank", default=4))
    return rank, float(option(config, "lora_alpha", default=1)) / rank

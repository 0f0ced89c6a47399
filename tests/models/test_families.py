"""Each family's record agrees with the model from its builder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from penstock.checkpoint.families import CLASS_SUFFIXES, FAMILIES, Family
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.models.registry import Model, build_model
from penstock.types import Task
from penstock.weights.stream import DummySource

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "vocab_size": 100,
    "num_labels": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
CONFIG |= {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}  # DistilBERT
CONFIG |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}  # GPT-2
CONFIG["latent_attention_config"] = {"num_latents_value": 4, "num_cross_heads": 2, "cross_dim_head": 8}
CONFIG["task_names"] = ["retrieval"]  # jina-embeddings-v5
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
CONFIG |= {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48}  # T5
# Keys that a family needs, and that others would refuse or interpret differently.
OWN: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 24},
    "electra": {"embedding_size": 24},
    "embedding_gemma2": {"embedding_dim": 24},
    "embedding_gemma2_text": {"embedding_dim": 24},
    "JinaBert": {"position_embedding_type": "alibi"},
    "ministral3": {"rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32}},
}
VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": VISION | {"embed_dim": 16, "hidden_size": 32},
    "qwen2_5_vl": VISION
    | {"hidden_size": 16, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": VISION
    | {
        "hidden_size": 16,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor"} | {
    key: VISION[key] for key in ("patch_size", "temporal_patch_size")
}
OWN |= {
    name: {
        "vision_config": TOWERS[family.qwen_vision],
        "rope_parameters": {"mrope_section": [2, 1, 1]},
        "colbert_dim": 6,
    }
    for name, family in FAMILIES.items()
    if family.qwen_vision is not None
}
OWN["JinaEmbeddingsV4"] |= {"multi_vector_projector_dim": 6}
DUAL_PROCESSORS: dict[str, dict[str, Any]] = {
    "clip": {"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 8, "width": 8}},
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 8, "width": 8}},
    "siglip2": {"image_processor_type": "Siglip2ImageProcessor", "patch_size": 4},
}
OWN |= {
    name: {
        **FAMILIES[name].nested_defaults,
        **CONFIG,
        "model_type": name,
        "projection_dim": 24,
        "projection_size": 24,
        "vision_config": {
            "hidden_size": 24,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 4,
            "image_size": 8,
            "num_patches": 4,
        },
    }
    for name in DUAL_PROCESSORS
}
SIGLIP_PROCESSORS: dict[str, dict[str, Any]] = {
    "ColPali": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 8, "width": 8}},
    "ColModernVBert": {
        "image_processor_type": "Idefics3ImageProcessor",
        "max_image_size": {"longest_edge": 8},
    },
    "modernvbert": {"image_processor_type": "Idefics3ImageProcessor", "max_image_size": {"longest_edge": 8}},
}
OWN |= {
    name: {
        "architectures": [name],
        "pixel_shuffle_factor": 2,
        "colbert_dim": 6,
        "image_token_id": 3,
        "vision_config": {
            "hidden_size": 24,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 4,
            "image_size": 8,
        },
    }
    for name in SIGLIP_PROCESSORS
}
PROCESSORS = DUAL_PROCESSORS | SIGLIP_PROCESSORS
# Families with their own configuration. Families with labels read their encoder's configuration.
OWN_CONFIG = [name for name, family in FAMILIES.items() if not family.heads & {Task.ENTITIES, Task.ZERO_SHOT}]
# Values of is_causal that a family refuses.
NOT_SUPPORTED = {
    "gpt2": False,
    "ColPali": True,
    "embedding_gemma2": True,
    "embedding_gemma2_text": True,
    "openai_privacy_filter": True,
}
DECODERS = [name for name, family in FAMILIES.items() if family.is_decoder]


def build(family: Family, suffix: str = "", *, config: dict[str, Any] | None = None, **asked: Any) -> Model:
    name = family.class_prefix + suffix if suffix else family.name
    weights = DummySource(0, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        layers = LayerBuilder(weights)
        layers.folder = folder_with_adapter()
        if family.name in PROCESSORS:
            layers.folder = folder_with_processor(family.name)
        return build_model(name, CONFIG | OWN.get(family.name, {}) | (config or {}), layers, **asked)


@cache
def folder_with_adapter() -> Path:
    folder = Path(_kept.name)
    (folder / "adapters/retrieval").mkdir(parents=True)
    for place in ("adapters", "adapters/retrieval"):  # jina-embeddings-v4 and v5
        (folder / place / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"merge_size": 2}))
    return folder


@cache
def folder_with_processor(name: str) -> Path:
    folder = Path(_kept.name) / name
    folder.mkdir()
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    return folder


_kept = TemporaryDirectory()  # kept until the process ends


@pytest.mark.parametrize("name", OWN_CONFIG)
def test_a_model_is_causal_where_its_record_says_so(name: str) -> None:
    family = FAMILIES[name]
    assert build(family).is_causal is family.is_causal(CONFIG)
    assert family.is_causal(CONFIG) is (family.is_decoder and not family.attends_both_ways)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_attends_as_its_configuration_says_or_is_refused(name: str, causal: bool) -> None:
    family = FAMILIES[name]
    if NOT_SUPPORTED.get(name) is causal:
        with pytest.raises(ModelLoadError, match=f"is_causal = {causal}, which is not supported"):
            build(family, config={"is_causal": causal})
        return
    assert build(family, config={"is_causal": causal}).is_causal is causal


@pytest.mark.parametrize("name", FAMILIES)
def test_a_builder_adds_each_head_of_its_record(name: str) -> None:
    family = FAMILIES[name]
    for suffix, head in CLASS_SUFFIXES.items():
        if head is not None and head in family.heads:
            assert head in build(family, suffix).heads
    if Task.SPARSE in family.heads:
        assert Task.SPARSE in build(family, "ForMaskedLM", splade=True).heads
    if Task.GENERATE in family.heads:
        assert Task.GENERATE in build(family, generates=True).heads
    if Task.SCORE in family.heads:
        assert Task.SCORE in build(family).heads


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_that_is_not_in_the_record_is_refused(name: str) -> None:
    family = FAMILIES[name]
    if Task.SPARSE not in family.heads:
        with pytest.raises(ModelLoadError, match="'sparse' is not supported"):
            build(family, splade=True)
    if Task.GENERATE not in family.heads:
        with pytest.raises(ModelLoadError, match="'generate' is not supported"):
            build(family, generates=True)


@pytest.mark.parametrize("name", OWN_CONFIG)
def test_a_models_sizes_are_under_the_keys_of_its_record(name: str) -> None:
    keys = FAMILIES[name].keys
    config = CONFIG | OWN.get(name, {})
    width = next(config[key] for key in (*keys.output_size, *keys.hidden_size) if key in config)
    assert build(FAMILIES[name]).hidden_size == width
    assert all(key in CONFIG for key in (keys.num_layers[0], *keys.max_positions[:1]))

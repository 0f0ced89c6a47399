"""quantization_config: how modules are stored in each supported format; all others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.quantization import (
    Layout,
    StoredFormat,
    StoredWeight,
    stored_format,
    with_quantization,
)
from penstock.errors import ModelLoadError
from tests.checkpoints import FP8_BLOCKS

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def compressed(weights: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A compressed-tensors configuration with one group for all linear layers."""
    scheme = {"targets": ["Linear"], "weights": weights or WEIGHTS}
    keys = {name: more.pop(name) for name in ("input_activations", "output_activations") if name in more}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": scheme | keys},
        "ignore": ["lm_head"],
    } | more


def read(options: dict[str, Any]) -> StoredFormat:
    found = stored_format({"quantization_config": options})
    assert found is not None
    return found


def test_without_quantization_config_nothing_is_quantised() -> None:
    for config in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        assert stored_format(config) is None


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        (FP8_BLOCKS, StoredWeight(Layout.FP8_BLOCKS, 8, "block", has_quantized_inputs=True)),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            StoredWeight(Layout.FP8, 8, "tensor", has_quantized_inputs=True),
        ),
        (MODELOPT, StoredWeight(Layout.FP8, 8, "tensor", has_quantized_inputs=True)),
        (GPTQ, StoredWeight(Layout.GPTQ, 4, "group", 128, is_symmetric=False, has_lowered_zeros=True)),
        (
            GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1},
            StoredWeight(Layout.GPTQ, 4, "channel", None, is_symmetric=False),
        ),
        (AWQ, StoredWeight(Layout.AWQ, 4, "group", 128, is_symmetric=False)),
        (NF4, StoredWeight(Layout.BNB_4BIT, 4, "group")),
        (compressed(), StoredWeight(Layout.PACKED, 4, "group", 128)),
        (
            compressed(
                {"num_bits": 8, "type": "float", "strategy": "channel"},
                format="float-quantized",
                input_activations={"num_bits": 8, "dynamic": True, "strategy": "token"},
            ),
            StoredWeight(Layout.FP8, 8, "channel", has_quantized_inputs=True),
        ),
        (
            compressed({"num_bits": 8, "symmetric": False, "strategy": "channel"}, format="int-quantized"),
            StoredWeight(Layout.INT8, 8, "channel", is_symmetric=False),
        ),
    ],
    ids=str,
)
def test_each_format_is_described(options: dict[str, Any], weight: StoredWeight) -> None:
    assert read(options).weight_of("model.layers.0.self_attn.q_proj") == weight


@pytest.mark.parametrize(
    ("options", "plain", "quantised"),
    [
        (
            FP8_BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.1", "mlp.gate", "o_proj"]},
            ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.gate", "layers.3.o_proj"],
            ["model.layers.0.mlp.gate_proj", "model.layers.10.self_attn.q_proj"],
        ),
        (
            MODELOPT | {"exclude_modules": ["lm_head", "model.layers.1*", "*.v_proj"]},
            [
                "lm_head",
                "model.layers.1.mlp.up_proj",
                "layers.12.mlp.up_proj",
                "model.layers.0.self_attn.v_proj",
            ],
            ["model.layers.0.mlp.up_proj"],
        ),
        (
            GPTQ | {"dynamic": {r"-:.*\.v_proj": {}, r"+:.*layers\.0\.": {"bits": 8}}},
            ["model.layers.0.self_attn.v_proj"],
            ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"],
        ),
        (
            AWQ | {"modules_to_not_convert": ["layers.0.mlp"]},
            ["model.layers.0.mlp.up_proj"],
            ["model.layers.1.mlp.up_proj"],
        ),
        (
            compressed(ignore=["model.layers.0.mlp.up_proj", r"re:.*layers\.[12]\.mlp", "lm_head"]),
            ["layers.0.mlp.up_proj", "model.layers.2.mlp.down_proj", "lm_head"],
            ["model.layers.0.mlp.down_proj", "model.layers.3.mlp.up_proj", "layers.0.mlp.up_proj_2"],
        ),
    ],
    ids=lambda case: str(case)[:24],
)
def test_modules_are_excluded_as_each_writer_names_them(
    options: dict[str, Any], plain: list[str], quantised: list[str]
) -> None:
    found = read(options)
    assert [name for name in plain if found.weight_of(name) is not None] == []
    assert [name for name in quantised if found.weight_of(name) is None] == []


def test_groups_apply_by_name_then_pattern_then_class() -> None:
    eight = {"num_bits": 8, "type": "int", "strategy": "channel"}
    groups = {
        "a": {"targets": ["Linear"], "weights": WEIGHTS},
        "b": {"targets": ["re:.*down_proj$"], "weights": eight},
        "c": {"targets": ["model.layers.0.mlp.down_proj"], "weights": None},
    }
    found = read(compressed(config_groups=groups))
    bits = [
        None if weight is None else weight.bits
        for weight in (
            found.weight_of(f"model.layers.{name}") for name in ("0.mlp.up_proj", "1.mlp.down_proj")
        )
    ]
    assert bits == [4, 8] and found.weight_of("model.layers.0.mlp.down_proj") is None
    assert found.min_bits == 4


def test_dynamic_options_of_gptq_change_a_module() -> None:
    found = read(GPTQ | {"dynamic": {r"+:.*layers\.0\.": {"bits": 8, "group_size": 64}}})
    weight = found.weight_of("model.layers.0.mlp.up_proj")
    assert weight is not None and (weight.bits, weight.group_size) == (8, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_method": "mxfp4"}, "mxfp4 on gpt_oss, openai_privacy_filter alone"),
        ({"quant_method": "gguf"}, "quant_method = 'gguf'.*awq, bitsandbytes"),
        ({"quant_method": None}, "quant_method = None"),
        ({"quant_method": ["awq"]}, "quant_method"),
        (FP8_BLOCKS | {"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]"),
        (FP8_BLOCKS | {"activation_scheme": "static"}, "activation_scheme = 'static'"),
        (FP8_BLOCKS | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (FP8_BLOCKS | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head'"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "quant_algo = 'NVFP4'.*FP8"),
        (GPTQ | {"bits": 3}, "bits = 3"),
        (GPTQ | {"group_size": 0}, "group_size = 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        (AWQ | {"version": "gemv"}, "version = 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point = False"),
        (NF4 | {"bnb_4bit_quant_type": "int3"}, "bnb_4bit_quant_type"),
        (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        (NF4 | {"load_in_4bit": False}, "load_in_4bit and load_in_8bit"),
        (compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group"}), "float4 weights"),
        (compressed(WEIGHTS | {"num_bits": 3}), "int3 weights"),
        (compressed(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (compressed(input_activations={"num_bits": 4}), "input_activations.num_bits = 4"),
        (compressed(output_activations={"num_bits": 8}), "output_activations"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        (compressed(transform_config={"config_groups": {"u": {"type": "hadamard"}}}), "transform_config"),
        (compressed(config_groups={"g": {"targets": ["Embedding"], "weights": WEIGHTS}}), "'Embedding'"),
        (compressed(config_groups=None), "config_groups = None"),
        (compressed(ignore=["re:("]), "pattern"),
        (compressed(ignore=["re:(a+)+$"]), "no repeated group"),
    ],
    ids=lambda case: str(case)[:60],
)
def test_other_formats_are_refused_with_what_is_supported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as refused:
        stored_format({"quantization_config": options})
    assert "quantization_config" in str(refused.value)


def test_the_configuration_is_found_wherever_a_writer_keeps_it(tmp_path: Path) -> None:
    assert with_quantization(tmp_path, {"a": 1}) == {"a": 1}
    assert with_quantization(tmp_path, {"compression_config": GPTQ})["quantization_config"] == GPTQ
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {}, "quantization": {"quant_algo": "FP8"}}))
    assert with_quantization(tmp_path, {})["quantization_config"]["quant_method"] == "modelopt"
    assert with_quantization(tmp_path, {"quantization_config": AWQ})["quantization_config"] == AWQ
    file.write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert with_quantization(tmp_path, {}) == {}
    file.write_text(json.dumps({"quantization": 3}))
    with pytest.raises(ModelLoadError, match=r"hf_quant_config.json has quantization = 3"):
        with_quantization(tmp_path, {})

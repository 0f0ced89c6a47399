"""quantization_config: one format is supported, all others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.checkpoint.quantization import block_format
from penstock.errors import ModelLoadError
from tests.checkpoints import FP8_BLOCKS


def test_without_quantization_config_no_weight_is_in_blocks() -> None:
    for config in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        assert block_format(config) is None


def test_blocks_cover_every_module_that_is_not_excluded() -> None:
    left = ["lm_head", "model.layers.1", "model.layers.0.mlp.gate", "o_proj"]
    found = block_format({"quantization_config": FP8_BLOCKS | {"modules_to_not_convert": left}})
    assert found is not None
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.10.self_attn.q_proj", "model.layers.0.mlp"):
        assert found.covers(name)
    for name in ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.gate", "layers.3.o_proj"):
        assert not found.covers(name)
    everything = block_format({"quantization_config": FP8_BLOCKS | {"modules_to_not_convert": None}})
    assert everything is not None and everything.covers("lm_head")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method = 'gptq'"),
        ({"quant_method": None}, "quant_method = None"),
        ({"weight_block_size": None}, "weight_block_size = None"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static'"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
    ],
    ids=str,
)
def test_other_formats_are_refused_with_the_supported_one(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as refused:
        block_format({"quantization_config": FP8_BLOCKS | change})
    assert "quantization_config" in str(refused.value) and "[128, 128]" in str(refused.value)

"""The work of one token, against manual counts and against the weights in files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from penstock.checkpoint.describe import read_spec
from penstock.errors import BadValue
from penstock.planning.shape import ModelShape, model_shape
from tests.checkpoints import write_bert, write_splade, write_static
from tests.planning.shapes import BERT_BASE, MOE, with_config


def shape_of(folder: Path) -> ModelShape:
    return model_shape(read_spec(folder, "model"))


def test_products_of_bert_base_are_those_counted_by_hand() -> None:
    # 12 layers of four 768 × 768 and two 768 × 3072 matrices; two FLOPs per weight.
    assert BERT_BASE.dense_flops == 2 * 12 * (4 * 768 * 768 + 2 * 768 * 3072) == 169_869_312
    assert BERT_BASE.expert_flops == 0


def test_attention_grows_with_the_row_and_halves_where_it_is_causal() -> None:
    assert BERT_BASE.attention_flops(512) == 4 * 12 * 64 * 12 * 512
    causal = msgspec.structs.replace(BERT_BASE, is_causal=True)
    assert causal.attention_flops(512) == BERT_BASE.attention_flops(512) / 2


def test_layers_with_a_window_see_no_more_than_it() -> None:
    local = msgspec.structs.replace(BERT_BASE, local_layers=8, window=128)
    assert local.attention_flops(2048) == 4 * 12 * 64 * (4 * 2048 + 8 * 128)
    assert local.attention_flops(64) == BERT_BASE.attention_flops(64)


def test_a_token_passes_through_its_own_experts_only() -> None:
    assert MOE.expert_flops == 2 * 48 * 3 * 2048 * 8 * 768
    assert MOE.dense_flops == 2 * 48 * 2 * 2048 * 128 * (32 + 4)


def test_sizes_give_what_the_files_hold(tmp_path: Path) -> None:
    counted = shape_of(write_bert(tmp_path))
    assert counted.dense_weights is not None
    assert msgspec.structs.replace(counted, dense_weights=None).dense_flops == counted.dense_flops


def test_experts_in_files_count_by_those_that_a_token_uses(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    named = {"architectures": ["Qwen3MoeModel"], "model_type": "qwen3_moe", "num_key_value_heads": 2}
    folder = with_config(tmp_path, **named, **sizes, rms_norm_eps=1e-6)
    (folder / "modules.json").unlink()
    by_sizes = shape_of(folder)
    attention = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    tensors = {f"layers.0.self_attn.{name}.weight": torch.zeros(shape) for name, shape in attention.items()}
    for expert in range(4):
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"layers.0.mlp.experts.{expert}.{name}.weight"] = torch.zeros(16, 32)
    layers = {f"layers.{at}.{name[9:]}": each.clone() for at in (0, 1) for name, each in tensors.items()}
    save_file(layers | {"embed_tokens.weight": torch.zeros(9, 32)}, folder / "model.safetensors")
    counted = shape_of(folder)
    assert (counted.dense_flops, counted.expert_flops) == (by_sizes.dense_flops, by_sizes.expert_flops)
    assert counted.expert_flops == 2 * 2 * 2 * 3 * 16 * 32


def test_splade_computes_the_logits_of_every_token(tmp_path: Path) -> None:
    plain, splade = shape_of(write_bert(tmp_path / "bert")), shape_of(write_splade(tmp_path / "splade"))
    assert splade.head_weights == 32 * read_spec(tmp_path / "splade", "splade").vocab_size
    assert splade.dense_flops == plain.dense_flops + 2 * splade.head_weights


def test_windows_are_read_from_the_layer_types(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"]
    folder = with_config(
        tmp_path,
        architectures=["Gemma3TextModel"],
        model_type="gemma3_text",
        num_key_value_heads=2,
        head_dim=8,
        layer_types=types,
        sliding_window=16,
        rms_norm_eps=1e-6,
    )
    (folder / "modules.json").unlink(missing_ok=True)
    shape = shape_of(folder)
    assert (shape.local_layers, shape.window) == (1, 16)


def test_static_embeddings_have_no_recorded_rate(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="--measure"):
        shape_of(write_static(tmp_path))

"""Seeded checkpoints in published quantised layouts, and their dequantised weights.

Each writer packs bit by bit in the order of the format's own tools, independently of the readers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.decoders import MOE, Family

FP8 = torch.float8_e4m3fn
GROUP = 32
FAMILY = Family(
    "Qwen3ForCausalLM",
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "attention_bias": True,
    },
    old=True,
)
EXPERTS = Family(
    "Qwen3MoeForCausalLM",
    MOE | {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "mlp_only_layers": []},
)
PLAIN = ("lm_head", "model.layers.1.self_attn.v_proj")  # modules stored without quantisation
_PROJECTION = re.compile(r"layers\.\d+\..*_proj\.weight$")
NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)

Stored = tuple[dict[str, Tensor], Tensor]  # tensors by name suffix, and the dequantised weight


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    store: Callable[[Tensor], Stored]
    file: str = "config.json"  # file with the quantisation config
    key: str | None = "quantization_config"
    family: Family = field(default=FAMILY)


def words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Integers [rows, n] → int32 [rows, n · bits / 32]; value order[i] of each word is in bits i · bits."""
    count = 32 // bits
    order = order or tuple(range(count))
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % count))
    parts = padded.view(len(values), -1, count)
    out = torch.zeros(parts.shape[:2], dtype=torch.long)
    for i, source in enumerate(order):
        out |= parts[:, :, source] << (bits * i)
    return out.where(out < 1 << 31, out - (1 << 32)).to(torch.int32)


def grouped(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [out, in] from 0, scales [out, groups] in fp16, zeros [out, groups])."""
    parts = weight.view(len(weight), -1, group)
    top = (1 << bits) - 1
    low, high = parts.amin(dim=2).clamp_max(0), parts.amax(dim=2).clamp_min(0)
    if symmetric:
        scales = parts.abs().amax(dim=2) / (top // 2)
        zeros = torch.full_like(scales, (top + 1) // 2)
    else:
        scales = (high - low) / (top - 1)
        zeros = (-low / scales).round().clamp(1, top)
    scales = scales.half()
    codes = (parts / scales.float()[:, :, None] + zeros[:, :, None]).round().clamp(0, top)
    return codes.view_as(weight).int(), scales, zeros.int()


def stands_for(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor | None = None) -> Tensor:
    if group_of is None:
        group_of = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    return (codes.float() - zeros[:, group_of].float()) * scales[:, group_of].float()


def fp8(name: str, *, per_channel: bool, shape: tuple[int, ...] | None = None, static: bool = False) -> Any:
    def store(weight: Tensor) -> Stored:
        largest = weight.abs().amax(dim=1, keepdim=True) if per_channel else weight.abs().max().view(1, 1)
        scales = (largest / 448).bfloat16().float()
        values = (weight / scales).clamp(-448, 448).to(FP8)
        stored = scales.bfloat16() if per_channel else scales.view(shape or ())
        tensors = {"weight": values, name: stored}
        if static:
            tensors["input_scale"] = torch.tensor(0.02)
        return tensors, values.float() * scales

    return store


def fp8_blocks(weight: Tensor) -> Stored:
    rows, cols = (-(-size // 128) for size in weight.shape)
    assert rows == cols == 1  # tiny models are one block
    scale = weight.abs().max().view(1, 1) / 448
    values = (weight / scale).to(FP8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def int8(*, symmetric: bool = True) -> Callable[[Tensor], Stored]:
    def store(weight: Tensor) -> Stored:
        codes, scales, zeros = grouped(weight, 8, weight.shape[1], symmetric=symmetric)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, stands_for(codes, scales, zeros)

    return store


def packed(
    bits: int, group: int | None, *, symmetric: bool, shuffled: bool = False
) -> Callable[[Tensor], Stored]:
    """compressed-tensors' packed format: weights packed along the inputs, zero points along the outputs."""

    def store(weight: Tensor) -> Stored:
        order, group_of = _groups(weight, group) if shuffled else (None, None)
        used = weight if order is None else weight[:, order]
        codes, scales, zeros = grouped(used, bits, group or weight.shape[1], symmetric=symmetric)
        if order is not None:
            codes = codes[:, order.argsort()]
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
        if group_of is not None:
            tensors["weight_g_idx"] = group_of.int()
        return tensors, stands_for(codes, scales, zeros, group_of)

    return store


def gptq(
    bits: int, *, symmetric: bool, shuffled: bool = False, lowered: bool = True
) -> Callable[[Tensor], Stored]:
    def store(weight: Tensor) -> Stored:
        order, group_of = _groups(weight, GROUP)
        if not shuffled:
            order, group_of = torch.arange(len(order)), torch.arange(len(order)) // GROUP
        codes, scales, zeros = grouped(weight[:, order], bits, GROUP, symmetric=symmetric)
        codes = codes[:, order.argsort()]
        tensors = {
            "qweight": words(codes, bits).t().contiguous(),
            "qzeros": words((zeros - (1 if lowered else 0)).t(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": group_of.int(),
        }
        return tensors, stands_for(codes, scales, zeros, group_of)

    return store


def awq(weight: Tensor) -> Stored:
    codes, scales, zeros = grouped(weight, 4, GROUP, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(codes.t(), 4, order),
        "qzeros": words(zeros.t(), 4, order),
        "scales": scales.t().contiguous(),
    }
    return tensors, stands_for(codes, scales, zeros)


def nf4(weight: Tensor) -> Stored:
    """bitsandbytes' NF4 in blocks of 64 values. Their scales are quantised again in blocks of 256."""
    table, flat = torch.tensor(NF4), weight.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    largest = blocks.abs().amax(dim=1)
    offset = float(largest.mean())
    nested = torch.linspace(-1, 1, 256)
    apart = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
    widest = apart.abs().amax(dim=1)
    small = (apart / widest[:, None]).flatten()[: len(largest)]
    codes = (small[:, None] - nested).abs().argmin(dim=1).to(torch.uint8)
    scales = nested[codes.long()] * widest.repeat_interleave(256)[: len(codes)] + offset
    levels = ((blocks / scales[:, None])[:, :, None] - table).abs().argmin(dim=2).flatten()[: len(flat)]
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": offset,
    }
    tensors = {
        "weight": (levels[::2] << 4 | levels[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": codes,
        "weight.quant_map": table,
        "weight.nested_absmax": widest,
        "weight.nested_quant_map": nested,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    stands = table[levels] * scales.repeat_interleave(64)[: len(flat)]
    return tensors, stands.view_as(weight)


def bnb_int8(weight: Tensor) -> Stored:
    largest = weight.abs().amax(dim=1)
    values = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values.float() * largest[:, None] / 127


def _groups(weight: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """(inputs in the order of quantisation, group of each input)."""
    assert group is not None
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    return order, order.argsort() // group


def compressed(
    stored_as: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    ignored = ["lm_head", r"re:.*layers\.1\.self_attn\.v_proj$", "re:.*mlp.gate$"]
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": scheme},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        **more,
    }


def _weights(kind: str, bits: int, strategy: str, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "num_bits": bits,
        "strategy": strategy,
        "symmetric": symmetric,
        "dynamic": False,
        **more,
    }


TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}
SHARED_SCALE = _weights("float", 8, "tensor")
INT4 = _weights("int", 4, "group", group_size=GROUP)
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
    "dynamic": {r"-:.*layers\.1\.self_attn\.v_proj": {}},
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
BNB = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head", "layers.1.self_attn.v_proj"]}
MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "model.layers.1.self_attn.v*"],
    },
}

FORMATS: dict[str, Format] = {
    "fp8-channel": Format(
        compressed("float-quantized", _weights("float", 8, "channel"), TOKEN | {"type": "float"}),
        fp8("weight_scale", per_channel=True),
    ),
    "fp8-static": Format(
        compressed("naive-quantized", SHARED_SCALE, SHARED_SCALE),
        fp8("weight_scale", per_channel=False, shape=(1,), static=True),
        key="compression_config",
    ),
    "fp8-blocks": Format(
        compressed("float-quantized", _weights("float", 8, "block", block_structure=[128, 128]), TOKEN),
        fp8_blocks,
    ),
    "fp8-tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": list(PLAIN)},
        fp8("weight_scale", per_channel=False, static=True),
    ),
    "fp8-inverse": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": list(PLAIN)},
        fp8("weight_scale_inv", per_channel=False),
    ),
    "modelopt": Format(
        MODELOPT, fp8("weight_scale", per_channel=False, static=True), file="hf_quant_config.json", key=None
    ),
    "int8": Format(
        compressed("int-quantized", _weights("int", 8, "channel"), TOKEN | {"type": "int"}), int8()
    ),
    "int8-zeros": Format(
        compressed("int-quantized", _weights("int", 8, "channel", symmetric=False), TOKEN),
        int8(symmetric=False),
    ),
    "packed-int4": Format(compressed("pack-quantized", INT4), packed(4, GROUP, symmetric=True)),
    "packed-int4-zeros": Format(
        compressed("pack-quantized", INT4 | {"symmetric": False}), packed(4, GROUP, symmetric=False)
    ),
    "packed-int4-order": Format(
        compressed("pack-quantized", INT4 | {"actorder": "group"}),
        packed(4, GROUP, symmetric=True, shuffled=True),
    ),
    "packed-int8": Format(
        compressed("pack-quantized", _weights("int", 8, "channel")), packed(8, None, symmetric=True)
    ),
    "packed-experts": Format(
        compressed("pack-quantized", INT4), packed(4, GROUP, symmetric=True), family=EXPERTS
    ),
    "gptq": Format(GPTQ, gptq(4, symmetric=True)),
    "gptq-order": Format(GPTQ | {"desc_act": True, "sym": False}, gptq(4, symmetric=False, shuffled=True)),
    "gptq-v2": Format(
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, gptq(4, symmetric=False, lowered=False)
    ),
    "gptq-int8": Format(GPTQ | {"bits": 8}, gptq(8, symmetric=True)),
    "awq": Format(AWQ | {"modules_to_not_convert": ["layers.1.self_attn.v_proj"]}, awq),
    "nf4": Format(BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
    "bnb-int8": Format(BNB | {"load_in_8bit": True}, bnb_int8),
}


def write_quantized(name: str, root: Path) -> tuple[Path, Path]:
    """Write both checkpoints. Returns the folder in a quantised format, and the folder with dequantised
    weights."""
    wanted, stored_in, plain = FORMATS[name], root / "stored", root / "plain"
    wanted.family.write(stored_in)
    shutil.copytree(stored_in, plain)
    tensors = load_file(stored_in / "model.safetensors")
    stands = dict(tensors)
    for tensor in [key for key in tensors if _PROJECTION.search(key)]:
        module = tensor.removesuffix(".weight")
        if module not in PLAIN:
            stored, stands[tensor] = wanted.store(tensors.pop(tensor))
            tensors |= {f"{module}.{end}": value for end, value in stored.items()}
    if wanted.file != "config.json":  # ModelOpt's checkpoints also have KV cache scales
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.1)
    for folder, held in ((stored_in, tensors), (plain, stands)):
        held = {key: value.contiguous() for key, value in held.items()}
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    file = stored_in / wanted.file
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(config | ({wanted.key: wanted.config} if wanted.key else wanted.config)))
    return stored_in, plain

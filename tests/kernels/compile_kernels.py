"""Compile every kernel for a GPU, without one. `test_compile.py` runs this file as a script.

It needs an interpreter of its own: Triton decides at import whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

torch.cuda.is_available = lambda: True  # so that the kernels are defined

from penstock.kernels import (  # noqa: E402
    activation,
    attention,
    blockwise,
    embedding,
    experts,
    gate_up,
    int4,
    language,
    logit_thresholds,
    lora,
    norm,
    output_quantize,
    paged,
    pooling,
    quantize,
    rotary,
    sampled_tokens,
    sampling,
    splade,
)
from penstock.layers.distance_bias import DistanceBias  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)
ALL_VARIANTS = bool(os.environ.get("PENSTOCK_ALL_CASES"))
MODULES = (activation, attention, blockwise, embedding, experts, gate_up, int4, logit_thresholds, norm)
MODULES += (lora, output_quantize, paged, pooling, quantize, rotary, sampled_tokens, sampling, splade)
# Functions that only other kernels call.
HELPERS = {
    "activate",
    "_distance_bias",
    "_key_tile",
    "_log1p_relu",
    "_philox",
    "_gumbel",
    "_apply_penalties",
    "_ordered_key",
    "_from_ordered_key",
    "_dot",
}
HELPERS |= {
    "load_float",
    "load_logits",
    "_weight",
    "_load_candidates",
    "store_quantized",
    "quantize_group",
    "_difference",
    "_act",
    "_change",
}
HELPERS |= {"_scaled_dot", "_write_order", "_write_tiles", "_corner", "_copy", "_multiply"}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
F32 = torch.float32
VOCABULARY = 151936


ASSEMBLE = CUDABackend.make_cubin


def skip_assembler(*_: Any) -> bytes:
    return b""


class Compiler:
    """Takes the place of a kernel: a launch compiles it for `TARGET` and runs nothing.

    The first variant of a kernel for its types of arguments is compiled and assembled. With
    PENSTOCK_ALL_CASES=1 the others are compiled to PTX.
    """

    compiled: set[str] = set()
    assembled: set[tuple[str, ...]] = set()

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Compiler:
        return self

    def __call__(
        self, *args: Any, num_warps: int, num_stages: int = 3, maxnreg: int | None = None, **constants: Any
    ) -> None:
        values = dict(zip(self.function.arg_names, args, strict=False)) | constants
        signature: dict[str, str] = {}
        constexprs: dict[str, Any] = {}
        for parameter in self.function.params:
            value = values[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constexprs[parameter.name] = "constexpr", value
            else:
                signature[parameter.name] = triton_type(value)
        make = GluonASTSource if self.function.is_gluon() else ASTSource
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        types = (self.function.__name__, *signature.values())
        if types in self.assembled and not ALL_VARIANTS:
            return
        CUDABackend.make_cubin = skip_assembler if types in self.assembled else ASSEMBLE
        self.assembled.add(types)
        triton.compile(make(self.function, signature, constexprs), target=TARGET, options=options)
        self.compiled.add(self.function.__name__)


def triton_type(value: Any) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if hasattr(value, "block_shape"):
        return f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape},{value.layout}>"
    return "fp32" if isinstance(value, float) else "i32"


def replace_kernels(modules: tuple[ModuleType, ...]) -> set[str]:
    """Put a `Compiler` in place of each kernel, and return the kernels' names."""
    kernels = set()
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.runtime.jit.JITFunction) and name not in HELPERS:
                kernels.add(name)
                setattr(module, name, Compiler(value))
    return kernels


def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def i(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


def blocks(*shape: int) -> blockwise.BlockQuantized:
    scales = [*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)]
    return blockwise.BlockQuantized(x(*shape, dtype=torch.float8_e4m3fn), x(*scales, dtype=F32))


def launch_element_wise_kernels() -> None:
    for act in ("gelu", "gelu_new", "silu", "relu"):
        activation.bias_act_(x(2, 3072), x(3072), act)
    activation.gated_activation(x(2, 2304), "gelu", True)
    norm.add_norm(x(2, 768), x(2, 768), x(768), x(768), 1e-12, rms=False, keep=False)
    norm.add_norm(x(2, 4096), x(2, 4096), x(4096), None, 1e-6, rms=True)
    norm.norm_add_norm(x(2, 768), x(2, 768), x(768), x(768), 1e-6)
    quantize.quantize_rows(x(2, 4096))
    activation.bias_act_quantized(x(2, 3072), x(3072), "gelu")
    activation.gated_activation_quantized(x(2, 28672), "silu", True)
    norm.add_norm_quantized(x(2, 4096), x(2, 4096), x(4096), None, 1e-6, rms=True)
    norm.add_norm_quantized(x(2, 768), x(2, 768), x(768), x(768), 1e-12, rms=False, post=True)
    norm.norm_add_norm_quantized(x(2, 768), x(2, 768), x(768), x(768), 1e-6)
    embedding.embed(i(2), x(9, 768), i(2), x(9, 768), i(2), x(2, 768), (x(768), x(768), 1e-12))
    tables = x(9, 64, dtype=F32), x(9, 64, dtype=F32)
    norms = rotary.HeadNorms(x(128), x(128), 1e-6)
    cache = rotary.KVCacheWrite(x(4, 8, 128), x(4, 8, 128), i(2))
    rotary.rotate_qkv_(x(2, 32, 128), (16, 8), i(2), *tables, size=128, norms=norms)
    rotary.rotate_qkv_(x(2, 32, 128), (16, 8), i(2), *tables, size=128, norms=norms, keep=cache)
    rotary.rotate_qkv_(x(2, 9, 128), (3, 3), i(2), *tables, size=64, interleaved=True)


def launch_adapter_kernels() -> None:
    """Fused parts, an activation, gains, and both sizes of tiles."""
    for tile in (lora.SMALL_TILE, lora.LARGE_TILE):
        lines = lora.LineTiles(i(80), i(6).view(2, 3), tile)
        for ends, act, gain in (
            ((768, 1536, 2304), None, False),
            ((3072,), "gelu", False),
            ((768,), None, True),
        ):
            scaled = (x(4, ends[-1], dtype=F32), x(4, ends[-1], dtype=F32)) if gain else (None, None)
            pair = x(4, len(ends) * 64, 768), x(4, ends[-1], 64)
            adapters = lora.LowRank(*pair, i(4), ends, *scaled)
            lora.expand_(x(80, ends[-1]), lora.shrink(x(80, 768), adapters, lines, 16), adapters, lines, act)
        pair = x(4, 128, 768), x(4, 1536, 64)
        adapters = lora.LowRank(*pair, i(4), (768, 1536), x(4, 1536, dtype=F32), x(4, 1536, dtype=F32))
        low = lora.shrink(x(80, 768), adapters, lines, 16)
        lora.expand_gated(x(80, 1536), low, adapters, lines, "silu", gate_first=True)
        lora.replace_(x(80, 3), x(80, 768), x(4, 3, 768), x(4, 3), i(4), lines)


def launch_pooling_kernels() -> None:
    for method in pooling.METHODS:
        pooling.pool(x(9, 768), i(2), method, max_length=9, skip=i(1), normalize=True)
    pooling.pool(x(9, 768), i(2), "mean", max_length=900, chosen=i(1), dims=100, normalize=True)
    pooling.normalize_rows(x(9, 128), i(4), torch.float16)
    pooling.copy_rows(x(9, 128), i(4), x(30, 128), i(4))
    output_quantize.to_int8(x(2, 768, dtype=F32), True)
    output_quantize.to_binary(x(2, 768, dtype=F32), True)
    for reduce in ("max", "sum"):
        splade.splade_pool(x(9, 30522), i(2), logs=2, reduce=reduce)


def launch_attention_kernels() -> None:
    """Head sizes that fill a tile and one that does not; each option of each kernel at least once."""
    for (heads, kv_heads, dim), lengths in (
        ((12, 12, 64), (16, 64)),
        ((8, 2, 128), (32,)),
        ((4, 4, 96), (64,)),
    ):
        qkv = x(99, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)
        old = x(9, kv_heads, dim), x(9, kv_heads, dim)
        attention.write_kv_cache(*qkv[1:], *old, i(99))
        for length in lengths:
            attention.short_attention(*qkv, i(2), max_length=length, scale=0.1, causal=True, limits=i(1))
        if dim == 64:
            for bias in (DistanceBias(x(12), 0), DistanceBias(x(12, 257), 128)):
                attention.short_attention(*qkv, i(2), max_length=9, scale=0.1, bias=bias)
                attention.flash_attention(*qkv, i(2), max_length=99, scale=0.1, bias=bias)
            options = {"max_length": 99, "scale": 0.1, "causal": True}
            attention.flash_attention(*qkv, i(2), i(2), **options, window=9, limits=i(1))
        elif dim == 96:
            launch_flash_attention(qkv, old, 9)
        where = x(640, kv_heads, dim), x(640, kv_heads, dim), i(20).view(2, 10), i(2)
        splits, more = (1, {}) if dim == 64 else (4, {"window": 50, "softcap": 30.0})
        options = {"block_size": 16, "scale": 0.1, "out": x(2, heads * dim), "splits": splits}
        paged.paged_attention(x(2, heads, dim), *where, **options, **more)
    launch_flash_attention(x(99, 8, 256).split([4, 2, 2], dim=1), (x(9, 2, 256), x(9, 2, 256)), None)
    launch_attention_with_sinks()
    wide = x(99, 6, 512).split([4, 1, 1], dim=1)
    attention.flash_attention(*wide, i(2), max_length=99, scale=1.0)


def launch_attention_with_sinks() -> None:
    qkv, sinks = x(99, 12, 64).split([8, 2, 2], dim=1), x(8, dtype=F32)
    options = {"max_length": 99, "scale": 0.1, "causal": True, "window": 9, "sinks": sinks}
    cached = attention.CachedKeyValues(x(9, 2, 64), x(9, 2, 64), i(9))
    attention.flash_attention(*qkv, i(2), i(2), **options, cached=cached)
    where = x(640, 2, 64), x(640, 2, 64), i(20).view(2, 10), i(2)
    options = {"block_size": 16, "scale": 0.1, "out": x(2, 512), "splits": 4, "sinks": sinks}
    paged.paged_attention(x(2, 8, 64), *where, **options)


def launch_flash_attention(qkv: Any, old: tuple[Tensor, Tensor], window: int | None) -> None:
    cached = attention.CachedKeyValues(*old, i(9))
    options = {"max_length": 99, "scale": 0.1, "causal": True, "window": window}
    attention.flash_attention(*qkv, i(2), i(2), **options, cached=cached)


def launch_sampling_kernels() -> None:
    logits, table, work = x(2, VOCABULARY), i(45).view(3, 15), x(2, VOCABULARY, dtype=F32)
    counts, masks, slots = i(2 * VOCABULARY).view(2, -1), i(2 * 4748).view(2, -1), i(2)
    sampled_tokens.insert_sampled_tokens(i(2), i(2), i(3))
    sampling.sample_tokens(logits, slots, table, i(3))
    noted = {"counts": counts, "tails": table}
    sampling.sample_tokens(logits, slots.long(), table, i(3), work=work, thresholds=work[0, :2], **noted)
    options = {"masks": masks, "counts": counts, "entries": i(99), "tails": table}
    sampling.edit_logits(logits, slots, table, i(3), work, **options)
    sampling.edit_logits(logits, slots, table, i(3), work, entries=i(99))
    sampling.logsumexp_and_ranks(logits, slots.long(), slots)
    logit_thresholds.logit_thresholds(work, slots, table)
    logit_thresholds.logit_thresholds(logits, slots, table, work=work)


def launch_matmul_kernels() -> None:
    for tokens in (1, 100, 2000):
        blockwise.block_matmul(x(tokens, 256), blocks(512, 256), x(512))
    codes, scales = x(512, 256, dtype=torch.uint8), x(2, 512, dtype=torch.float16)
    grouped = int4.pack_int4(codes, scales, x(2, 512, dtype=torch.uint8))
    for tokens in (1, 100):
        int4.int4_matmul(x(tokens, 256), grouped, x(512), parts=2)
    int4.int4_matmul(x(1, 256), int4.pack_int4(codes, scales, None))
    int4.int4_matmul(x(1, 256, dtype=torch.float16), int4.pack_int4(codes, x(8, 512), None))
    int4.dequantize_int4(grouped, x(512, 256))
    options = {"chosen": 8, "normalize": True, "act": "silu"}
    for _, tiling in experts.HALF_TILINGS[::4]:  # the smallest tiles, swapped or not, and the largest
        weights = x(32, 512, 256), x(32, 256, 256)
        experts.run_experts(x(20, 256), x(20, 32), *weights, **options, plan=tiling, residual=x(20, 256))
    for _, tiling in experts.FP8_TILINGS[::4]:
        quantized = blocks(32, 512, 256), blocks(32, 256, 256)
        experts.run_experts(x(20, 256), x(20, 32), *quantized, **options, plan=tiling)
    plain = {"chosen": 2, "normalize": False, "act": "gelu", "gated": False, "bias": x(256)}
    experts.run_experts(x(20, 256), x(20, 8), x(8, 512, 256), x(8, 256, 512), **plain)
    experts.route(x(900, 128), 8, True, 16)
    gate_up._num_programs = lambda device: 132
    for act, half in (("gelu", torch.bfloat16), ("gelu_new", torch.float16), ("silu", torch.bfloat16)):
        gate_up.GateUp(x(256, 64, dtype=half), act, True)(x(5, 64, dtype=half))
    gate_up.GateUp(x(256, 64, dtype=torch.float16), "relu", False)(x(5, 64, dtype=torch.float16))


def main() -> None:
    language.set_kernel_devices("cpu")
    kernels = replace_kernels(MODULES)
    launch_element_wise_kernels()
    launch_pooling_kernels()
    launch_adapter_kernels()
    launch_attention_kernels()
    launch_sampling_kernels()
    launch_matmul_kernels()
    if missed := kernels - Compiler.compiled:
        raise SystemExit(f"kernels that nothing here launches: {', '.join(sorted(missed))}")


if __name__ == "__main__":
    main()

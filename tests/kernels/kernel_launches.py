"""Launches of every kernel with the shapes of published models, on tensors that are never read.

`compile_kernels.py` records the launches and compiles them for several kinds of GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels import (
    activation,
    attention,
    blockwise,
    embedding,
    experts,
    few_rows,
    gate_up,
    int4,
    logit_thresholds,
    lora,
    lora_linear,
    maxsim,
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
from penstock.kernels.cached_kv import LayerCache
from penstock.layers.distance_bias import DistanceBias

F32, FP8 = torch.float32, torch.float8_e4m3fn
VOCABULARY = 151936  # vocabulary size of Qwen3
current_model = ""  # the model whose shapes the next launches have


class Encoder(NamedTuple):
    """Widths for which element-wise kernels are compiled: a common one, a large one, and the largest."""

    model: str
    hidden: int
    intermediate: int


class Heads(NamedTuple):
    """A shape of attention."""

    model: str
    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...] = (64,)  # lengths of short rows
    is_causal: bool = False
    window: int | None = None


ENCODERS = (
    Encoder("bge-base", 768, 3072),
    Encoder("GritLM-7B", 4096, 14336),
    Encoder("Qwen3-32B", 5120, 25600),
)
HEADS = (
    Heads("bge-base", 12, 12, 64, (16, 32, 64)),
    Heads("Qwen3-0.6B", 16, 8, 128, (32, 64), is_causal=True),
    Heads("MiniLM", 12, 12, 32, (16, 32, 64)),
    Heads("ModernBERT", 12, 12, 64, (64,), window=64),
    Heads("SigLIP", 16, 16, 72),
    Heads("Qwen2.5-VL vision", 16, 16, 80),
    Heads("Phi-3", 32, 32, 96, is_causal=True, window=2047),
    Heads("GritLM-7B", 32, 8, 128, (64,)),
    Heads("Gemma 2", 8, 4, 256, (64,), is_causal=True, window=4096),
)


def reals(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor whose memory is never touched."""
    return torch.empty(shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32)


def blocks(*shape: int) -> blockwise.BlockQuantized:
    scales = [*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)]
    return blockwise.BlockQuantized(reals(*shape, dtype=FP8), reals(*scales, dtype=F32))


def int4_weight(outputs: int, inputs: int, groups: int, *, zeros: bool, dtype: torch.dtype) -> Any:
    packed = torch.empty((inputs // 128, outputs, 32), dtype=torch.int16)
    points = torch.empty((groups if zeros else 1, outputs), dtype=torch.uint8)
    return int4.PackedInt4(packed, reals(groups, outputs, dtype=dtype), points, inputs)


def launch_element_wise_kernels(has_fp8: bool) -> None:
    global current_model
    for encoder in ENCODERS:
        current_model, hidden, wide = encoder
        weight, bias = reals(hidden), reals(hidden)
        rows = reals(2, hidden), reals(2, hidden)
        activation.bias_act_(reals(2, wide), reals(wide), "gelu")
        activation.gated_activation(reals(2, 2 * wide), "silu", True)
        norm.add_norm(*rows, weight, bias, 1e-12, rms=False, keep=False)
        norm.add_norm(*rows, weight, None, 1e-6, rms=True)
        norm.norm_add_norm(*rows, weight, weight, 1e-6)
        tables = reals(9, hidden), ints(2), reals(9, hidden), ints(2), reals(2, hidden)
        embedding.embed(ints(2), *tables, (weight, bias, 1e-12))
        if has_fp8:
            quantize.quantize_rows(rows[0])
            blockwise.quantize_groups(rows[0])
            activation.bias_act_quantized(reals(2, wide), reals(wide), "gelu")
            activation.gated_activation_quantized(reals(2, 2 * wide), "silu", True)
            norm.add_norm_quantized(*rows, weight, None, 1e-6, rms=True)
            norm.add_norm_quantized(*rows, weight, bias, 1e-12, rms=False, post=True)
            norm.norm_add_norm_quantized(*rows, weight, weight, 1e-6)
    current_model = "any"
    for act in ("gelu_new", "silu", "relu"):
        activation.bias_act_(reals(2, 3072), reals(3072), act)


def kv_cache(slots: int, heads: int, dim: int, *, is_fp8: bool = False) -> LayerCache:
    dtype = FP8 if is_fp8 else torch.bfloat16
    scales = (reals(slots, heads, dtype=F32), reals(slots, heads, dtype=F32)) if is_fp8 else ()
    return LayerCache(reals(slots, heads, dim, dtype=dtype), reals(slots, heads, dim, dtype=dtype), *scales)


def launch_rotary_kernels(has_fp8: bool) -> None:
    global current_model
    current_model = "Qwen3-0.6B"
    tables = reals(9, 64, dtype=F32), reals(9, 64, dtype=F32)
    norms = rotary.HeadNorms(reals(128), reals(128), 1e-6)
    rotary.rotate_qkv_(reals(2, 32, 128), (16, 8), ints(2), *tables, size=128, norms=norms)
    for is_fp8 in (False, True) if has_fp8 else (False,):
        cache = rotary.KVCacheWrite(kv_cache(4, 8, 128, is_fp8=is_fp8), ints(2))
        rotary.rotate_qkv_(reals(2, 32, 128), (16, 8), ints(2), *tables, size=128, norms=norms, keep=cache)
    rotary.rotate_qkv_(reals(2, 9, 128), (3, 3), ints(2), *tables, size=64, interleaved=True)


def launch_pooling_kernels() -> None:
    global current_model
    for encoder in ENCODERS:
        current_model, hidden, _ = encoder
        for method in pooling.METHODS if hidden == ENCODERS[0].hidden else ("mean",):
            pooling.pool(reals(9, hidden), ints(2), method, max_length=9, skip=ints(1), normalize=True)
        pooling.pool(reals(9, hidden), ints(2), "mean", max_length=900, chosen=ints(1), normalize=True)
        output_quantize.to_int8(reals(2, hidden, dtype=F32), True)
        output_quantize.to_binary(reals(2, hidden, dtype=F32), True)
    current_model = "ColBERT"
    pooling.normalize_rows(reals(9, 128), ints(4), torch.float16)
    pooling.copy_rows(reals(9, 128), ints(4), reals(30, 128), ints(4))
    current_model = "SPLADE"
    for reduce in ("max", "sum"):
        splade.splade_pool(reals(9, 30522), ints(2), logs=2, reduce=reduce)


def launch_attention_kernels(has_fp8: bool) -> None:
    global current_model
    for shape in HEADS:
        current_model = shape.model
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        qkv = reals(99, sum(sizes), shape.dim).split(sizes, dim=1)
        for length in shape.lengths:
            options = {"max_length": length, "scale": 0.1, "causal": shape.is_causal}
            attention.short_attention(*qkv, ints(3), **options)
        options = {"max_length": 99, "scale": 0.1, "causal": shape.is_causal, "window": shape.window}
        attention.flash_attention(*qkv, ints(3), **options)
        if shape.is_causal:
            for is_fp8 in (False, True) if has_fp8 else (False,):
                cached = kv_cache(640, shape.kv_heads, shape.dim, is_fp8=is_fp8)
                earlier = attention.CachedKeyValues(cached, ints(9))
                attention.flash_attention(*qkv, ints(3), ints(3), **options, cached=earlier)
                attention.write_kv_cache(*qkv[1:], cached, ints(99))
                for splits in (1, 16):
                    launch_paged(shape, cached, splits=splits, window=shape.window)
    launch_attention_options()


def launch_paged(shape: Heads, cached: LayerCache, **options: Any) -> None:
    query, out = reals(2, shape.heads, shape.dim), reals(2, shape.heads * shape.dim)
    paged.paged_attention(query, cached, ints(2, 10), ints(2), block_size=16, scale=0.1, out=out, **options)


def launch_attention_options() -> None:
    """Launch attention with key limits, distance biases, sinks, soft-capped scores, and the largest heads."""
    global current_model
    current_model = "MPNet and others"
    qkv = reals(99, 36, 64).split([12, 12, 12], dim=1)
    attention.short_attention(*qkv, ints(3), max_length=64, scale=0.1, causal=True, limits=ints(2))
    options = {"max_length": 99, "scale": 0.1}
    attention.flash_attention(*qkv, ints(3), ints(3), **options, causal=True, window=9, limits=ints(2))
    for bias in (DistanceBias(reals(12), 0), DistanceBias(reals(12, 257), 128)):
        attention.short_attention(*qkv, ints(3), max_length=9, scale=0.1, bias=bias)
        attention.flash_attention(*qkv, ints(3), **options, bias=bias)
    current_model = "gpt-oss"
    shape, sinks = Heads("gpt-oss", 64, 8, 64), reals(64, dtype=F32)
    cached = kv_cache(640, 8, 64)
    qkv = reals(99, 80, 64).split([64, 8, 8], dim=1)
    earlier = attention.CachedKeyValues(cached, ints(9))
    options |= {"causal": True, "window": 127, "sinks": sinks, "cached": earlier}
    attention.flash_attention(*qkv, ints(3), ints(3), **options)
    launch_paged(shape, cached, splits=4, sinks=sinks)
    current_model = "Gemma 2"
    cached = kv_cache(640, 4, 256)
    launch_paged(Heads("Gemma 2", 8, 4, 256), cached, splits=4, softcap=50.0)
    current_model = "heads of 512"
    qkv = reals(99, 6, 512).split([4, 1, 1], dim=1)
    cached = kv_cache(640, 1, 512)
    attention.flash_attention(*qkv, ints(3), max_length=99, scale=1.0)
    launch_paged(Heads("", 4, 1, 512), cached, splits=1)


def launch_sampling_kernels() -> None:
    global current_model
    current_model = "Qwen3"
    logits, table, work = reals(2, VOCABULARY), ints(3, 15), reals(2, VOCABULARY, dtype=F32)
    counts, masks, slots = ints(2, VOCABULARY), ints(2, 4748), ints(2)
    sampled_tokens.insert_sampled_tokens(ints(2), ints(2), ints(3))
    sampling.sample_tokens(logits, slots, table, ints(3))
    sampling.sample_tokens(logits, slots, table, ints(3), offsets=ints(2))
    sampling.accept_proposals(ints(2), ints(2), ints(1), slots, ints(3), ints(3))
    noted = {"counts": counts, "tails": table}
    sampling.sample_tokens(logits, slots.long(), table, ints(3), work=work, thresholds=work[0, :2], **noted)
    options = {"masks": masks, "counts": counts, "entries": ints(99), "tails": table}
    sampling.edit_logits(logits, slots, table, ints(3), work, **options)
    sampling.edit_logits(logits, slots, table, ints(3), work, entries=ints(99))
    sampling.logsumexp_and_ranks(logits, slots.long(), slots)
    logit_thresholds.logit_thresholds(work, slots, table)
    logit_thresholds.logit_thresholds(logits, slots, table, work=work)


def launch_adapter_kernels() -> None:
    """Launch with fused parts, an activation, DoRA gains, and both sizes of tiles."""
    for dtype in (torch.bfloat16, F32):
        for tile in (lora.SMALL_TILE, lora.LARGE_TILE):
            lines = lora.LineTiles(ints(80), ints(2, 3), tile)
            launch_adapters("bge-base", 768, (768, 1536, 2304), None, 16, lines, dtype)
            launch_adapters("bge-base", 768, (3072,), "gelu", 64, lines, dtype)
            launch_adapters("GritLM-7B", 4096, (4096, 5120, 6144), None, 64, lines, dtype)
            launch_adapters("GritLM-7B", 4096, (4096,), None, 256, lines, dtype)
            launch_adapters("GritLM-7B", 4096, (14336, 28672), "silu", 64, lines, dtype)
            outputs = reals(80, 3, dtype=dtype), reals(80, 768, dtype=dtype)
            replaced = reals(4, 3, 768, dtype=dtype), reals(4, 3, dtype=dtype)
            lora.replace_(*outputs, *replaced, ints(4), lines)


def launch_adapters(
    model: str,
    inputs: int,
    ends: tuple[int, ...],
    act: str | None,
    rank: int,
    lines: lora.LineTiles,
    dtype: torch.dtype,
) -> None:
    global current_model
    current_model = f"{model}, rank {rank}, {str(dtype).removeprefix('torch.')}"
    outputs, is_gated = ends[-1], act == "silu"
    pair = reals(4, len(ends) * rank, inputs, dtype=dtype), reals(4, outputs, rank, dtype=dtype)
    scaled = (reals(4, outputs, dtype=F32), reals(4, outputs, dtype=F32)) if len(ends) == 1 else (None, None)
    adapters = lora.LowRank(*pair, ints(4, len(ends)), ends, *scaled)
    low = lora.shrink(reals(80, inputs, dtype=dtype), adapters, lines, rank)
    given = reals(80, outputs, dtype=dtype)
    if is_gated:
        lora.expand_gated(given, low, adapters, lines, "silu", gate_first=True)
    else:
        lora.expand_(given, low, adapters, lines, act)


def launch_maxsim_kernels() -> None:
    global current_model
    for dtype in (torch.bfloat16, torch.int8, F32):
        for dim in (128, 320, 768):
            for query, document, pairs in ((32, 300, 1000), (32, 300, 5000), (1024, 1024, 100)):
                current_model = f"{dim} wide, {str(dtype).removeprefix('torch.')}"
                vectors = reals(query, dim, dtype=dtype), reals(document, dim, dtype=dtype)
                spans = ints(1), ints(1), ints(pairs), ints(pairs)
                maxsim.maxsim_triton(*vectors, *spans, max_query_length=query, max_document_length=document)


def launch_matmul_kernels(has_fp8: bool) -> None:
    global current_model
    current_model = "Qwen3-8B, block-FP8"
    for rows in (16, 32, 256, 1024, 2048) if has_fp8 else ():
        blockwise.block_matmul(reals(rows, 4096), blocks(6144, 4096))
    if has_fp8:
        blockwise.block_matmul(reals(1, 896), blocks(1152, 896), reals(1152))
    for rows in (16, 64, 128) if has_fp8 else ():
        current_model = f"Qwen3-8B, fp8, {rows} rows"
        x, weight = quantize.quantize_rows(reals(rows, 4096)), quantize.quantize_rows(reals(4096, 4096))
        few_rows.few_rows_matmul(x, weight, None, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):
        current_model = f"Qwen3-8B, 4-bit, {str(dtype).removeprefix('torch.')}"
        for groups, zeros in ((32, True), (32, False), (128, False), (256, True)):
            weight = int4_weight(6144, 4096, groups, zeros=zeros, dtype=torch.float16)
            for rows in (16, 32, 64) if zeros and groups == 32 else (16,):
                int4.int4_matmul(reals(rows, 4096, dtype=dtype), weight, reals(6144, dtype=dtype))
        int4.dequantize_int4(weight, reals(6144, 4096, dtype=dtype))


def launch_expert_kernels(has_fp8: bool) -> None:
    global current_model
    options: dict[str, Any] = {"chosen": 8, "normalize": True, "act": "silu"}
    logits = reals(20, 128)
    current_model = "Qwen3-30B-A3B, bf16"
    for _, tiling in experts.HALF_TILINGS:
        weights = reals(128, 1536, 2048), reals(128, 2048, 768)
        rows = reals(20, 2048)
        experts.run_experts(rows, logits, *weights, **options, plan=tiling, residual=rows)
    current_model = "Qwen3-30B-A3B, block-FP8"
    for _, tiling in experts.FP8_TILINGS if has_fp8 else ():
        quantized = blocks(128, 1536, 2048), blocks(128, 2048, 768)
        experts.run_experts(reals(20, 2048), logits, *quantized, **options, plan=tiling)
    current_model = "nomic-embed-v2-moe"
    plain = {"chosen": 2, "normalize": False, "act": "gelu", "gated": False, "bias": reals(768)}
    experts.run_experts(reals(20, 768), reals(20, 8), reals(8, 3072, 768), reals(8, 768, 3072), **plain)
    current_model = "Qwen3-30B-A3B"
    for tokens in (16, 64, 900):
        experts.route(reals(tokens, 128), 8, True, 16)


def launch_hopper_kernels() -> None:
    global current_model
    launch_fused_adapter_kernels()
    current_model = "GritLM-7B"
    gate_up.num_programs = lambda device: 132
    for act, half in (("gelu", torch.bfloat16), ("gelu_new", torch.float16), ("silu", torch.bfloat16)):
        gate_up.GateUp(reals(256, 64, dtype=half), act, True)(reals(5, 64, dtype=half))
    gate_up.GateUp(reals(256, 64, dtype=torch.float16), "relu", False)(reals(5, 64, dtype=torch.float16))


def launch_fused_adapter_kernels() -> None:
    """Launch with one and several slots in a pass, with an adapter for each half of a gate, and with both
    sizes of tiles."""
    global current_model
    current_model = "bge-base, adapters"
    lora_linear.num_programs = lambda device: 132
    for ends, act, gate_first, rank, cols in (
        ((128, 256, 384), None, None, 16, 128),
        ((256,), "gelu", None, 32, 256),
        ((128, 256), "silu", True, 16, 256),
    ):
        made = lora_linear.LoraLinear(reals(ends[-1], 64), reals(ends[-1]), ends, act, gate_first)
        pair = reals(4, len(ends) * rank, 64), reals(4, ends[-1], rank)
        made(reals(80, 64), lora.LowRank(*pair, ints(4, len(ends)), ends), ints(80), rank, cols=cols)


def launch_all(capability: tuple[int, int]) -> None:
    """Launch every kernel that runs on GPUs of this capability: fp8 from 8.9 on, Gluon only on Hopper."""
    has_fp8 = capability >= (8, 9)
    launches: tuple[Callable[[], None], ...] = (
        lambda: launch_element_wise_kernels(has_fp8),
        lambda: launch_rotary_kernels(has_fp8),
        launch_pooling_kernels,
        launch_adapter_kernels,
        lambda: launch_attention_kernels(has_fp8),
        launch_sampling_kernels,
        launch_maxsim_kernels,
        lambda: launch_matmul_kernels(has_fp8),
        lambda: launch_expert_kernels(has_fp8),
    )
    for launch in launches:
        launch()
    if capability == (9, 0):
        launch_hopper_kernels()

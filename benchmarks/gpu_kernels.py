"""Every kernel on one GPU: correctness compared with its reference, and time compared with torch.

    python benchmarks/gpu_kernels.py [--only norms,attentions,models] [--save]

Device times are medians of CUDA graph replays, so a kernel that cannot be captured shows as an error. Whole
models with random weights follow, with and without kernels. `--smoke` runs tiny shapes on any device (without
a GPU under TRITON_INTERPRET=1) and times nothing.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.pooling import PoolingSpec
from penstock.kernels import (
    activation,
    attention,
    embedding,
    gate_up,
    language,
    norm,
    output_quantize,
    pooling,
    rotary,
    splade,
)
from penstock.layers import attention as layer
from penstock.layers.build import LayerBuilder
from penstock.models.registry import build_model
from penstock.pooling.build import Pooler
from penstock.runner.inputs import pool_arrays, pool_batch, variant_arrays, variant_tensors
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolPlan, Request
from penstock.weights.stream import DummySource

BF16 = torch.bfloat16
Section = Callable[["Bench"], None]
SECTIONS: dict[str, Section] = {}
WAYS = ("kernels", "kernels + flash", "torch")

BERT = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
    "hidden_act": "gelu",
}
XLMR = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "max_position_embeddings": 8194,
    "vocab_size": 250002,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "layer_norm_eps": 1e-5,
}
GRIT = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "vocab_size": 32000,
    "sliding_window": None,
}
QWEN = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
}


def section(function: Section) -> Section:
    SECTIONS[function.__name__] = function
    return function


class Bench:
    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # Triton's interpreter cannot multiply bf16.
        self.half = BF16 if self.device.type == "cuda" else torch.float16
        self.lines: list[str] = []  # lines of the table, printed at the end
        self.generator = torch.Generator(device=self.device).manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator).to(dtype)

    def integers(self, high: int, count: int) -> Tensor:
        made = torch.randint(0, high, (count,), device=self.device, generator=self.generator)
        return made.to(torch.int32)

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.smoke else full

    def us(self, call: Callable[[], Any], calls: int = 10) -> float:
        """Device time of one call in microseconds."""
        if self.smoke:
            call()
            return 1.0
        graph = captured(call, calls)
        return statistics.median(replays_ms(graph)) * 1000 / calls

    def report(self, what: str, shape: str, times: dict[str, float], moved: int, error: float) -> None:
        """Add a line to the table. The first of `times` is the kernel; `moved` is the bytes that it moves."""
        ours = next(iter(times.values()))
        others = " · ".join(f"{name} {value:.1f}" for name, value in times.items())
        fastest_other = min(list(times.values())[1:], default=ours)
        line = f"| {what} | {shape} | {others} | {fastest_other / ours:.2f} × | {moved / ours / 1e3:,.0f} |"
        self.lines.append(line + f" {error:.1e} |")
        print(self.lines[-1], flush=True)


def captured(call: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def replays_ms(graph: torch.cuda.CUDAGraph, repeats: int = 9) -> list[float]:
    out = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        out.append(begin.elapsed_time(end))
    return out[2:]


def worst(got: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest value."""
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


@contextmanager
def kernels(on: bool) -> Iterator[None]:
    before = language._devices
    if not on:
        language.set_kernel_devices()
    try:
        yield
    finally:
        language.set_kernel_devices(*before)


@contextmanager
def own_attention(on: bool) -> Iterator[None]:
    """Use Penstock's kernel for rows of any length, not only for short ones."""
    before = layer._MAX_OWN_LENGTH
    layer._MAX_OWN_LENGTH = 1 << 20 if on else before
    try:
        yield
    finally:
        layer._MAX_OWN_LENGTH = before


@section
def launches(bench: Bench) -> None:
    """Host time of a launch. Eager steps pay it, CUDA graphs do not."""
    x, residual, weight = bench.random(4, 768), bench.random(4, 768), bench.random(768)
    qkv = bench.random(16, 36, 64, dtype=bench.half).split([12, 12, 12], dim=1)
    cu = torch.tensor([0, 8, 16], dtype=torch.int32, device=bench.device)
    calls: dict[str, Callable[[], Any]] = {
        "add": bound(torch.add, x, residual),
        "layer_norm": bound(F.layer_norm, x, (768,), weight, weight),
        "our add + norm": bound(norm.add_norm, x, residual, weight, weight, 1e-5, rms=False),
        "our short rows": bound(attention.short_attention, *qkv, cu, max_length=8, scale=0.1),
    }
    if bench.device.type == "cuda":
        calls["varlen_attn"] = bound(library, *qkv, cu, 8, False)
    for name, call in calls.items():
        for _ in range(bench.size(50, 1)):
            call()
        count, began = bench.size(300, 1), time.perf_counter()
        for _ in range(count):
            call()
        spent = (time.perf_counter() - began) / count * 1e6
        if bench.device.type == "cuda":
            torch.cuda.synchronize()
        print(f"  {name}: {spent:.1f} µs of the host's time")


@section
def norms(bench: Bench) -> None:
    for tokens, width, rms in (
        (2048, 768, False),
        (16000, 768, False),
        (16384, 1024, False),
        (16380, 4096, True),
    ):
        tokens = bench.size(tokens, 4)
        x, residual = bench.random(tokens, width), bench.random(tokens, width)
        weight = 1 + 0.1 * bench.random(width)
        bias = None if rms else bench.random(width)
        for keep in (False, True):
            _, expected = norm.add_norm_reference(
                x.float(),
                residual.float(),
                weight.float(),
                None if bias is None else bias.float(),
                1e-5,
                rms=rms,
            )

            def ours(
                x: Tensor = x, residual: Tensor = residual, w: Any = (weight, bias, rms, keep)
            ) -> Tensor:
                return norm.add_norm(x, residual, w[0], w[1], 1e-5, rms=w[2], keep=w[3])[1]

            def plain(x: Tensor = x, residual: Tensor = residual, w: Any = (weight, bias, rms)) -> Tensor:
                return norm.add_norm_reference(x, residual, w[0], w[1], 1e-5, rms=w[2])[1]

            error = worst(ours(x.clone()), expected)
            times = {"kernel": bench.us(ours), "torch": bench.us(plain)}
            name = ("RMS" if rms else "Layer") + ("Norm + sum kept" if keep else "Norm")
            bench.report(name, f"{tokens} × {width}", times, (3 + keep) * x.numel() * 2, error)
    x, residual, before, after = (bench.random(*s) for s in ((8, 768), (8, 768), (768,), (768,)))
    expected = norm.norm_add_norm_reference(x.float(), residual.float(), before.float(), after.float(), 1e-6)
    got = norm.norm_add_norm(x.clone(), residual, before, after, 1e-6)
    print("norm + sum + norm: error", max(worst(a, b) for a, b in zip(got, expected, strict=True)))


@section
def activations(bench: Bench) -> None:
    for tokens, width, inner in ((2048, 768, 3072), (16000, 768, 3072), (16384, 1024, 4096)):
        tokens = bench.size(tokens, 4)
        x, weight, bias = bench.random(tokens, width), bench.random(inner, width) * 0.02, bench.random(inner)
        raw = F.linear(x, weight)
        for act in ("gelu", "gelu_pytorch_tanh"):
            expected = activation.bias_act_reference(raw.float(), bias.float(), act)
            error = worst(activation.bias_act_(raw.clone(), bias, act), expected)
            work = raw.clone()
            times = {
                "kernel": bench.us(lambda: activation.bias_act_(work, bias, act)),  # noqa: B023
                "torch": bench.us(lambda: activation.act_reference(raw, act)),  # noqa: B023
            }
            bench.report(f"bias + {act}", f"{tokens} × {inner}", times, 2 * raw.numel() * 2, error)
        both: dict[str, Callable[[], Tensor]] = {
            "product, kernel": lambda: activation.bias_act_(F.linear(x, weight), bias, "gelu"),  # noqa: B023
            "product + bias, torch": lambda: F.gelu(F.linear(x, weight, bias)),  # noqa: B023
            "product alone": lambda: F.linear(x, weight),  # noqa: B023
            "product + bias": lambda: F.linear(x, weight, bias),  # noqa: B023
        }
        if bench.device.type == "cuda":
            both["library's GELU epilogue"] = bound(
                torch._addmm_activation, bias, x, weight.t(), use_gelu=True
            )
        times = {name: bench.us(call) for name, call in both.items()}
        shape = f"{tokens} × {width} → {inner}"
        bench.report("linear + GELU", shape, times, (x.numel() + weight.numel() + raw.numel()) * 2, 0.0)
        if "library's GELU epilogue" in both:
            epilogue = both["library's GELU epilogue"]().float()
            for act in ("gelu", "gelu_pytorch_tanh"):
                expected = activation.bias_act_reference(raw.float(), bias.float(), act)
                print(f"  the library's epilogue against {act}: {(epilogue - expected).abs().max():.2e}")
    for tokens, inner, act in ((16380, 14336, "silu"), (8192, 3072, "silu"), (16000, 1152, "gelu")):
        x = bench.random(bench.size(tokens, 4), 2 * inner)
        error = worst(
            activation.gated_activation(x, act, gate_first=True),
            activation.gated_activation_reference(x.float(), act, gate_first=True),
        )

        def plain(x: Tensor = x, act: str = act) -> Tensor:
            gate, up = x.chunk(2, dim=-1)
            return activation.act_reference(gate, act).mul_(up)

        times = {
            "kernel": bench.us(lambda: activation.gated_activation(x, act, gate_first=True)),  # noqa: B023
            "torch": bench.us(plain),
        }
        bench.report(f"{act} · up", f"{len(x)} × {inner}", times, 3 * len(x) * inner * 2, error)


@section
def gates(bench: Bench) -> None:
    """Gate and up projection with the activation in one kernel, compared with the library's product and a
    second pass."""
    shapes = {"GritLM-7B": (4096, 14336), "Qwen3-4B": (2560, 9728), "Qwen3-0.6B": (1024, 3072)}
    shapes |= {"ModernBERT-large": (1024, 2624), "nomic": (768, 3072), "ModernBERT-base": (768, 1152)}
    for name, (hidden, width) in shapes.items():
        weight = bench.random(2 * width, hidden) * hidden**-0.5
        made = gate_up.GateUp.of(weight, "silu", True)
        if made is None:
            print("  this device has no such kernel")
            return
        for tokens in (256, 512, 1024, 2048, 4096, 8192, 16384):
            x = bench.random(tokens, hidden)
            expected = gate_up.gate_up_reference(x, weight, "silu", True)
            times = {
                "kernel": bench.us(bound(made, x)),
                "product, activation": bench.us(
                    lambda: activation.gated_activation(F.linear(x, weight), "silu", True)  # noqa: B023
                ),
            }
            taken = "" if made.serves(x) else ", not taken"
            shape = f"{tokens} × {hidden} → 2 · {width}{taken}"
            moved = (x.numel() + weight.numel() + expected.numel()) * 2
            bench.report(f"gate · up, {name}", shape, times, moved, worst(made(x), expected))


@section
def rotations(bench: Bench) -> None:
    for tokens, queries, keys, dim, normed in (
        (16000, 12, 12, 64, False),
        (16380, 32, 8, 128, False),
        (512, 16, 8, 128, True),
        (8192, 16, 8, 128, True),
    ):
        tokens = bench.size(tokens, 4)
        qkv = bench.random(tokens, queries + 2 * keys, dim)
        angles = torch.rand(600, dim // 2, device=bench.device) * 6
        cos, sin, positions = angles.cos(), angles.sin(), bench.integers(600, tokens)
        norms = rotary.HeadNorms(bench.random(dim), bench.random(dim), 1e-6) if normed else None
        wide = None if norms is None else rotary.HeadNorms(norms.query.float(), norms.key.float(), 1e-6)
        picked = [table.index_select(0, positions)[:, None] for table in (cos, sin)]
        heads = (queries, keys)
        expected = rotary.rotate_qkv_reference(qkv.float(), heads, *picked, size=dim, norms=wide)
        got = rotary.rotate_qkv_(qkv.clone(), heads, positions, cos, sin, size=dim, norms=norms)
        error = max(worst(a, b) for a, b in zip(got, expected, strict=True))
        work, halves = qkv.clone(), [table.to(BF16) for table in picked]

        def ours(a: Any = (work, heads, positions, cos, sin), dim: int = dim, norms: Any = norms) -> Any:
            return rotary.rotate_qkv_(*a, size=dim, norms=norms)

        def plain(a: Any = (qkv, heads, *halves), dim: int = dim, norms: Any = norms) -> Any:
            return rotary.rotate_qkv_reference(*a, size=dim, norms=norms)

        times = {"kernel": bench.us(ours), "torch": bench.us(plain)}
        moved = 2 * tokens * (queries + keys) * dim * 2
        what = "head norms + rotary" if normed else "rotary"
        bench.report(what, f"{tokens} × ({queries} + {keys}) × {dim}", times, moved, error)


@section
def embeddings(bench: Bench) -> None:
    for tokens, width, vocabulary in ((2048, 768, 30522), (16000, 768, 30522), (16384, 1024, 250002)):
        tokens, vocabulary = bench.size(tokens, 4), bench.size(vocabulary, 50)
        words, places, types = (bench.random(rows, width) for rows in (vocabulary, 512, 2))
        layer_norm = (1 + 0.1 * bench.random(width), bench.random(width), 1e-12)
        given = (bench.integers(vocabulary, tokens), words, bench.integers(512, tokens), places, None, types)
        wide = (given[0], words.float(), given[2], places.float(), None, types.float())
        expected = embedding.embed_reference(*wide, (layer_norm[0].float(), layer_norm[1].float(), 1e-12))
        error = worst(embedding.embed(*given, layer_norm), expected)
        times = {
            "kernel": bench.us(lambda: embedding.embed(*given, layer_norm)),  # noqa: B023
            "torch": bench.us(lambda: embedding.embed_reference(*given, layer_norm)),  # noqa: B023
        }
        bench.report("embedding", f"{tokens} × {width}", times, 3 * tokens * width * 2, error)


@section
def pools(bench: Bench) -> None:
    for rows, length, width, method in (
        (64, 32, 768, "mean"),
        (4096, 8, 768, "mean"),
        (32, 500, 768, "mean"),
        (64, 256, 1024, "cls"),
        (64, 256, 1024, "mean"),
        (364, 45, 4096, "mean"),
        (1, 8192, 1024, "mean"),
    ):
        rows, length = bench.size(rows, 3), bench.size(length, 9)
        hidden = bench.random(rows * length, width)
        cu = torch.arange(rows + 1, dtype=torch.int32, device=bench.device) * length
        expected = pooling.pool_reference(hidden, cu, method, normalize=True)

        def ours(a: Any = (hidden, cu, method), length: int = length) -> Tensor:
            return pooling.pool(*a, max_length=length, normalize=True)

        def plain(hidden: Tensor = hidden, cu: Tensor = cu, method: str = method) -> Tensor:
            if method == "cls":
                return F.normalize(hidden.index_select(0, cu[:-1]).float(), dim=-1)
            sums = torch.segment_reduce(hidden.float(), "sum", offsets=cu, axis=0, unsafe=True)
            return F.normalize(sums / cu.diff()[:, None], dim=-1)

        times = {"kernel": bench.us(ours), "torch": bench.us(plain)}
        moved = (rows if method == "cls" else rows * length) * width * 2 + rows * width * 4
        bench.report(f"pool {method}", f"{rows} × {length} × {width}", times, moved, worst(ours(), expected))


@section
def sparse(bench: Bench) -> None:
    lengths = sorted(bench.integers(200, bench.size(32, 3)).add(5).tolist())
    width = bench.size(30522, 300)
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=bench.device)
    logits = bench.random(sum(lengths), width)
    expected = splade.splade_pool_reference(logits, cu, logs=1, reduce="max")
    error = worst(splade.splade_pool(logits, cu, logs=1, reduce="max"), expected)

    def plain() -> Tensor:
        parts = [part.amax(dim=0) for part in logits.split(lengths)]
        return splade.log1p_relu(torch.stack(parts), 1)

    times = {
        "kernel": bench.us(lambda: splade.splade_pool(logits, cu, logs=1, reduce="max")),
        "torch": bench.us(plain),
    }
    bench.report("SPLADE max", f"{len(logits)} × {width}", times, logits.numel() * 2, error)


@section
def casts(bench: Bench) -> None:
    vectors = bench.random(bench.size(4096, 4), 768, dtype=torch.float32)
    for name, ours, plain in (
        ("int8", output_quantize.to_int8, output_quantize.to_int8_reference),
        ("binary", output_quantize.to_binary, output_quantize.to_binary_reference),
    ):
        error = float((ours(vectors, True).int() - plain(vectors, True).int()).abs().max())
        times = {
            "kernel": bench.us(bound(ours, vectors, True)),
            "torch": bench.us(bound(plain, vectors, True)),
        }
        bench.report(f"to {name}", f"{len(vectors)} × 768", times, vectors.numel() * 5, error)


TILES = {
    64: ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2)),
    128: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2)),
}


@section
def attentions(bench: Bench) -> None:
    """Device microseconds per layer for every attention implementation. `flash` is the fastest of its
    tilings, which the table names."""
    for rows, length, heads, kv_heads, dim, causal in (
        (1, 32, 12, 12, 64, False),
        (64, 16, 12, 12, 64, False),
        (64, 32, 12, 12, 64, False),
        (256, 32, 12, 12, 64, False),
        (256, 64, 12, 12, 64, False),
        (364, 45, 32, 8, 128, False),
        (128, 128, 12, 12, 64, False),
        (64, 256, 16, 16, 64, False),
        (32, 500, 12, 12, 64, False),
        (4, 2048, 16, 16, 64, False),
        (16, 512, 16, 8, 128, True),
        (364, 45, 16, 8, 128, True),
    ):
        rows, length = bench.size(rows, 2), bench.size(length, min(length, 40))
        fused = bench.random(rows * length, heads + 2 * kv_heads, dim, dtype=bench.half)
        query, key, value = fused.split([heads, kv_heads, kv_heads], dim=1)
        cu = torch.arange(rows + 1, dtype=torch.int32, device=bench.device) * length
        options = {"max_length": length, "scale": dim**-0.5, "causal": causal}
        expected = padded(query, key, value, rows, causal, torch.float32)
        routes: dict[str, Callable[[], Tensor]] = {}
        args = (query, key, value, cu)
        if length <= attention.MAX_SHORT_LENGTH:
            for warps in (1, 2, 4) if length > 16 else (1, 2):
                routes[f"short/{warps}w"] = bound(attention.short_attention, *args, **options, warps=warps)
        for tiles in TILES[dim]:
            if (not bench.smoke or tiles is TILES[dim][0]) and (length > 32 or tiles[0] == 64):
                name = "flash/" + "-".join(map(str, tiles))
                routes[name] = bound(
                    attention.flash_attention, *args, **options, tiles=attention.FlashTiling(*tiles)
                )
        if bench.device.type == "cuda":
            routes["varlen_attn"] = bound(library, *args, length, causal)
            for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
                routes[f"padded {name.split('_')[0].lower()}"] = bound(with_backend, name, args, rows, causal)
        times: dict[str, float] = {}
        errors: dict[str, float] = {}
        for name, call in routes.items():
            try:
                errors[name], times[name] = worst(call(), expected), bench.us(call)
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:200]}")
        shape = f"{rows} × {length}, {heads}/{kv_heads} × {dim}{' causal' if causal else ''}"
        print(f"  {shape}: " + " · ".join(f"{n} {t:.1f} ({errors[n]:.0e})" for n, t in times.items()))
        kinds: dict[str, tuple[float, str]] = {}
        for name, spent in times.items():
            kind = name.split("/")[0]
            kinds[kind] = min(kinds.get(kind, (spent, name)), (spent, name))
        ours = sorted(k for k in kinds if k in ("short", "flash"))
        ordered = sorted(ours, key=lambda k: kinds[k]) + [k for k in kinds if k not in ours]
        named = {kinds[k][1]: kinds[k][0] for k in ordered}
        moved = rows * length * (2 * heads + 2 * kv_heads) * dim * 2
        bench.report("attention", shape, named, moved, errors[next(iter(named))])


def bound(call: Callable[..., Tensor], *args: Any, **options: Any) -> Callable[[], Tensor]:
    return lambda: call(*args, **options)


def padded(query: Tensor, key: Tensor, value: Tensor, rows: int, causal: bool, dtype: torch.dtype) -> Tensor:
    """Attention of torch's library over rows of equal length, as one dense block."""
    q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2).to(dtype) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1])
    return out.transpose(1, 2).flatten(0, 1).flatten(1)


def with_backend(name: str, args: tuple[Tensor, ...], rows: int, causal: bool) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, name)):
        return padded(*args[:3], rows, causal, BF16)


def library(query: Tensor, key: Tensor, value: Tensor, cu: Tensor, length: int, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    from penstock.layers.attention import _gqa_flag

    window = (-1, 0) if causal else (-1, -1)
    grouped = _gqa_flag(grouped=key.shape[1] != query.shape[1])
    out = varlen_attn(query, key, value, cu, cu, length, length, window_size=window, **grouped)
    assert isinstance(out, Tensor)
    return out.flatten(1)


class Rounded(DummySource):
    """Weights in fp32, rounded to bf16 values."""

    def read(self, name: str, shape: Any) -> Tensor:
        self.dtype = BF16
        try:
            return super().read(name, shape)
        finally:
            self.dtype = torch.float32


def make_runner(architecture: str, config: dict[str, Any], device: torch.device, source: Any) -> ModelRunner:
    with torch.inference_mode():
        model = build_model(architecture, config, LayerBuilder(source))
        spec = SimpleNamespace(
            pooling=PoolingSpec(("mean",), normalize=True),
            config={},
            sparse=None,
            late=None,
            score=None,
            multi_vector=None,
        )
        return ModelRunner(model, Pooler(spec, model.heads, []), device, 2)  # type: ignore[arg-type]


def plan_of(lengths: list[int], vocabulary: int) -> PoolPlan:
    tokens = np.random.default_rng(0).integers(5, vocabulary, sum(lengths)).astype(np.int32)
    request = Request("bench", tokens, np.array(lengths, dtype=np.int32))
    return build_plan([ScheduledRows(request, np.arange(len(lengths), dtype=np.int32))])


def least_cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.float(), b.float(), dim=-1).min())


@section
def models(bench: Bench) -> None:
    """Whole steps, eager (with launches) and as a graph (device only), with and without kernels."""
    cases: tuple[tuple[str, str, dict[str, Any], tuple[tuple[int, int], ...]], ...] = (
        ("BERT-base", "BertModel", BERT, ((1, 32), (64, 32), (64, 256), (32, 500))),
        ("XLM-R-large", "XLMRobertaModel", XLMR, ((1, 32), (64, 32), (64, 256), (32, 500))),
        ("Qwen3-0.6B", "Qwen3Model", QWEN, ((1, 512), (16, 512))),
        ("GritLM-7B", "GritLM", GRIT, ((1, 32), (364, 45))),
    )
    for name, architecture, config, shapes in cases:
        try:
            if bench.smoke:
                small = {
                    "num_hidden_layers": 1,
                    "hidden_size": 128,
                    "intermediate_size": 64,
                    "vocab_size": 99,
                }
                small |= {"num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 64}
                config, shapes = config | small | {"num_key_value_heads": 2}, ((2, 5),)
            _model(bench, name, architecture, config, shapes)
        except Exception:
            traceback.print_exc(limit=-4)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _model(
    bench: Bench, name: str, architecture: str, config: dict[str, Any], shapes: tuple[tuple[int, int], ...]
) -> None:
    began = time.perf_counter()
    runner = make_runner(architecture, config, bench.device, DummySource(0, BF16, bench.device))
    mixed = plan_of([3, 9, 17, 17, 40, 64, 65, 130, 300][: bench.size(9, 4)], config["vocab_size"])
    with kernels(True):
        fast = runner.forward(mixed)[0].clone()
    with kernels(False):
        plain = runner.forward(mixed)[0].clone()
    print(f"{name}: rows of 3 … 300 tokens, least cosine of kernels to torch {least_cosine(fast, plain):.6f}")
    if config["hidden_size"] <= 1024:
        exact_runner = make_runner(
            architecture, config, bench.device, Rounded(0, torch.float32, bench.device)
        )
        with kernels(False):
            exact = exact_runner.forward(mixed)[0]
        both = [least_cosine(x, exact) for x in (fast, plain)]
        print(f"  to the same weights in fp32: kernels {both[0]:.6f}, torch {both[1]:.6f}")
        del exact_runner
    for rows, length in shapes:
        plan = plan_of([length] * rows, config["vocab_size"])
        found = {}
        for way in WAYS if length > attention.MAX_SHORT_LENGTH else ("kernels", "torch"):
            with kernels(way != "torch"), own_attention(way == "kernels + flash"):
                vectors = runner.forward(plan)[0].clone()
                found[way] = (vectors, *_step_ms(bench, runner, plan))
        cosine = min(least_cosine(found[way][0], found["torch"][0]) for way in found)
        cells = " · ".join(f"{way} {at[1]:.2f} eager, {at[2]:.2f} graph" for way, at in found.items())
        ratio = found["torch"][2] / min(at[2] for at in found.values())
        line = f"| {name} | step {rows} × {length} | {cells} ms | {ratio:.2f} × | | cos {cosine:.5f} |"
        bench.lines.append(line)
        print(line, flush=True)
    print(f"  {name} took {time.perf_counter() - began:.1f} s", flush=True)


@torch.inference_mode()
def step_of(runner: ModelRunner, plan: PoolPlan) -> Callable[[], list[Tensor]]:
    """A step whose integers are already on the device, as in a captured graph."""
    sent = iter(runner.staging.send(pool_arrays(plan, None) + variant_arrays(plan.variants)))
    batch = pool_batch(plan, None, None, sent)
    variants = variant_tensors(plan.variants, sent)

    @torch.inference_mode()
    def step() -> list[Tensor]:
        return runner.pooler(runner.model(batch), batch, plan.variants, variants)

    return step


def _step_ms(bench: Bench, runner: ModelRunner, plan: PoolPlan) -> tuple[float, float]:
    """(eager, as a graph), in milliseconds."""
    if bench.device.type != "cuda":
        step_of(runner, plan)()
        return 1.0, 1.0
    for _ in range(2):
        runner.launch(plan).result()
    eager = statistics.median(runner.launch(plan).result().device_s * 1000 for _ in range(9))
    with torch.inference_mode():
        try:
            graph = captured(step_of(runner, plan), 1)
        except Exception as error:
            print(f"  no graph: {type(error).__name__}: {str(error)[:200]}")
            return eager, float("nan")
        return eager, statistics.median(replays_ms(graph))


def allow_loaded_bounds() -> None:
    """Triton's interpreter converts a loop bound to int in a way that NumPy 2.4 no longer allows."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    usual = list(SECTIONS)
    parser.add_argument("--only", default=",".join(usual), help=f"comma-separated, of {', '.join(SECTIONS)}")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.smoke)
    if options.smoke and language.IS_INTERPRETED:
        language.set_kernel_devices("cpu")
        allow_loaded_bounds()
    for name in options.only.split(","):
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                SECTIONS[name](bench)
        except Exception:
            traceback.print_exc(limit=-4)
        print(f"-- {name}: {time.perf_counter() - began:.1f} s", flush=True)
    head = ["| what | shape | µs (models: ms) | gain | GB/s | error |", "|---|---|---|---|---|---|"]
    print("\n".join(["", *head, *bench.lines]))
    if options.save:
        where = (
            f"{torch.cuda.get_device_name()} · Python {platform.python_version()} · torch {torch.__version__}"
        )
        text = [
            f"# Fused kernels\n\n{date.today()} · {where}\n",
            "`python benchmarks/gpu_kernels.py --save`\n",
        ]
        target = Path(__file__).parent / "results" / "gpu_kernels.md"
        target.write_text("\n".join([*text, *head, *bench.lines]) + "\n")


if __name__ == "__main__":
    main()

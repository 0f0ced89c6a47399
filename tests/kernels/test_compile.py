"""What the interpreter lets pass the compiler may refuse. Compiling for a GPU needs none."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import torch
torch.cuda.is_available = lambda: True  # only so that the kernels are defined
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from penstock.kernels import activation, attention, blockwise, cast, embedding, experts, feed, gate_up
from penstock.kernels import language, norm, paged, pooling, quantize, rotary, sampling, splade, thresholds

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int8: "*i8"}
TYPES[torch.float8_e4m3fn] = "*fp8e4nv"
TYPES[torch.int64], TYPES[torch.float16] = "*i64", "*fp16"
language.switch("cpu")
compiled = []

class Compiler:
    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, num_warps, num_stages=3, maxnreg=None, **constants):
        values = dict(zip(self.function.arg_names, args)) | constants
        signature, fixed = {}, {}
        for parameter in self.function.params:
            value = values[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], fixed[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
            elif hasattr(value, "block_shape"):
                kind = TYPES[value.base.dtype][1:]
                signature[parameter.name] = f"tensordesc<{kind}{value.block_shape},{value.layout}>"
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        source = (GluonASTSource if self.function.is_gluon() else ASTSource)(self.function, signature, fixed)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        compiled.append(self.function.__name__)

kernels, helpers = set(), {"_activated", "_key_tile", "_squashed", "_philox", "_gumbel", "_penalized", "_key"}
helpers |= {"as_float", "read_row", "_of_key", "_weight", "_source", "store_quantized", "quantized_group"}
helpers |= {"_dot", "_scaled_dot", "_write_order", "_write_tiles", "_act", "_corner", "_copy", "_multiply"}
modules = (activation, attention, cast, embedding, norm, pooling, quantize, rotary, sampling, splade)
modules += (feed, paged, thresholds, blockwise, experts, gate_up)
for module in modules:
    for name, value in list(vars(module).items()):
        if isinstance(value, triton.runtime.jit.JITFunction) and name not in helpers:
            kernels.add(name)
            setattr(module, name, Compiler(value))

def x(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)

def i(count):
    return torch.zeros(count, dtype=torch.int32)

for act in ("gelu", "gelu_new", "silu", "relu"):
    activation.bias_act_(x(2, 3072), x(3072), act)
activation.gated(x(2, 2304), "gelu", True)
norm.add_norm(x(2, 768), x(2, 768), x(768), x(768), 1e-12, rms=False, keep=False)
norm.add_norm(x(2, 4096), x(2, 4096), x(4096), None, 1e-6, rms=True)
norm.norm_add_norm(x(2, 768), x(2, 768), x(768), x(768), 1e-6)
quantize.quantize(x(2, 4096))
activation.bias_act_quantized(x(2, 3072), x(3072), "gelu")
activation.gated_quantized(x(2, 28672), "silu", True)
norm.add_norm_quantized(x(2, 4096), x(2, 4096), x(4096), None, 1e-6, rms=True)
norm.add_norm_quantized(x(2, 768), x(2, 768), x(768), x(768), 1e-12, rms=False, post=True)
norm.norm_add_norm_quantized(x(2, 768), x(2, 768), x(768), x(768), 1e-6)
tables = x(9, 64, dtype=torch.float32), x(9, 64, dtype=torch.float32)
norms = rotary.HeadNorms(x(128), x(128), 1e-6)
rotary.rotate_fused_(x(2, 32, 128), (16, 8), i(2), *tables, size=128, norms=norms)
memory = rotary.Keep(x(4, 8, 128), x(4, 8, 128), i(2))
rotary.rotate_fused_(x(2, 32, 128), (16, 8), i(2), *tables, size=128, norms=norms, keep=memory)
rotary.rotate_fused_(x(2, 9, 128), (3, 3), i(2), *tables, size=64, interleaved=True)
embedding.embed(i(2), x(9, 768), i(2), x(9, 768), i(2), x(2, 768), (x(768), x(768), 1e-12))
for method in pooling.METHODS:
    pooling.pool(x(9, 768), i(2), method, max_length=9, skip=i(1), normalize=True)
pooling.pool(x(9, 768), i(2), "mean", max_length=900, chosen=i(1), dims=100, normalize=True)
pooling.unit(x(9, 128), i(4), torch.float16)
pooling.put(x(9, 128), i(4), x(30, 128), i(4))
cast.to_bytes(x(2, 768, dtype=torch.float32), True)
cast.to_bits(x(2, 768, dtype=torch.float32), True)
for reduce in ("max", "sum"):
    splade.reduce_rows(x(9, 30522), i(2), logs=2, reduce=reduce)
for heads, kv_heads, dim in ((12, 12, 64), (8, 2, 128), (4, 4, 96)):
    qkv = x(99, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)
    for length in (16, 32, 64):
        attention.short_rows(*qkv, i(2), max_length=length, scale=0.1, causal=True, limits=i(1))
    attention.flash_rows(*qkv, i(2), max_length=99, scale=0.1)
    old = x(9, kv_heads, dim), x(9, kv_heads, dim)
    attention.keep_rows(*qkv[1:], *old, i(99))
    remembered = attention.Remembered(*old, i(9))
    for window in (None, 9):
        attention.flash_rows(
            *qkv, i(2), i(2), max_length=99, scale=0.1, causal=True, window=window, remembered=remembered
        )
    attention.flash_rows(*qkv, i(2), i(2), max_length=99, scale=0.1, causal=True, window=9, limits=i(1))
    where = x(640, kv_heads, dim), x(640, kv_heads, dim), i(20).view(2, 10), i(2)
    for splits, more in ((1, {}), (4, {"window": 50, "softcap": 30.0})):
        out = x(2, heads * dim)
        paged.paged_rows(x(2, heads, dim), *where, block_size=16, scale=0.1, out=out, splits=splits, **more)
wide = x(99, 8, 256).split([4, 2, 2], dim=1)
remembered = attention.Remembered(x(9, 2, 256), x(9, 2, 256), i(9))
attention.flash_rows(*wide, i(2), i(2), max_length=99, scale=0.1, causal=True, remembered=remembered)
feed.feed_tokens(i(2), i(2), i(3))
logits, table, work = x(2, 151936), i(45).view(3, 15), x(2, 151936, dtype=torch.float32)
counts, masks, slots = i(2 * 151936).view(2, -1), i(2 * 4748).view(2, -1), i(2)
sampling.choose(logits, slots, table, i(3))
noted = {"counts": counts, "tails": table}
sampling.choose(logits, slots.long(), table, i(3), work=work, thresholds=work[0, :2], **noted)
sampling.edit(logits, slots, table, i(3), work, masks=masks, counts=counts, entries=i(99), tails=table)
sampling.edit(logits, slots, table, i(3), work, entries=i(99))
sampling.logsum(logits, slots.long(), slots)
for one in (logits, work):
    thresholds.thresholds(one, slots, table)
    thresholds.thresholds(one, slots, table, work=work)
def blocks(*shape):
    scales = [*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)]
    return blockwise.Blocks(x(*shape, dtype=torch.float8_e4m3fn), x(*scales, dtype=torch.float32))

for tokens in (1, 32, 100, 1000, 2000):
    blockwise.block_product(x(tokens, 256), blocks(512, 256), x(512))
options = {"chosen": 8, "normalize": True, "act": "silu"}
for half, fp8 in zip(experts.HALF_PLANS, experts.FP8_PLANS):
    own = x(32, 512, 256), x(32, 256, 256)
    experts.run_experts(x(20, 256), x(20, 32), *own, **options, plan=half[1], residual=x(20, 256))
    own = blocks(32, 512, 256), blocks(32, 256, 256)
    experts.run_experts(x(20, 256), x(20, 32), *own, **options, plan=fp8[1])
experts.route(x(900, 128), 8, True, 16)
gate_up._programs = lambda device: 132
for act in ("gelu", "gelu_new", "silu", "relu"):
    for half in (torch.bfloat16, torch.float16):
        gate_up.GateUp(x(256, 64, dtype=half), act, act != "relu")(x(5, 64, dtype=half))
missed = kernels - set(compiled)
assert not missed, missed
print(len(compiled))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-"], input=SCRIPT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr[-3000:]

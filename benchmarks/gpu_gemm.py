"""Compare cuBLASLt's algorithms with the one that torch chooses, for the matrix products of a model.

    python benchmarks/gpu_gemm.py [--tokens 4096,8192] [--model gritlm-7b|xlmr-large]

For each product, the library's heuristic returns candidates. They take turns with torch's choice on a warm
device, because the clock rate depends on the power draw. Figures are medians over the turns. The library is
called directly (ctypes), with the same workspace for all. Products shorter than a launch from Python give no
information.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

PRODUCTS = {  # outputs, inputs
    "gritlm-7b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "xlmr-large": ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)),
}
COUNT = 12  # candidates
WORKSPACE = 64 << 20
# Constants from the headers of cuBLASLt.
COMPUTE_32F, REAL_32F, REAL_16BF = 68, 0, 14
DESC_TRANSA, DESC_EPILOGUE, DESC_BIAS = 3, 7, 8
EPILOGUE_BIAS, PREFERENCE_WORKSPACE = 4, 1


class Candidate(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Library:
    """The cuBLASLt that torch has loaded."""

    def __init__(self) -> None:
        one = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
        torch.addmm(one[0], one, one)  # makes torch load the library
        maps = Path("/proc/self/maps").read_text().splitlines()
        path = next(line.split()[-1] for line in maps if "libcublasLt.so" in line)
        self.calls = ctypes.CDLL(path)
        self.handle = c_void_p()
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self("Create", byref(self.handle))

    def __call__(self, name: str, *args: object) -> None:
        if status := getattr(self.calls, f"cublasLt{name}")(*args):
            raise RuntimeError(f"cublasLt{name} gave {status}")


class Product:
    """x [tokens, inputs] · weightᵀ + bias, with a chosen algorithm."""

    def __init__(self, library: Library, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        (tokens, inputs), outputs = x.shape, len(weight)
        self.library, self.x, self.weight, self.bias = library, x, weight, bias
        self.out = torch.empty(tokens, outputs, device="cuda", dtype=torch.bfloat16)
        self.one, self.zero = c_float(1), c_float(0)
        self.kind = c_void_p()
        library("MatmulDescCreate", byref(self.kind), COMPUTE_32F, REAL_32F)
        self._set(DESC_TRANSA, c_int(1))
        if bias is not None:
            self._set(DESC_EPILOGUE, c_int(EPILOGUE_BIAS))
            self._set(DESC_BIAS, c_void_p(bias.data_ptr()))
        # The library is column-major: [tokens, n] of torch is n × tokens there.
        self.layouts = [
            self._layout(*shape) for shape in ((inputs, outputs), (inputs, tokens), (outputs, tokens))
        ]
        preference, limit, found = c_void_p(), c_size_t(WORKSPACE), c_int()
        library("MatmulPreferenceCreate", byref(preference))
        library("MatmulPreferenceSetAttribute", preference, PREFERENCE_WORKSPACE, byref(limit), 8)
        candidates = (Candidate * COUNT)()
        a, b, c = self.layouts
        asked = (library.handle, self.kind, a, b, c, c, preference, COUNT, candidates, byref(found))
        library("MatmulAlgoGetHeuristic", *asked)
        self.candidates = [each for each in candidates[: found.value] if each.state == 0]

    def _set(self, attribute: int, value: ctypes._SimpleCData[object]) -> None:
        size = ctypes.sizeof(value)
        self.library("MatmulDescSetAttribute", self.kind, attribute, byref(value), c_size_t(size))

    def _layout(self, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        args = (c_uint64(rows), c_uint64(columns), c_int64(rows))
        self.library("MatrixLayoutCreate", byref(layout), REAL_16BF, *args)
        return layout

    def run(self, candidate: Candidate) -> None:
        a, b, c = self.layouts
        out = c_void_p(self.out.data_ptr())
        self.library(
            "Matmul",
            *(self.library.handle, self.kind, byref(self.one), c_void_p(self.weight.data_ptr()), a),
            *(c_void_p(self.x.data_ptr()), b, byref(self.zero), out, c, out, c, byref(candidate.algorithm)),
            *(c_void_p(self.library.workspace.data_ptr()), c_size_t(WORKSPACE)),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def by_torch(self) -> Tensor:
        if self.bias is None:
            return torch.mm(self.x, self.weight.t())
        return torch.addmm(self.bias, self.x, self.weight.t())


def timed(work: Callable[[], object], seconds: float) -> float:
    """Milliseconds per call, from back-to-back calls for this many seconds."""
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    work()
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    count = max(4, int(seconds * 1000 / max(begin.elapsed_time(end), 0.005)))
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def heat(product: Product, seconds: float = 1.0) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            product.by_torch()
        torch.cuda.synchronize()


def compare(library: Library, model: str, tokens: int, turns: int, seconds: float) -> None:
    totals = [0.0, 0.0]
    for outputs, inputs in PRODUCTS[model]:
        x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
        bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16) if model == "xlmr-large" else None
        product = Product(library, x, weight, bias)
        heat(product)
        ways = [product.by_torch, *(partial(product.run, each) for each in product.candidates)]
        rounds = [[timed(way, seconds) for way in ways] for _ in range(turns)]
        torchs, *medians = (statistics.median(times) for times in zip(*rounds, strict=True))
        best = min(range(len(medians)), key=medians.__getitem__)
        product.run(product.candidates[best])
        torch.testing.assert_close(product.out, product.by_torch(), atol=0.05, rtol=0.05)
        won = sum(times[best + 1] < times[0] for times in rounds)
        totals = [totals[0] + torchs, totals[1] + medians[best]]
        rate = 2e-9 * tokens * outputs * inputs / torchs
        print(
            f"| {model} {inputs} → {outputs} | {tokens:,} | {torchs:.3f} ({rate:.0f}) | {medians[best]:.3f} "
            f"| {torchs / medians[best] - 1:+.1%}, in {won} of {turns} turns "
            f"| {medians[0]:.3f}; {min(medians):.3f}–{max(medians):.3f} of {len(medians)} |",
            flush=True,
        )
    gain = totals[0] / totals[1] - 1
    print(f"| {model}, all | {tokens:,} | {totals[0]:.3f} | {totals[1]:.3f} | {gain:+.1%} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--model", choices=PRODUCTS, help="default: all")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.08, help="time for each algorithm per turn")
    options = parser.parse_args()
    library = Library()
    print("| product | tokens | torch ms (TFLOP/s) | best candidate ms | gain | the first; all |")
    print("|---|---|---|---|---|---|")
    with torch.inference_mode():
        for model in PRODUCTS if options.model is None else (options.model,):
            for tokens in map(int, options.tokens.split(",")):
                compare(library, model, tokens, options.turns, options.seconds)
    if shutil.which("nvidia-smi"):
        wanted = "power.draw,power.limit,clocks.sm,clocks.max.sm,temperature.gpu"
        query = ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader"]
        print(subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip())


if __name__ == "__main__":
    main()

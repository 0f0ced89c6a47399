"""fp8 compared with bfloat16 on one GPU: products, the passes around them, whole models, and accuracy.

    python benchmarks/gpu_fp8.py [--only products,passes,models,accuracy] [--save PATH]

Device times are medians of CUDA graph replays. `--smoke` runs tiny shapes on any device (without a GPU
under TRITON_INTERPRET=1) and times nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_kernels import BERT, GRIT, Rounded, allow_loaded_bounds, captured, plan_of, replays_ms, step_of
from texts import natural_texts
from torch import Tensor

from penstock import Engine
from penstock.checkpoint.pooling import PoolingSpec
from penstock.kernels import language
from penstock.kernels.activation import (
    bias_act_,
    bias_act_quantized,
    gated_activation,
    gated_activation_quantized,
)
from penstock.kernels.norm import add_norm, add_norm_quantized
from penstock.kernels.quantize import quantize_rows
from penstock.layers.build import LayerBuilder
from penstock.layers.fp8 import Fp8Linear
from penstock.models.registry import build_model
from penstock.pooling.build import Pooler
from penstock.runner.model_runner import ModelRunner
from penstock.types import PoolPlan
from penstock.weights.stream import DummySource, WeightSource

BF16 = torch.bfloat16
PRODUCTS = {
    "GritLM-7B": {"qkv": (4096, 6144), "out": (4096, 4096), "gate, up": (4096, 28672), "down": (14336, 4096)},
    "BERT-base": {"qkv": (768, 2304), "out": (768, 768), "up": (768, 3072), "down": (3072, 768)},
}
TOKENS = (512, 4096, 8192, 16384)
SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}


class Bench:
    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.dtype = torch.float32 if smoke else BF16
        self.lines: list[str] = []  # lines of the tables, printed at the end

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype)

    def ms(self, call: Callable[[], Any], calls: int = 3) -> float:
        if self.smoke:
            call()
            return 1.0
        return statistics.median(replays_ms(captured(call, calls), repeats=7)) / calls

    def head(self, *names: str) -> None:
        self.lines += ["", f"| {' | '.join(names)} |", "|" + "---|" * len(names)]

    def row(self, *cells: str) -> None:
        self.lines.append(f"| {' | '.join(cells)} |")
        print(self.lines[-1], flush=True)


def products(bench: Bench) -> None:
    """One product alone, with a quantising pass before it, and with rows that are already quantised."""
    bench.head(
        "product", "tokens", "bf16 ms (TFLOP/s)", "quantise + fp8 ms (TFLOP/s)", "fp8 alone ms (TFLOP/s)", "×"
    )
    for model, shapes in PRODUCTS.items():
        for name, (inputs, outputs) in shapes.items():
            if bench.smoke:
                inputs, outputs = 64, 32
            for tokens in (4,) if bench.smoke else TOKENS:
                _product(bench, f"{model} {name}", tokens, inputs, outputs)


def _product(bench: Bench, name: str, tokens: int, inputs: int, outputs: int) -> None:
    weight, x = bench.random(outputs, inputs, scale=inputs**-0.5), bench.random(tokens, inputs)
    layer, made = Fp8Linear(weight, None), quantize_rows(x)
    times = [
        bench.ms(lambda: F.linear(x, weight)),
        bench.ms(lambda: layer(x)),
        bench.ms(lambda: layer(made)),
    ]
    work = 2 * tokens * inputs * outputs
    cells = [f"{ms:.3f} ({work / ms / 1e9:,.0f})" for ms in times]
    bench.row(f"{name} {inputs} → {outputs}", f"{tokens:,}", *cells, f"{times[0] / times[2]:.2f}")


def passes(bench: Bench) -> None:
    """Time that quantising adds to an existing pass over memory, and as a separate pass."""
    bench.head("pass", "tokens × width", "bf16 ms", "then quantised, ms", "fp8 in one, ms")
    for tokens, width, inner, rms in ((16380, 4096, 14336, True), (16384, 768, 3072, False)):
        if bench.smoke:
            tokens, width, inner = 4, 64, 96
        _norm(bench, tokens, width, rms)
        _gate(bench, tokens, inner) if rms else _gelu(bench, tokens, inner)
        x = bench.random(tokens, width)
        bench.row(
            "quantise alone", f"{tokens:,} × {width}", "", f"{bench.ms(partial(quantize_rows, x)):.3f}", ""
        )


def _norm(bench: Bench, tokens: int, width: int, rms: bool) -> None:
    weight = bench.random(width)
    args = (bench.random(tokens, width), bench.random(tokens, width), weight, None if rms else weight, 1e-5)
    times = (
        bench.ms(lambda: add_norm(*args, rms=rms, keep=rms)),
        bench.ms(lambda: quantize_rows(add_norm(*args, rms=rms, keep=rms)[1])),
        bench.ms(lambda: add_norm_quantized(*args, rms=rms, post=not rms)),
    )
    name = f"residual + {'RMS' if rms else 'layer'} norm"
    bench.row(name, f"{tokens:,} × {width}", *(f"{ms:.3f}" for ms in times))


def _gate(bench: Bench, tokens: int, width: int) -> None:
    x = bench.random(tokens, 2 * width)
    times = (
        bench.ms(lambda: gated_activation(x, "silu", True)),
        bench.ms(lambda: quantize_rows(gated_activation(x, "silu", True))),
        bench.ms(lambda: gated_activation_quantized(x, "silu", True)),
    )
    bench.row("SwiGLU", f"{tokens:,} × {width}", *(f"{ms:.3f}" for ms in times))


def _gelu(bench: Bench, tokens: int, width: int) -> None:
    x, bias = bench.random(tokens, width), bench.random(width)
    times = (
        bench.ms(lambda: bias_act_(x, bias, "gelu")),
        bench.ms(lambda: quantize_rows(bias_act_(x, bias, "gelu"))),
        bench.ms(lambda: bias_act_quantized(x, bias, "gelu")),
    )
    bench.row("bias + GELU", f"{tokens:,} × {width}", *(f"{ms:.3f}" for ms in times))


def make_runner(
    architecture: str, config: dict[str, Any], source: WeightSource, quantization: str | None
) -> ModelRunner:
    spec = SimpleNamespace(
        pooling=PoolingSpec(("mean",), normalize=True),
        config={},
        sparse=None,
        late=None,
        score=None,
        multi_vector=None,
    )
    with torch.inference_mode():
        model = build_model(architecture, config, LayerBuilder(source, quantization))
        return ModelRunner(model, Pooler(spec, model.heads, []), source.device, 2)  # type: ignore[arg-type]


def step_ms(bench: Bench, runner: ModelRunner, plan: PoolPlan) -> tuple[float, float]:
    """(eager, as a graph), in milliseconds."""
    for _ in range(2):
        runner.launch(plan).result()
    eager = statistics.median(runner.launch(plan).result().device_s * 1000 for _ in range(5))
    if bench.smoke:
        step_of(runner, plan)()
        return eager, eager
    with torch.inference_mode():
        graph = captured(step_of(runner, plan), 1)
        return eager, statistics.median(replays_ms(graph, repeats=5))


def models(bench: Bench) -> None:
    bench.head("step", "precision", "eager ms", "graph ms", "tok/s (graph)", "weights GB", "build s")
    cases: tuple[tuple[str, str, dict[str, Any], tuple[tuple[int, int], ...]], ...] = (
        ("GritLM-7B", "GritLM", GRIT, ((364, 45), (180, 45), (11, 45))),
        ("BERT-base", "BertModel", BERT, ((64, 256), (512, 32))),
    )
    for name, architecture, config, shapes in cases:
        if bench.smoke:
            config, shapes = config | SMALL | {"num_key_value_heads": 2}, ((2, 5),)
        for quantization in (None, "fp8"):
            began, before = time.perf_counter(), torch.cuda.memory_allocated()
            runner = make_runner(
                architecture, config, DummySource(0, bench.dtype, bench.device), quantization
            )
            held, built_s = torch.cuda.memory_allocated() - before, time.perf_counter() - began
            for rows, length in shapes:
                eager, graph = step_ms(bench, runner, plan_of([length] * rows, config["vocab_size"]))
                bench.row(
                    f"{name} {rows} × {length}",
                    quantization or "bf16",
                    f"{eager:.2f}",
                    f"{graph:.2f}",
                    f"{rows * length / graph * 1000:,.0f}",
                    f"{held / 1e9:.2f}",
                    f"{built_s:.1f}",
                )
            runner.close()
            del runner
            free(bench)


def accuracy(bench: Bench) -> None:
    """Cosine with fp32. Random weights say less than trained ones."""
    bench.head("model", "vectors", "bf16: least, mean cosine", "fp8: least, mean cosine")
    if not bench.smoke:
        texts = natural_texts(200)
        folder = os.environ.get("PENSTOCK_MINILM")  # if the package of the default model is not installed
        with Engine(folder, device="cpu") as cpu:
            exact = cpu.embed(texts)
        found = []
        for options in ({"dtype": "bfloat16"}, {"quantization": "fp8"}):
            with Engine(folder, device="cuda", **options) as engine:
                found.append(likeness(engine.embed(texts), exact))
        bench.row("embedded default (MiniLM-L6)", str(len(texts)), *found)
    cases = (("BERT-base", "BertModel", BERT, 12), ("Mistral-7B's shape", "MistralModel", GRIT, 8))
    for name, architecture, config, layers in cases:
        config = config | {"num_hidden_layers": layers}
        lengths = [3, 9, 17, 17, 40, 64, 65, 130, 300]
        if bench.smoke:
            config, lengths = config | SMALL | {"num_key_value_heads": 2}, [3, 9]
        plan = plan_of(lengths, config["vocab_size"])
        sources = (
            (Rounded(0, torch.float32, bench.device), None),
            (DummySource(0, bench.dtype, bench.device), None),
            (DummySource(0, bench.dtype, bench.device), "fp8"),
        )
        vectors = []
        for source, quantization in sources:
            runner = make_runner(architecture, config, source, quantization)
            vectors.append(runner.forward(plan)[0].float().cpu().numpy())
            runner.close()
            del runner
            free(bench)
        found = [likeness(each, vectors[0]) for each in vectors[1:]]
        bench.row(f"{name}, {layers} layers, made weights", str(len(lengths)), *found)


def likeness(got: Any, exact: Any) -> str:
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(exact, axis=1)
    cosines = (got * exact).sum(1) / lengths
    return f"{cosines.min():.5f}, {cosines.mean():.5f}"


def free(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


SECTIONS: dict[str, Callable[[Bench], None]] = {
    section.__name__: section for section in (products, passes, models, accuracy)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--save", metavar="PATH")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.smoke)
    if options.smoke:
        allow_loaded_bounds()
        language.set_kernel_devices("cpu")
    for name in options.only.split(","):
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                SECTIONS[name](bench)
        except Exception:
            traceback.print_exc(limit=-5)
        free(bench)
        print(f"{name} took {time.perf_counter() - began:.1f} s", flush=True)
    table = "\n".join(bench.lines).strip()
    print(f"\n{table}")
    if options.save:
        device = "no GPU" if options.smoke else torch.cuda.get_device_name()
        versions = f"Python {platform.python_version()} · torch {torch.__version__}"
        head = f"# fp8 beside bfloat16\n\n{date.today()} · {device} · {versions}\n\n"
        Path(options.save).write_text(f"{head}`python benchmarks/gpu_fp8.py --save PATH`\n\n{table}\n")


if __name__ == "__main__":
    main()

"""The time saved by finishing the last layer only for tokens that the pooler reads.

    python benchmarks/last_layer.py [--save]

Models have real shapes and random weights. They run on the GPU if there is one, otherwise in fp32 on the CPU.
Both variants take turns, step by step. Figures are medians over the turns, and the results are compared.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.checkpoint.pooling import PoolingSpec
from penstock.layers.build import LayerBuilder
from penstock.models.registry import build_model
from penstock.pooling.build import Pooler
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolPlan, Request
from penstock.weights.stream import DummySource

BERT = {"vocab_size": 30522, "max_position_embeddings": 512, "hidden_act": "gelu"}
QWEN = {"vocab_size": 151669, "max_position_embeddings": 32768, "head_dim": 128, "rms_norm_eps": 1e-6}


class Case(NamedTuple):
    name: str
    architecture: str
    method: str
    config: dict[str, Any]
    rows: int
    length: int
    skip: int = 0
    large: bool = False  # only on a GPU


def sizes(hidden: int, layers: int, heads: int, inner: int, **more: int) -> dict[str, int]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return dict(zip(names, (hidden, layers, heads, inner), strict=True)) | more


BASE = BERT | sizes(768, 12, 12, 3072)
SMALL = BERT | sizes(384, 12, 12, 1536)
LARGE = BERT | sizes(1024, 24, 16, 4096) | {"max_position_embeddings": 514}
EMBED = QWEN | sizes(1024, 28, 16, 3072, num_key_value_heads=8)
GRIT = sizes(4096, 32, 32, 14336, num_key_value_heads=8) | {
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
CASES = (
    Case("bge-small, CLS", "BertModel", "cls", SMALL, 32, 32),
    Case("bge-base, CLS", "BertModel", "cls", BASE, 32, 32),
    Case("bge-base, CLS", "BertModel", "cls", BASE, 512, 32, large=True),
    Case("bge-base, CLS", "BertModel", "cls", BASE, 64, 256, large=True),
    Case("XLM-R-large, CLS", "RobertaModel", "cls", LARGE, 64, 256, large=True),
    Case("Qwen3-Embedding-0.6B, last token", "Qwen3Model", "last", EMBED, 64, 256, large=True),
    Case("GritLM-7B, mean behind 27 of 45 tokens", "GritLM", "mean", GRIT, 91, 45, 27, large=True),
)


def make(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[ModelRunner, PoolPlan]:
    with torch.inference_mode():
        model = build_model(case.architecture, case.config, LayerBuilder(DummySource(0, dtype, device), None))
    pooling = PoolingSpec((case.method,), normalize=True)
    more = {"sparse": None, "late": None, "multi_vector": None, "score": None}
    spec: Any = SimpleNamespace(pooling=pooling, config=case.config, **more)
    tokens = np.random.default_rng(0).integers(1000, 20000, case.rows * case.length).astype(np.int32)
    skip = np.full(case.rows, case.skip, dtype=np.int32) if case.skip else None
    request = Request("bench", tokens, np.full(case.rows, case.length, dtype=np.int32), skip=skip)
    plan = build_plan([ScheduledRows(request, np.arange(case.rows, dtype=np.int32))])
    return ModelRunner(model, Pooler(spec, model.heads, []), device, 1), plan


def compare(case: Case, device: torch.device, dtype: torch.dtype, seconds: float) -> str:
    runner, plan = make(case, device, dtype)
    times: dict[bool, list[float]] = {False: [], True: []}
    answers = {}
    until = time.perf_counter() + seconds
    while len(times[True]) < 5 or time.perf_counter() < until:
        for prunes_last_layer in times:
            runner.model.prunes_last_layer = prunes_last_layer
            result = runner.launch(plan).result()
            times[prunes_last_layer].append(result.device_s * 1000)
            answers[prunes_last_layer] = torch.from_numpy(result.outputs[0].copy())
    runner.close()
    every, read = (statistics.median(times[prunes_last_layer][2:]) for prunes_last_layer in (False, True))
    least = float(torch.cosine_similarity(answers[False], answers[True]).min())
    shape = f"{case.rows} × {case.length}"
    return f"| {case.name} | {shape} | {every:.2f} | {read:.2f} | {every / read - 1:+.1%} | {least:.6f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each model")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    lines = [
        "| model | step | all tokens, ms | those read, ms | gain | least cosine |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES:
        if cuda or not case.large:
            lines.append(compare(case, device, dtype, options.seconds))
            print(lines[-1], flush=True)
    if options.save:
        where = (
            torch.cuda.get_device_name()
            if cuda
            else f"{platform.machine()}, {torch.get_num_threads()} threads"
        )
        versions = f"Python {platform.python_version()} · torch {torch.__version__}"
        head = f"# The last layer for the tokens that are read\n\n{date.today()} · {where} · {versions}\n\n"
        target = Path(__file__).parent / "results" / f"last_layer_{device.type}_{date.today()}.md"
        target.write_text(head + "`python benchmarks/last_layer.py --save`\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

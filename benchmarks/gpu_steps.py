"""Single steps on one GPU, eager and as CUDA graphs: host time and device time.

    python benchmarks/gpu_steps.py [FOLDER…] [--save]

Without folders, configurations of BERT-base and XLM-R-large are written; weights are random. "whole" is the
time from the launch of a single step until its results can be read. "back to back" keeps two steps in flight,
as the engine does, so it shows whether host or device is the limit. The row of a plain torch encoder has
times of graphs of unfused kernels on an H200.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models

from penstock import Engine
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolPlan, Request

SHAPES = ((1, 32), (8, 32), (64, 32), (16, 256), (64, 256), (32, 500), (2, 2048))
PLAIN = {  # ms per graph of plain torch operations
    "bert-base": {(1, 32): 0.52, (64, 32): 1.28, (16, 256): 2.05, (64, 256): 7.40, (32, 500): 7.78},
    "xlmr-large": {(1, 32): 1.10, (64, 32): 3.44, (16, 256): 5.73, (64, 256): 23.6, (32, 500): 24.2},
}
PLAIN["bert-base"][2, 2048], PLAIN["xlmr-large"][2, 2048] = 3.21, 8.09
CONFIGS: dict[str, dict[str, Any]] = {
    "bert-base": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 4096,  # so that the longest rows fit too
        "vocab_size": 30522,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    },
    "xlmr-large": {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 8194,
        "vocab_size": 250002,
        "type_vocab_size": 1,
        "pad_token_id": 1,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
    },
}


def write_folder(parent: Path, name: str) -> Path:
    """A configuration, and a tokenizer that is never used."""
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    return folder


def plan_of(rows: int, length: int) -> PoolPlan:
    tokens = np.random.default_rng(0).integers(1000, 20000, rows * length).astype(np.int32)
    request = Request("bench", tokens, np.full(rows, length, dtype=np.int32))
    return build_plan([ScheduledRows(request, np.arange(rows, dtype=np.int32))])


def median_ms(call: Callable[[], float], seconds: float = 0.25, least: int = 8) -> float:
    found: list[float] = []
    until = time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < until:
        found.append(call())
    return statistics.median(found) * 1000


def measure(runner: ModelRunner, plan: PoolPlan) -> dict[str, float]:
    """Milliseconds: host time of the launch, device time, a single step, and a step back to back."""

    def launch() -> float:
        began = time.perf_counter()
        future = runner.launch(plan)
        took = time.perf_counter() - began
        future.result()
        return took

    def whole() -> float:
        began = time.perf_counter()
        runner.launch(plan).result()
        return time.perf_counter() - began

    def stream(steps: int = 20) -> float:
        flights: deque[Any] = deque()
        began = time.perf_counter()
        for _ in range(steps):
            if len(flights) == 2:
                flights.popleft().result()
            flights.append(runner.launch(plan))
        while flights:
            flights.popleft().result()
        return (time.perf_counter() - began) / steps

    for _ in range(3):
        runner.launch(plan).result()
    return {
        "launch": median_ms(launch),
        "device": median_ms(lambda: runner.launch(plan).result().device_s),
        "whole": median_ms(whole),
        "back to back": median_ms(stream, least=3),
    }


def run(name: str, folder: Path) -> list[str]:
    lines = []
    began = time.perf_counter()
    with Engine(str(folder), device="cuda", load_format="dummy") as engine:
        loaded_s = time.perf_counter() - began
        runner = engine.local.engine.core.runner
        assert isinstance(runner, ModelRunner)
        graphs = runner.graphs
        if graphs is None:
            return [f"| {name} | has no graphs | | | |"]
        first = f"loaded in {loaded_s:.1f} s with {len(graphs.captured)} graphs in {graphs.capture_s:.2f} s"
        print(f"{name}: {first}", flush=True)
        for rows, length in SHAPES:
            if length > engine.spec.max_model_len:
                continue
            try:
                lines.append(_line(name, runner, rows, length))
                print(lines[-1], flush=True)
            except Exception:
                traceback.print_exc(limit=-4)
        size = torch.cuda.memory_reserved() / 2**30
        last = f"{len(graphs.captured)} graphs, {graphs.capture_s:.2f} s to capture, {size:.2f} GiB reserved"
        lines.append(f"| {name} | {first}; at the end {last} | | | | | |")
        print(lines[-1], flush=True)
    return lines


def _line(name: str, runner: ModelRunner, rows: int, length: int) -> str:
    plan, graphs = plan_of(rows, length), runner.graphs
    assert graphs is not None
    runner.graphs = None
    try:
        eager = measure(runner, plan)
        expected = np.array(runner.launch(plan).result().outputs[0])
    finally:
        runner.graphs = graphs
    before = graphs.replays
    with graphs.capture_on_first_use():
        values = np.array(runner.launch(plan).result().outputs[0])
    plain = PLAIN.get(name, {}).get((rows, length))
    known = "" if plain is None else f"{plain:.2f}"
    if graphs.replays == before:
        return f"| {name} | {rows} × {length} | {_cells(eager)} | no graph | {known} | |"
    got = measure(runner, plan)
    pair = (torch.from_numpy(array).float() for array in (values, expected))
    cosine = float(torch.nn.functional.cosine_similarity(*pair, dim=1).min())
    return f"| {name} | {rows} × {length} | {_cells(eager)} | {_cells(got)} | {known} | {cosine:.5f} |"


def _cells(found: dict[str, float]) -> str:
    return " / ".join(f"{ms:.2f}" for ms in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    lines = [
        "| model | step | eager: launch / device / whole / back to back, ms | graph: the same | plain torch |"
        " cosine |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as parent:
        folders = {folder.name: folder for folder in options.folders}
        for name in folders or CONFIGS:
            try:
                lines += run(name, folders.get(name) or write_folder(Path(parent), name))
            except Exception:
                traceback.print_exc(limit=-6)
            torch.cuda.empty_cache()
    print("\n".join(lines))
    if options.save:
        where = (
            f"{torch.cuda.get_device_name()} · Python {platform.python_version()} · torch {torch.__version__}"
        )
        head = f"# Steps, eager and as graphs\n\n{date.today()} · {where}\n\n"
        command = "`python benchmarks/gpu_steps.py --save`\n\n"
        target = Path(__file__).parent / "results" / "gpu_steps.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(head + command + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

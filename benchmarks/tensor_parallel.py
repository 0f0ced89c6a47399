"""Tensor parallelism on a CPU: whether answers stay the same, and the cost of several ranks.

python benchmarks/tensor_parallel.py [--models DIR] [--rounds 5] [--save FILE]

DIR has the folders minilm, bge-small, reranker-mini and smollm2; missing ones are left out. The seeded
checkpoints of the tests always run. Rounds of one and of several ranks alternate because other programs use
the machine too. Expect no speed-up on a machine with few cores: the ranks share its cores and memory
bandwidth.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from penstock import Engine, SamplingParams
from tests.parallel.answers import cosines, scores, tokens, vectors
from tests.parallel.checkpoints import EXPERTS, LLAMA, QWEN3, RERANKER, write_checkpoint

CPU: dict[str, Any] = {"device": "cpu", "kv_cache_gb": 0.25}
RERANK = {"pooler_config": {"score_labels": [1, 0]}}
TEXTS = [f"{number} " + "water and oil do not mix " * 10 for number in range(64)]  # no two are the same
Answer = Callable[..., Any]


def parity(name: str, folder: Path, sizes: tuple[int, ...], answer: Answer, **options: Any) -> list[str]:
    """One line for each number of ranks."""
    options = CPU | options
    one, lines = answer(folder, **options), []
    for size in sizes:
        found = answer(folder, **options, tensor_parallel_size=size)
        if answer is vectors:
            verdict = f"least cosine {cosines(one, found).min():.7f}"
        elif answer is scores:
            verdict = f"largest difference of a score {np.abs(one - found).max():.1e}"
        else:
            same = sum(a == b for a, b in zip(one, found, strict=True))
            verdict = f"greedy tokens equal in {same} of {len(one)} rows"
        lines.append(f"| {name} | {size} | {verdict} |")
        print(lines[-1], flush=True)
    return lines


def parity_table(models: Path | None, folder: Path) -> list[str]:
    seeded: list[tuple[str, dict[str, Any], Answer, str | None]] = [
        ("Qwen3 embedder, seeded", QWEN3, vectors, "lasttoken"),
        ("Qwen3 cross-encoder, seeded", RERANKER, scores, None),
        ("Llama, 8 heads and 4 of keys, seeded", LLAMA, tokens, None),
        ("Qwen3-MoE, 8 experts, seeded", EXPERTS, tokens, None),
    ]
    lines = ["| model | ranks | to one rank |", "|---|---|---|"]
    for name, config, answer, pooling in seeded:
        lines += parity(name, write_checkpoint(folder / name, config, pooling=pooling), (2, 4), answer)
    real: tuple[tuple[str, tuple[int, ...], Answer, dict[str, Any]], ...] = (
        ("minilm", (2, 4), vectors, {}),
        ("bge-small", (2, 4), vectors, {}),
        ("reranker-mini", (2, 4), scores, RERANK),
        ("smollm2", (3,), tokens, {}),
    )
    for name, sizes, answer, options in real:
        if models is not None and (models / name).is_dir():
            lines += parity(name, models / name, sizes, answer, **options)
    return lines


class Timed:
    """An engine with some number of ranks, and the times of its rounds."""

    def __init__(self, folder: Path, size: int, work: Callable[[Engine], None]) -> None:
        began = time.perf_counter()
        self.engine = Engine(str(folder), **CPU, tensor_parallel_size=size)
        self.start_s = time.perf_counter() - began
        self.size, self.work = size, work
        self.times: list[float] = []
        work(self.engine)

    def run(self) -> None:
        began = time.perf_counter()
        self.work(self.engine)
        self.times.append(time.perf_counter() - began)


def embed(engine: Engine) -> None:
    engine.embed(TEXTS)


def generate(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    engine.generate(["Once upon a time", "Water boils at"], sampling)


def speed_table(models: Path | None, rounds: int) -> list[str]:
    lines = ["| model | ranks | start, s | one round, s | to one rank |", "|---|---|---|---|---|"]
    cases = (("minilm", (1, 2), embed), ("smollm2", (1, 3), generate))
    for name, sizes, work in cases:
        if models is None or not (models / name).is_dir():
            continue
        engines = [Timed(models / name, size, work) for size in sizes]
        for _ in range(rounds):
            for each in engines:
                each.run()
        first = median(engines[0].times)
        for each in engines:
            each.engine.close()
            took = median(each.times)
            lines.append(
                f"| {name} | {each.size} | {each.start_s:.1f} | {took:.2f} | {took / first:.2f} × the time |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        same = parity_table(options.models, Path(folder))
    speed = speed_table(options.models, options.rounds)
    title = f"CPU with {cores} cores, torch {torch.__version__}, Gloo, float32; "
    title += f"other programs used the machine too: load average {os.getloadavg()[0]:.0f} at the end"
    text = "\n".join([title, "", *same, "", *speed])
    print(text)
    if options.save is not None:
        options.save.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""Sleep and wake of models on a GPU: time, memory, and whether the answers stay the same.

python benchmarks/gpu_sleep.py --models DIR [--cycles 20] [--level 1] [--save FILE] [NAME…]

DIR holds the folders of the models; bge-base and gritlm-7b by default. Weights are dummies.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from penstock import Engine
from penstock.engine.loop import EngineCore
from penstock.inputs.generation import SamplingParams
from penstock.runner.sleep import ModelSleeper, storages_of

NAMES = ("bge-base", "gritlm-7b")
GIB = 2**30
CUDA = torch.device("cuda")


def used_gib() -> float:
    """Device memory in use by any process."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def timed(work: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


class Bench:
    """One model that sleeps and wakes repeatedly."""

    def __init__(self, engine: Engine, level: int) -> None:
        self.engine, self.level = engine, level
        self.core: EngineCore = engine.local.engine.core
        assert isinstance(self.core.sleeper, ModelSleeper)
        self.sleeper = self.core.sleeper
        draw = np.random.default_rng(0)
        vocabulary = engine.spec.vocab_size - 10
        self.rows = [draw.integers(10, vocabulary, n).tolist() for n in (1, 5, 16, 40, 128, 300)]
        self.large = [draw.integers(10, vocabulary, 500).tolist() for _ in range(64)]  # too large for a graph
        self.generates = engine.settings.generates
        self.vectors = self.embed()
        self.large_vectors = engine.embed(self.large)
        self.texts = self.generate()
        self.weights = self.checksum()

    def embed(self) -> Any:
        return self.engine.embed(self.rows)

    def generate(self) -> list[str]:
        if not self.generates:
            return []
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        return [each.text for each in self.engine.generate(self.rows[2:4], params)]

    def checksum(self) -> list[int]:
        """A checksum of the bits of each storage of weights."""
        storages = storages_of([self.sleeper.runner.model, self.sleeper.runner.pooler.heads], CUDA)
        flat = (torch.empty(0, dtype=torch.int16, device=CUDA).set_(each) for each in storages)
        return [int(each.sum(dtype=torch.int64)) for each in flat]

    def cycle(self) -> dict[str, float]:
        self.core.forget_cached()
        before = used_gib()
        sleep_s, freed = timed(lambda: self.sleeper.sleep(self.level))
        asleep = used_gib()
        wake_s, _ = timed(lambda: self.sleeper.wake(lambda num_bytes: None))
        first_s, vectors = timed(lambda: self.engine.embed(self.rows[:1]))
        later_s = median(timed(lambda: self.engine.embed(self.rows[:1]))[0] for _ in range(9))
        vectors = self.embed()
        return {
            "sleep_s": sleep_s,
            "wake_s": wake_s,
            "first_answer_s": first_s,
            "later_answer_s": later_s,
            "before_gib": before,
            "asleep_gib": asleep,
            "after_gib": used_gib(),
            "freed_gib": freed / GIB,
            "same_weights": float(self.checksum() == self.weights),
            "same_bits": float(np.array_equal(vectors, self.vectors)),
            "same_large_bits": float(np.array_equal(self.engine.embed(self.large), self.large_vectors)),
            "cosine": float((vectors * self.vectors).sum(1).min()),
            "same_text": float(self.generate() == self.texts),
        }


def measure(folder: Path, cycles: int, level: int) -> dict[str, Any]:
    load_s, engine = timed(lambda: Engine(str(folder), device="cuda", load_format="dummy"))
    with engine:
        bench = Bench(engine, level)
        found = [bench.cycle() for _ in range(cycles)]
    later = found[1:] or found
    return {
        "model": folder.name,
        "level": level,
        "load_s": load_s,
        "gib": bench.sleeper.num_bytes / GIB,
        "cycles": cycles,
        "first": found[0],
        "median": {name: median(each[name] for each in later) for name in found[0]},
        "worst_wake_s": max(each["wake_s"] for each in found),
        "same_weights": all(each["same_weights"] for each in found),
        "min_cosine": min(each["cosine"] for each in found),
        "same_large_bits": sum(each["same_large_bits"] for each in found),
        "same_texts": sum(each["same_text"] for each in found),
        "growth_gib": found[-1]["after_gib"] - found[min(1, cycles - 1)]["after_gib"],
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"{found['model']}, level {found['level']}: {found['gib']:.2f} GiB, loaded in {found['load_s']:.1f} s"
    )
    for name in ("first", "median"):
        each = found[name]
        print(
            f"  {name:6}: sleep {each['sleep_s']:.3f} s, wake {each['wake_s']:.3f} s, answer "
            f"{each['first_answer_s'] * 1e3:.1f} ms then {each['later_answer_s'] * 1e3:.1f} ms; memory "
            f"{each['before_gib']:.2f} → {each['asleep_gib']:.2f} → {each['after_gib']:.2f} GiB"
        )
    print(
        f"  {found['cycles']} cycles: worst wake {found['worst_wake_s']:.3f} s; weights bit-equal: "
        f"{found['same_weights']}, cosine ≥ {found['min_cosine']:.6f}, large batch "
        f"bit-equal {found['same_large_bits']:.0f} times, same text "
        f"{found['same_texts']:.0f} times; memory grew by {found['growth_gib']:.3f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--level", type=int, choices=(1, 2), default=1)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    found = []
    for name in given.names:
        found.append(measure(given.models / name, given.cycles, given.level))
        show(found[-1])
    if given.save is not None:
        given.save.write_text(json.dumps({"device": torch.cuda.get_device_name(), "models": found}, indent=1))


if __name__ == "__main__":
    main()

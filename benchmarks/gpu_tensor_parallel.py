"""Tensor parallelism on one GPU: its overhead, and whether answers stay the same.

python benchmarks/gpu_tensor_parallel.py [--save FILE]

One GPU can run only one NCCL rank. The table compares a plain engine, without and with CUDA graphs, with a
single rank that uses the process group and the sharded layers. Weights are dummies with the shapes of
Qwen3-0.6B, and of Qwen3-30B-A3B with fewer layers. The tests in `tests/gpu/test_tensor_parallel.py` run
first.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from penstock import Engine, SamplingParams
from penstock.runner import load
from tests.checkpoints import wordpiece_tokenizer, write_json

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests/gpu/test_tensor_parallel.py"
COMMON: dict[str, Any] = {"head_dim": 128, "vocab_size": 32_000, "max_position_embeddings": 4096}
MODELS: dict[str, dict[str, Any]] = {
    "dense 0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "experts, 8 layers of 30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
}
ROWS, LENGTH, NEW_TOKENS, REPEATS = 64, 256, 64, 5
HANG_S = 30  # a test that takes longer prints its stacks


def timed(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def measure(folder: Path, *, parallel: bool, **options: Any) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    texts = [draw.integers(10, 30_000, LENGTH).tolist() for _ in range(ROWS)]
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    faulthandler.dump_traceback_later(2 * HANG_S, exit=True)
    with mock.patch.object(load, "is_parallel", return_value=parallel):
        began = time.perf_counter()
        engine = Engine(str(folder), device="cuda", load_format="dummy", kv_cache_gb=4, **options)
        start_s = time.perf_counter() - began
        with engine:
            vectors = engine.embed(texts)
            few = engine.generate(texts[:4], sampling)
            pool_s = timed(lambda: engine.embed(texts))
            decode_s = timed(lambda: engine.generate(texts[:4], sampling))
    faulthandler.cancel_dump_traceback_later()
    print(f"{folder.name}: parallel {parallel}, {options}, started in {start_s:.1f} s", flush=True)
    return {
        "vectors": vectors,
        "tokens": [each.token_ids for each in few],
        "start_s": start_s,
        "pooled": ROWS * LENGTH / pool_s,
        "decoded": 4 * NEW_TOKENS / decode_s,
    }


def compare(name: str, config: dict[str, Any], folder: Path, *, quick: bool) -> list[str]:
    write_json(folder / "config.json", COMMON | config)
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    plain = measure(folder, parallel=False, enforce_eager=True)
    graphs = {} if quick else measure(folder, parallel=False)
    rank = measure(folder, parallel=True, enforce_eager=True)
    cosine = float((plain["vectors"] * rank["vectors"]).sum(axis=1).min())
    same = sum(a == b for a, b in zip(plain["tokens"], rank["tokens"], strict=True))
    lines = []
    for label, found in (("plain, eager", plain), ("plain, graphs", graphs), ("one NCCL rank", rank)):
        if not found:
            continue
        agrees = f"{cosine:.6f}, {same} of 4" if found is rank else ""
        lines.append(
            f"| {name} | {label} | {found['start_s']:.1f} | {found['pooled']:,.0f} "
            f"| {found['decoded']:,.0f} | {agrees} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--quick", action="store_true", help="skip the engine with CUDA graphs")
    parser.add_argument("--no-table", action="store_true")
    options = parser.parse_args()
    status = 0
    if not options.no_tests:
        settings = ["-o", "addopts=", "-v", "-m", "gpu", "-p", "no:cacheprovider", "-rfE", "--durations=5"]
        settings += ["-o", f"faulthandler_timeout={HANG_S}"]
        status = int(pytest.main([*settings, str(TESTS)]))
    if options.no_table:
        return status
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, "
        f"bfloat16, dummy weights; {ROWS} rows of {LENGTH} tokens pooled, "
        f"4 sequences decode {NEW_TOKENS} tokens each",
        "",
        "| model | engine | start, s | tokens pooled a second | tokens decoded a second "
        "| least cosine and equal greedy rows, to plain eager |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = compare(name, config, Path(folder), quick=options.quick)
        print("\n".join(found), flush=True)
        lines += found
        if options.save is not None:
            options.save.write_text("\n".join(lines) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())

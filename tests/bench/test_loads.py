"""`benchmarks/gpu_loads.py` measures a small model over HTTP, and computes floors from memory bandwidth."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.generation.families import write
from tests.thinning import thorough

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/gpu_loads.py"


@pytest.fixture(scope="module")
def loads() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_loads", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["gpu_loads"] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))  # the script imports other scripts
        spec.loader.exec_module(module)
    return module


@thorough
@pytest.mark.timeout(600)
def test_generation_is_measured_over_http_alone_and_with_embeddings(tmp_path: Path) -> None:
    write("qwen3", tmp_path / "qwen3-4b")
    write("gritlm", tmp_path / "gritlm-7b")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"prompt": f"water {i}"}) + "\n" for i in range(50)))
    command = [sys.executable, str(SCRIPT), "--models", str(tmp_path), "--s1-file", str(texts)]
    command += ["--only", "gen-greedy|gen-sampled|gritlm-both", "--output-len", "6", "--seconds", "0.8"]
    command += ["--api-server-count", "2", "--clients", "1", "--save", str(tmp_path / "table.md")]
    command += ["--serve-flags", "--device cpu --load-format auto --max-model-len 64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gen: ready after" in done.stdout and "gritlm-both: ready after" in done.stdout
    lines = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("|")]
    greedy, sampled, both = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])
    for cells in (greedy, sampled, both):
        rate, tpot, ttft = cells[1:4]
        assert "failed" not in rate and float(rate.replace(",", "")) > 0, done.stdout
        assert float(ttft) > 0
        assert float(tpot) >= 0  # on a busy machine all tokens of an answer can arrive at once
    assert greedy[6].startswith("≥ 24,000") and sampled[6].startswith("≥ 23,500")
    assert not greedy[8] and float(both[8].replace(",", "")) > 0, (
        "no embeddings were computed at the same time"
    )


def test_the_floor_counts_all_bytes_that_a_step_reads(loads: ModuleType, tmp_path: Path) -> None:
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 100,
        "vocab_size": 1000,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 10}
    options = argparse.Namespace(models=str(tmp_path), output_len=None)
    attention, keys = 64 * (64 + 64 + 32 + 32), 2 * 32
    rows = loads.Load("x", "x", "gen", 20, 4)
    for name, more, flags, feed, weight in (
        ("dense", {}, (), 3 * 64 * 100, 2),
        ("moe", experts, ("--quantization", "fp8"), 3 * 64 * 10 * 8, 1),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape | more))
        wanted = 2 * (attention + feed) * weight + 1000 * 64 * 2 + 4 * 12 * keys * 2 * 2
        found = loads.floor_ms(loads.Setup(name, name, (rows,), flags), rows, options)
        assert found == pytest.approx(wanted / loads.MEMORY_BYTES_S * 1000)


def test_the_floor_of_conversations_is_that_of_their_prompts_where_products_take_longer(
    loads: ModuleType, tmp_path: Path
) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 10}
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense/config.json").write_text(json.dumps(shape | {"intermediate_size": 100_000}))
    options = argparse.Namespace(models=str(tmp_path), output_len=None)
    load = loads.Load("x", "x", "chat", 20, 1000, prompt_tokens=2000)
    operations = 2 * (1000 * 101) * 2 * (64 * 4 * 64 + 3 * 64 * 100_000)
    for weight, flags in ((2, ()), (1, ("--quantization", "fp8"))):
        found = loads.floor_ms(loads.Setup("dense", "dense", (load,), flags), load, options)
        assert found == pytest.approx(1000 * operations / loads.PRODUCTS_S[weight])


def test_a_trace_separates_work_from_gaps(loads: ModuleType) -> None:
    spec = importlib.util.spec_from_file_location("gpu_trace", SCRIPT.with_name("gpu_trace.py"))
    assert spec is not None and spec.loader is not None
    trace = sys.modules["gpu_trace"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trace)
    events = [
        {"cat": "kernel", "name": "_flash", "ts": 100, "dur": 10},  # from an earlier step
        {"cat": "user_annotation", "name": "step: 2 rows, 9 tokens", "ts": 900, "dur": 200},
        {"cat": "user_annotation", "name": "step: 2 rows, 9 tokens", "ts": 1900, "dur": 200},
        {"cat": "kernel", "name": "nvjet_tst_128x256", "ts": 1000, "dur": 400},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1100, "dur": 100},  # overlaps the product
        {"cat": "kernel", "name": "_flash", "ts": 1400, "dur": 100},
        {"cat": "cpu_op", "name": "aten::addmm", "ts": 0, "dur": 9000},
        {"cat": "kernel", "name": "_add_norm", "ts": 2000, "dur": 500},
        {"cat": "kernel", "name": "something", "ts": 2450, "dur": 150},
        {"cat": "kernel", "name": "_gated", "ts": 2600, "dur": 0},
    ]
    found = trace.read(reversed(events))
    assert found == trace.Busy(
        window=pytest.approx(1.6),
        work=pytest.approx(1.1),
        longest_gap=pytest.approx(0.5),
        gaps=1,
        kernels=6,
        by_kind=pytest.approx(
            {"products": 0.4, "copies": 0.1, "attention": 0.1, "norms": 0.5, "other": 0.15, "activation": 0.0}
        ),
    )
    assert trace.read([{"cat": "cpu_op", "name": "aten::addmm", "ts": 0, "dur": 9000}]) is None
    assert "| 68.8% | 0.50 ms; 1 |" in trace.line(loads.SETUPS[0].loads[0], found)

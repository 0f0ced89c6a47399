"""Models on a device sleep and wake: their memory is free in the meantime, and their answers stay the same.

pytest -m gpu tests/gpu/test_sleep.py
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Engine
from penstock.errors import DeviceOutOfMemory
from penstock.inputs.generation import SamplingParams
from penstock.runner.model_runner import ModelRunner
from penstock.runner.sleep import ModelSleeper
from tests.checkpoints import write_bert, write_late
from tests.gpu import decoders

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
}
ROWS = [np.random.default_rng(n).integers(5, 60, 3 + 7 * n).tolist() for n in range(12)]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = ["the quick brown fox " * 8, "hello world"]
MAX_LEFT_BYTES = 1 << 20  # for small tensors that stay on the device
MAX_GROWTH_BYTES = 64 << 20  # for other graphs; leaked copies of the weights soon take more


@pytest.fixture
def clean() -> Iterator[int]:
    """Free unused memory; yields the bytes that earlier tests have left on the device."""
    gc.collect()
    torch.cuda.empty_cache()
    yield torch.cuda.memory_allocated()


def sleeper_of(engine: Engine) -> ModelSleeper:
    sleeper = engine.local.engine.core.sleeper
    assert isinstance(sleeper, ModelSleeper)
    return sleeper


def cycle(engine: Engine, level: int, at_rest: Callable[[], None] = lambda: None) -> None:
    core = engine.local.engine.core
    core.forget_cached()
    sleeper_of(engine).sleep(level)
    at_rest()
    sleeper_of(engine).wake(lambda num_bytes: None)


def num_graphs(engine: Engine) -> int:
    runner = engine.local.engine.core.runner
    assert isinstance(runner, ModelRunner)
    graphs = (runner.graphs, runner.decode, runner.mixed)
    return sum(len(each.captured) for each in graphs if each is not None)


OPTIONS: list[dict[str, Any]] = [{}, {"enforce_eager": True}, {"quantization": "fp8"}, {"dtype": "float32"}]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_encoder_gives_its_memory_back_and_answers_the_same(
    tmp_path: Path, clean: int, level: int, options: dict[str, Any]
) -> None:
    if options.get("quantization") == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 on this device")
    folder = write_bert(tmp_path, config=CONFIG)
    with Engine(str(folder), device="cuda", **options) as engine:
        before = [engine.embed(ROWS), engine.embed(ROWS[:1])]
        had_graphs, free_before = num_graphs(engine), torch.cuda.mem_get_info()[0]
        reserved: list[int] = []

        def at_rest() -> None:
            assert torch.cuda.memory_allocated() - clean < MAX_LEFT_BYTES
            assert torch.cuda.mem_get_info()[0] > free_before
            assert not num_graphs(engine)

        for _ in range(5):
            cycle(engine, level, at_rest)
            for _ in range(4):  # the last ones replay a graph again
                _check_same(engine.embed(ROWS), before[0], is_exact=not had_graphs)
                _check_same(engine.embed(ROWS[:1]), before[1], is_exact=not had_graphs)
            assert bool(num_graphs(engine)) == bool(had_graphs)
            reserved.append(torch.cuda.memory_reserved())
        assert reserved[-1] - reserved[1] < MAX_GROWTH_BYTES, reserved


def _check_same(found: Any, expected: Any, *, is_exact: bool) -> None:
    """Steps with and without a graph round differently; without graphs every bit is the same."""
    if is_exact:
        np.testing.assert_array_equal(found, expected)
    assert decoders.cosine(found, expected) > 0.9999


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("is_eager", [True, False])
def test_a_decoder_embeds_and_generates_the_same_after_a_sleep(
    tmp_path: Path, clean: int, level: int, is_eager: bool
) -> None:
    folder = str(decoders.write(tmp_path, "qwen3"))
    options: dict[str, Any] = {"enable_generation": True, "kv_cache_gb": 0.5, "enforce_eager": is_eager}
    with Engine(folder, device="cuda", **options) as engine:
        texts = [each.text for each in engine.generate(PROMPTS, GREEDY)]
        vectors = engine.embed(ROWS)
        pool = engine.local.engine.core.pool
        assert pool is not None

        def at_rest() -> None:
            assert torch.cuda.memory_allocated() - clean < MAX_LEFT_BYTES

        for _ in range(5):
            cycle(engine, level, at_rest)
            hits = pool.hit_tokens
            found = [each.text for each in engine.generate(PROMPTS, GREEDY)]
            assert found == texts or not is_eager, "graphs may round a near-tie differently"
            assert pool.hit_tokens == hits, "what was cached is lost"
            _check_same(engine.embed(ROWS), vectors, is_exact=is_eager)
        assert bool(num_graphs(engine)) is not is_eager
        engine.local.engine.core.check_integrity()


def test_late_interaction_scores_the_same_after_a_sleep(tmp_path: Path) -> None:
    with Engine(str(write_late(tmp_path)), device="cuda", document_cache_gb=0.01) as engine:
        documents = ["the quick brown fox", "hello world"]
        before = [engine.score("hello world", documents) for _ in range(2)][1]
        for level in (1, 2, 1):
            cycle(engine, level)
            np.testing.assert_allclose(engine.score("hello world", documents), before, atol=1e-3)


def test_a_wake_without_memory_fails_whole_and_succeeds_later(tmp_path: Path, clean: int) -> None:
    folder = write_bert(tmp_path, config=CONFIG)
    with Engine(str(folder), device="cuda") as engine:
        before, sleeper = engine.embed(ROWS), sleeper_of(engine)
        sleeper.sleep(1)
        total = torch.cuda.get_device_properties(0).total_memory
        rooms: list[int] = []
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
        try:
            with pytest.raises(DeviceOutOfMemory):
                sleeper.wake(rooms.append)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert len(rooms) == 2
        assert rooms[1] > rooms[0] == sleeper.num_bytes
        assert torch.cuda.memory_allocated() - clean < MAX_LEFT_BYTES
        sleeper.wake(rooms.append)
        _check_same(engine.embed(ROWS), before, is_exact=False)

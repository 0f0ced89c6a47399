"""A closed engine frees its memory at once, while its owner still has the object."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Engine, SamplingParams
from penstock.runner.model_runner import ModelRunner
from penstock.runner.sleep import tensors_of
from tests.checkpoints import write_bert
from tests.generation.families import write

Tensors = list[weakref.ref[torch.Tensor]]


@pytest.fixture(autouse=True)
def no_cycles_are_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensors(engine: Engine, *others: Any) -> Tensors:
    """Everything that the model and its caches consist of."""
    runner = engine.local.engine.core.runner
    assert isinstance(runner, ModelRunner)
    roots = [runner.model, runner.pooler, runner.cache, runner.generator, *others]
    return [weakref.ref(tensor) for tensor in tensors_of(roots)]


def num_alive(found: Tensors) -> int:
    return sum(tensor() is not None for tensor in found)


def test_closing_an_embedder_frees_its_weights(tmp_path: Path) -> None:
    write_bert(tmp_path)
    engine = Engine(str(tmp_path), device="cpu")
    engine.embed(["a text"])
    found = tensors(engine)
    assert num_alive(found) > 10
    engine.close()
    assert num_alive(found) == 0
    engine.close()  # a second time changes nothing


def test_closing_a_generator_frees_its_cache_and_its_draft_model(tmp_path: Path) -> None:
    folder = str(write("llama", tmp_path))
    draft = {"model": folder, "num_speculative_tokens": 2}
    engine = Engine(folder, device="cpu", speculative_config=draft)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    core = engine.local.engine.core
    assert core.generation is not None and core.generation.speculation is not None
    proposer: Any = core.generation.speculation.proposer
    drafts = proposer._draft.runner
    found = tensors(engine, drafts.model, drafts.cache)
    assert num_alive(found) > 10
    engine.close()
    assert num_alive(found) == 0

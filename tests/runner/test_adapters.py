"""LoRA adapters move between disk, host memory and slots, for a small model on a CPU."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoint.pooling import PoolingSpec
from penstock.errors import BadValue, ModelLoadError, ModelNotFound, NotPossible
from penstock.layers.build import LayerBuilder
from penstock.layers.lora import AdapterSites
from penstock.models.registry import build_model
from penstock.pooling.build import Pooler
from penstock.runner.adapters import AdapterPool
from penstock.runner.base import AdapterInfo
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import Array, PoolingParams
from penstock.weights.stream import DummySource
from tests.adapters import random_adapters
from tests.helpers import ints, make_request, make_spec
from tests.runner.adapter_folders import write
from tests.runner.small_models import CPU, SIZES

NUM_SLOTS, ON_HOST = 2, 3


def make_runner(num_own: int = 0) -> tuple[ModelRunner, AdapterPool]:
    build = LayerBuilder(DummySource(0, torch.float32, CPU), None)
    build.adapters = AdapterSites(NUM_SLOTS, 8)
    with torch.inference_mode():
        model = build_model("BertModel", SIZES, build)
    if num_own:
        random_adapters(build.adapters, [4] * num_own)
    pooler = Pooler(make_spec(pooling=PoolingSpec(("mean",))), model.heads, [])
    runner = ModelRunner(model, pooler, CPU, 1)
    runner.adapters = AdapterPool(build.adapters, ON_HOST, torch.float32, CPU)
    return runner, runner.adapters


def run(runner: ModelRunner, adapters: list[int]) -> Array:
    """Run one row of the same tokens for each adapter."""
    request = make_request("a", [7] * len(adapters), params=PoolingParams())
    request.token_ids = np.tile(np.arange(3, 10, dtype=np.int32), len(adapters))
    request.adapters = ints(adapters)
    plan = build_plan([ScheduledRows(request, ints(range(len(adapters))))])
    values: Array = runner.launch(plan).result().outputs[0].copy()  # type: ignore[union-attr]
    return values


def loaded(future: Future[AdapterInfo]) -> AdapterInfo:
    return future.result(30)


def test_modules_that_the_options_name_and_the_file_lacks_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a", 0)
    write(tmp_path / "b", 0)
    config = json.loads((tmp_path / "b/adapter_config.json").read_text())
    whole = r"encoder\.layer\.0\.attention\.self\.query"
    (tmp_path / "b/adapter_config.json").write_text(json.dumps(config | {"target_modules": whole}))
    _, adapters = make_runner()
    with caplog.at_level(logging.WARNING, "penstock.adapters"):
        loaded(adapters.load(0, str(tmp_path / "a"), "a"))
        assert "'a' has no tensors for modules that target_modules names" in caplog.text
        assert "layer.1.attention.self.query" in caplog.text and "layer.0" not in caplog.text
        caplog.clear()
        loaded(adapters.load(1, str(tmp_path / "b"), "b"))
        assert not caplog.records


def test_more_adapters_than_slots_and_host_memory_give_their_own_answers(tmp_path: Path) -> None:
    runner, pool = make_runner()
    for number in range(5):
        info = loaded(pool.load(number + 7, write(tmp_path / str(number), number), str(number)))
        assert info.rank == 2 and info.kinds == ("query",)
    (plain,) = run(runner, [-1])
    alone = [run(runner, [number + 7])[0] for number in range(5)]
    for number in (0, 3, 4, 0, 1, 2, 3):
        both = run(runner, [number + 7, -1, (number + 2) % 5 + 7])
        np.testing.assert_allclose(both, [alone[number], plain, alone[(number + 2) % 5]], atol=1e-5)
    assert all(np.abs(one - two).max() > 1e-3 for one in alone for two in alone if one is not two)
    stats = pool.stats()
    assert (stats.num_loaded, stats.num_on_host, stats.num_on_device) == (5, ON_HOST, NUM_SLOTS)
    assert stats.num_host_loads > 5 and stats.num_device_loads > 5
    runner.close()


def test_an_unloaded_adapter_is_refused_but_finishes_what_runs(tmp_path: Path) -> None:
    runner, pool = make_runner()
    loaded(pool.load(4, write(tmp_path / "a", 1), "a"))
    expected = run(runner, [4])
    pool.in_use = lambda: {4}
    pool.unload(4)
    with pytest.raises(ModelNotFound, match="adapter 4 is not loaded"):
        pool.check(ints([4]))
    np.testing.assert_array_equal(run(runner, [4]), expected)
    pool.in_use = tuple
    assert pool.stats()[:3] == (0, 0, 0)
    with pytest.raises(BadValue, match="was used before"):
        loaded(pool.load(4, str(tmp_path / "a"), "a"))
    runner.close()


def test_what_cannot_be_loaded_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    runner, pool = make_runner()
    with pytest.raises(ModelLoadError, match="has no adapter_config"):
        loaded(pool.load(1, str(tmp_path), "a"))
    with pytest.raises(ModelLoadError, match="rank 9; at most 8"):
        loaded(pool.load(2, write(tmp_path / "b", 1, rank=9), "b"))
    with pytest.raises(ModelLoadError, match="does not have"):
        loaded(pool.load(3, write(tmp_path / "c", 1, module="decoder.query"), "c"))
    assert pool.stats()[:3] == (0, 0, 0)
    loaded(pool.load(5, write(tmp_path / "d", 1), "d"))
    with pytest.raises(NotPossible, match="at most 2 run at once"):
        pool._known.update((6, 7))
        pool.check(ints([5, 6, 7]))
    runner.close()


def test_a_model_that_was_built_again_has_its_adapters_again(tmp_path: Path) -> None:
    runner, pool = make_runner(num_own=1)
    loaded(pool.load(4, write(tmp_path / "a", 1), "a"))
    expected = run(runner, [0, 4, -1])
    other, _ = make_runner(num_own=1)
    runner.uninstall()
    with pytest.raises(NotPossible, match="sleeps"):
        loaded(pool.load(5, write(tmp_path / "b", 1), "b"))
    runner.install(other.model, other.pooler, None, None)
    sites = other.model.adapter_sites  # type: ignore[attr-defined]
    random_adapters(sites, [4])
    pool.attach(sites)
    np.testing.assert_allclose(run(runner, [0, 4, -1]), expected, atol=1e-6)
    runner.close()


_runner, _pool = make_runner(num_own=4)
_pool.max_adapters = NUM_SLOTS


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([(-1,), (0,), (1,), (2,), (3,)]), min_size=1, max_size=6), st.integers(0, 5))
def test_a_row_does_not_depend_on_its_neighbours_adapters(others: list[tuple[int]], place: int) -> None:
    """For any neighbours whose adapters fit in the slots."""
    own = 1
    distinct = list(dict.fromkeys(each for (each,) in others if each not in (-1, own)))[: NUM_SLOTS - 1]
    beside = [each for (each,) in others if each in (-1, own, *distinct)]
    adapters = [*beside[:place], own, *beside[place:]]
    at = min(place, len(beside))
    (alone,) = run(_runner, [own])
    np.testing.assert_allclose(run(_runner, adapters)[at], alone, atol=1e-5)

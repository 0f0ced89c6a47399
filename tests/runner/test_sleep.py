"""A model's memory is freed and allocated again: same tensors, same answers, nothing half restored."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import Engine
from penstock.engine.loop import EngineCore
from penstock.errors import DeviceOutOfMemory, EngineError, ModelLoadError
from penstock.inputs.generation import SamplingParams
from penstock.runner import sleep
from penstock.runner.sleep import ContentsLost, ModelSleeper, StorageMover, storages_of, tensors_of
from tests.checkpoints import write_bert, write_late, write_static
from tests.gpu import decoders

CPU = torch.device("cpu")
MAPS = Path("/proc/self/maps")
TEXTS = ["hello world", "the quick brown fox", "x"]


class Layer:
    """Tensors in all the places where models have them."""

    def __init__(self) -> None:
        self.weight = torch.arange(12.0).view(3, 4)
        self.transposed = self.weight.t()
        self.parts = [torch.ones(3), {"deep": torch.full((5,), 7.0)}]
        hidden, zeros = torch.arange(3), torch.zeros(2)
        self.closure = lambda: (hidden, zeros)
        self.cache = torch.ones(100)


def test_all_tensors_of_an_object_are_found_each_storage_once() -> None:
    layer = Layer()
    assert len(list(tensors_of([layer, layer.weight]))) == 7
    assert len(storages_of([layer, layer.weight], CPU)) == 6


def test_storages_move_out_and_back_in_place_and_caches_come_back_empty() -> None:
    layer, mover = Layer(), StorageMover(CPU)
    for _ in range(3):
        layer.cache.fill_(1)
        mover.move_out([layer], [layer.cache])
        assert all(not storage.nbytes() for storage in _storages(layer.weight, layer.cache, *layer.closure()))
        mover.move_back()
        assert layer.weight.tolist() == torch.arange(12.0).view(3, 4).tolist()
        assert layer.transposed.untyped_storage()._cdata == layer.weight.untyped_storage()._cdata
        assert layer.closure()[0].tolist() == [0, 1, 2]
        assert not layer.cache.any(), "what it held is forgotten elsewhere"


def _storages(*tensors: Tensor) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors]


def test_a_move_back_that_fails_leaves_nothing_half_restored_and_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, mover = Layer(), StorageMover(CPU)
    mover.move_out([layer], [layer.cache])
    with monkeypatch.context() as broken:
        broken.setattr(sleep, "_synchronize", lambda device: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError):
            mover.move_back()
    assert not layer.weight.untyped_storage().nbytes()
    mover.move_back()
    assert layer.weight[2, 3] == 11


def test_weights_that_have_changed_in_host_memory_are_not_served() -> None:
    layer, mover = Layer(), StorageMover(CPU)
    mover.move_out([layer], [layer.cache])
    assert mover._host is not None
    mover._host.bytes.zero_()
    with pytest.raises(ContentsLost):
        mover.move_back()
    assert not layer.weight.untyped_storage().nbytes()


def test_weights_that_are_lost_are_read_again_from_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(str(write_bert(tmp_path)), device="cpu") as engine:
        before, sleeper = engine.embed(TEXTS), core_of(engine).sleeper
        assert isinstance(sleeper, ModelSleeper)

        def lost(mover: StorageMover) -> None:
            raise ContentsLost("lost")

        sleeper.sleep(1)
        monkeypatch.setattr(StorageMover, "move_back", lost)
        sleeper.wake(lambda num_bytes: None)
        np.testing.assert_array_equal(engine.embed(TEXTS), before)


def test_too_little_host_memory_is_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "available_memory_bytes", lambda: 100)
    layer = Layer()
    with pytest.raises(EngineError, match=r"GiB are available; use level 2"):
        StorageMover(CPU).move_out([layer], [])
    assert layer.weight[2, 3] == 11


def test_memory_that_cannot_be_freed_is_refused_before_anything_moves() -> None:
    layer = Layer()
    layer.parts.append(torch.from_numpy(np.ones(4)))
    with pytest.raises(EngineError, match="use level 2"):
        StorageMover(CPU).move_out([layer], [])
    assert layer.weight[2, 3] == 11


def test_host_memory_grows_with_what_is_moved_and_is_given_back() -> None:
    layer, mover = Layer(), StorageMover(CPU)
    mover.move_out([layer], [])
    mover.move_back()
    layer.parts.append(torch.ones(1 << 16))
    mover.move_out([layer], [])
    mover.move_back()
    assert torch.equal(layer.parts[-1], torch.ones(1 << 16))
    mover.close()
    mover.move_out([layer], [])
    mover.move_back()
    assert layer.weight[2, 3] == 11


def core_of(engine: Engine) -> EngineCore:
    return engine.local.engine.core


def sleep_and_wake(engine: Engine, level: int) -> None:
    """Sleep and wake. Call it only while the engine is idle, because it runs outside the engine's thread."""
    core = core_of(engine)
    assert core.sleeper is not None
    core.forget_cached()
    core.sleeper.sleep(level)
    core.sleeper.wake(lambda num_bytes: None)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("write", [write_bert, write_static])
def test_vectors_are_the_same_bits_after_a_sleep(
    tmp_path: Path, write: Callable[[Path], Path], level: int
) -> None:
    with Engine(str(write(tmp_path)), device="cpu") as engine:
        before = engine.embed(TEXTS)
        for _ in range(2):
            sleep_and_wake(engine, level)
            np.testing.assert_array_equal(engine.embed(TEXTS), before)


@pytest.mark.parametrize("level", [1, 2])
def test_scores_are_the_same_bits_after_a_sleep_and_cached_vectors_are_forgotten(
    tmp_path: Path, level: int
) -> None:
    with Engine(str(write_late(tmp_path)), device="cpu", document_cache_gb=0.001) as engine:
        before = [engine.score(TEXTS[0], TEXTS) for _ in range(2)][1]
        vectors = core_of(engine).scheduler.vector_cache
        assert vectors is not None
        hits = vectors.query_hits, vectors.document_hits
        assert all(hits), "or this proves nothing"
        sleep_and_wake(engine, level)
        np.testing.assert_array_equal(engine.score(TEXTS[0], TEXTS), before)
        assert (vectors.query_hits, vectors.document_hits) == hits
        vectors.check_integrity()


@pytest.mark.parametrize("level", [1, 2])
def test_generation_goes_on_after_a_sleep_and_cached_prefixes_are_forgotten(
    tmp_path: Path, level: int
) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompt = "the quick brown fox " * 8
    folder = str(decoders.write(tmp_path, "qwen3"))
    with Engine(folder, device="cpu", enable_generation=True, kv_cache_gb=0.01) as engine:
        before = [engine.generate(prompt, params) for _ in range(2)][1]
        pool = core_of(engine).pool
        assert pool is not None
        hits, num_blocks = pool.hit_tokens, pool.num_blocks
        assert hits, "or this proves nothing"
        sleep_and_wake(engine, level)
        assert engine.generate(prompt, params)[0].text == before[0].text
        assert pool.hit_tokens == hits
        cache = core_of(engine).runner.cache  # type: ignore[attr-defined]
        assert cache.store.keys.shape[1] == num_blocks * pool.block_size
        core_of(engine).check_integrity()


def test_level_2_frees_the_model_and_a_step_cannot_run_without_it(tmp_path: Path) -> None:
    with Engine(str(write_bert(tmp_path)), device="cpu") as engine:
        core = core_of(engine)
        sleeper = core.sleeper
        assert isinstance(sleeper, ModelSleeper)
        assert sleeper.num_bytes > 0
        sleeper.sleep(2)
        assert not hasattr(sleeper.runner, "model")
        with pytest.raises(EngineError):
            engine.embed(TEXTS)
        sleeper.wake(lambda num_bytes: None)
        assert engine.embed(TEXTS).shape[0] == len(TEXTS)


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not list what a process maps")
def test_a_model_that_sleeps_again_and_again_maps_its_files_once(tmp_path: Path) -> None:
    with Engine(str(write_bert(tmp_path)), device="cpu") as engine:
        gc.collect()
        gc.freeze()  # as an engine process does
        try:
            for _ in range(3):
                sleep_and_wake(engine, 2)
            assert MAPS.read_text().count(str(tmp_path / "model.safetensors")) == 1
        finally:
            gc.unfreeze()


def test_a_model_whose_files_have_changed_is_not_woken(tmp_path: Path) -> None:
    with Engine(str(write_bert(tmp_path)), device="cpu") as engine:
        sleeper, weights = core_of(engine).sleeper, tmp_path / "model.safetensors"
        before = engine.embed(TEXTS)
        times = weights.stat()
        assert sleeper is not None
        sleeper.sleep(2)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
        with pytest.raises(ModelLoadError, match=r"model\.safetensors .* has changed"):
            sleeper.wake(lambda num_bytes: None)
        weights.rename(tmp_path / "away")
        with pytest.raises(ModelLoadError, match=r"model\.safetensors .* is gone"):
            sleeper.wake(lambda num_bytes: None)
        (tmp_path / "away").rename(weights)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
        sleeper.wake(lambda num_bytes: None)
        np.testing.assert_array_equal(engine.embed(TEXTS), before)


def test_a_wake_without_memory_asks_for_room_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(str(write_bert(tmp_path)), device="cpu") as engine:
        sleeper = core_of(engine).sleeper
        assert isinstance(sleeper, ModelSleeper)
        sleeper.sleep(2)
        rooms: list[int] = []
        install = sleeper._install

        def full_at_first() -> None:
            if len(rooms) < 2:
                raise DeviceOutOfMemory("full")
            install()

        monkeypatch.setattr(sleeper, "_install", full_at_first)
        sleeper.free_bytes = lambda: 1000
        sleeper.wake(rooms.append)
        assert rooms == [sleeper.num_bytes, sleeper.num_bytes + 1000]
        assert len(engine.embed(TEXTS)) == len(TEXTS)

"""Shared device memory: one engine takes some at a time, and others sleep if too little is free."""

from __future__ import annotations

import gc
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig, Machine, ModelFacts, Resolved, resolve
from penstock.serving import room
from penstock.serving.room import RESERVE, Room, one_name, start_bytes

GIB = 1 << 30


def test_others_sleep_only_for_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(room, "free_bytes", lambda device: 5 * GIB)
    for wanted in (2 * GIB, 5 * GIB - RESERVE, 7 * GIB):
        shared = Room("cpu", tmp_path, asked.append)
        shared.make(wanted)
        shared.leave()
    assert asked == [2 * GIB + RESERVE]


def test_an_engine_waits_until_another_has_taken_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [10 * GIB]
    monkeypatch.setattr(room, "free_bytes", lambda device: free[0])
    asked: list[int] = []
    first, second = (Room("cuda", tmp_path, asked.append) for _ in range(2))
    first.make(8 * GIB)
    first.make(8 * GIB)  # the same engine may ask again during its turn
    waiting = Thread(target=second.make, args=[8 * GIB])
    waiting.start()
    Room("cpu", tmp_path, asked.append).make(8 * GIB)  # another device does not wait
    assert waiting.is_alive() and not asked
    free[0] -= 8 * GIB
    first.leave()
    waiting.join()
    assert asked == [6 * GIB + RESERVE], "it has seen what the first one took"


def test_a_turn_ends_with_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 10 * GIB)
    Room("cuda", tmp_path, lambda num_bytes: None).make(1)
    gc.collect()  # closes its files, as the end of the process does
    Room("cuda", tmp_path, lambda num_bytes: None).make(1)


@pytest.mark.parametrize(("device", "name"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")])
def test_a_device_has_one_name(device: str, name: str) -> None:
    assert one_name(device) == name


def settings_of(device: str, generates: bool) -> Resolved:
    config = EngineConfig(device=device, kv_cache_gb=3.0)
    machine = Machine(cpus=1, cuda=True, bf16=True)
    return resolve(config, ModelFacts(max_model_len=64, generates=generates), machine)


@pytest.mark.parametrize(
    ("device", "generates", "expected"), [("cuda", True, 3 * GIB), ("cuda", False, 0), ("cpu", True, 0)]
)
def test_an_engine_that_starts_needs_its_kv_cache_where_it_is_taken_at_once(
    device: str, generates: bool, expected: int
) -> None:
    spec = describe(EngineConfig(device="null"))
    weights = room.weight_bytes(spec)
    settings = msgspec.structs.replace(settings_of(device, generates), chunked=False)
    assert start_bytes(spec, settings) == weights + expected

"""Rank 0 and another rank keep the same adapters. The other rank is a thread here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.errors import EngineUnavailable, ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.layers.lora import AdapterSites
from penstock.layers.parallel import Shard
from penstock.models.registry import build_model
from penstock.runner.base import AdapterInfo
from penstock.runner.parallel.adapter_orders import OtherReaders
from penstock.runner.parallel.adapters import ParallelAdapterPool, RankAdapters
from penstock.runner.parallel.plans import SlotOrders
from tests.helpers import ints
from tests.parallel.threads import NamedSource, ThreadGroup, run_ranks
from tests.runner.adapter_folders import write
from tests.runner.small_models import CPU, SIZES

NUM_SLOTS, ON_HOST = 2, 3


@dataclass
class Pair:
    """Rank 0's pool, and rank 1 with its end of the socket."""

    pool: ParallelAdapterPool
    rank: RankAdapters
    theirs: socket.socket

    def run(self, *adapters: int) -> SlotOrders | None:
        """Plan a step with these adapters. Returns the orders that both ranks apply."""
        with torch.inference_mode():
            self.pool.plan(ints(adapters))
            if (orders := self.pool.take_orders()) is not None:
                self.rank.apply(orders)
        return orders

    def assert_alike(self) -> None:
        """Check that both ranks have the same adapters in host memory."""
        assert {each.copy for each in self.pool._host.values()} == set(self.rank._copies)


def build(group: ThreadGroup) -> AdapterSites:
    build = LayerBuilder(NamedSource())
    build.shard = Shard(group)
    build.adapters = AdapterSites(NUM_SLOTS, 8)
    build_model("BertModel", SIZES, build)
    return build.adapters


@contextmanager
def connected() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    sites = run_ranks(2, build)
    pool = ParallelAdapterPool(sites[0], ON_HOST, torch.float32, CPU, OtherReaders([ours]))
    rank = RankAdapters(sites[1], torch.float32, CPU, theirs, Lock())
    with ThreadPoolExecutor(1) as thread, ours, theirs:
        following = thread.submit(rank.follow)
        try:
            yield Pair(pool, rank, theirs)
        finally:
            pool.close()
            following.result(30)


def loaded(future: Future[AdapterInfo]) -> AdapterInfo:
    return future.result(30)


def test_a_rank_keeps_drops_and_reads_again_what_rank_0_does(tmp_path: Path) -> None:
    with connected() as pair:
        for number in range(5):
            folder = write(tmp_path / str(number), number)
            assert loaded(pair.pool.load(number, folder, str(number))).rank == 2
        pair.run(4)  # drops are sent with the next step
        pair.assert_alike()
        for adapters in ([0, 1], [2], [3, 4], [4], [0, -1], [1, 2]):
            orders = pair.run(*adapters)
            pair.assert_alike()
            written = [] if orders is None else orders.writes.reshape(-1, 2)[:, 1].tolist()
            assert len(written) == len(set(written)) <= NUM_SLOTS
        assert pair.run(1, 2) is None  # nothing has changed
        slots = pair.pool._slots
        name = "encoder.layer.0.attention.self.query"
        for adapter, slot in slots.items():
            layers = [sites.layers[name][0] for sites in (pair.pool._sites, pair.rank.sites) if sites]
            ups = torch.cat([layer._low.up[slot, : layer.part_size(0), :2] for layer in layers if layer._low])
            np.testing.assert_allclose(ups, whole_up(tmp_path / str(adapter), name))


def whole_up(folder: Path, name: str) -> torch.Tensor:
    tensors = load_file(folder / "adapter_model.safetensors")
    return tensors[f"base_model.model.{name}.lora_B.weight"] * 2  # alpha / rank


def test_an_unloaded_adapter_leaves_the_rank_with_the_next_step(tmp_path: Path) -> None:
    with connected() as pair:
        for number in range(2):
            loaded(pair.pool.load(number, write(tmp_path / str(number), number), str(number)))
        pair.run(0)
        pair.pool.in_use = lambda: {0}
        pair.pool.unload(0)
        assert len(pair.rank._copies) == 2
        pair.pool.in_use = tuple
        assert pair.pool.stats().num_on_host == 1
        pair.run(1)
        pair.assert_alike()


def test_what_one_of_them_refuses_is_with_neither(tmp_path: Path) -> None:
    with connected() as pair:
        with pytest.raises(ModelLoadError, match="rank 9; at most 8"):
            loaded(pair.pool.load(2, write(tmp_path / "b", 1, rank=9), "b"))
        pair.rank.sites.max_rank = 1
        with pytest.raises(ModelLoadError, match="rank 1: the adapter 'c' has rank 2; at most 1"):
            loaded(pair.pool.load(3, write(tmp_path / "c", 1), "c"))
        pair.rank.sites.max_rank = 8
        pair.pool._sites.max_rank = 1  # type: ignore[union-attr]
        with pytest.raises(ModelLoadError, match=r"^the adapter 'd' has rank 2; at most 1"):
            loaded(pair.pool.load(4, write(tmp_path / "d", 1), "d"))
        pair.pool._sites.max_rank = 8  # type: ignore[union-attr]
        assert pair.pool.stats()[:3] == (0, 0, 0)
        loaded(pair.pool.load(5, write(tmp_path / "e", 1), "e"))
        pair.run(5)
        pair.assert_alike()


def test_a_rank_has_room_before_an_adapter_is_loaded(tmp_path: Path) -> None:
    with connected() as pair:
        (layer, _) = pair.rank.sites.layers["encoder.layer.0.attention.self.query"]
        loaded(pair.pool.load(0, write(tmp_path / "a", 1), "a"))
        assert layer._low is not None

        def fail(weights: object) -> None:
            raise RuntimeError("no memory is left")

        pair.rank.sites.reserve = fail  # type: ignore[method-assign]
        with pytest.raises(Exception, match="rank 1: RuntimeError: no memory is left"):
            loaded(pair.pool.load(1, write(tmp_path / "b", 2), "b"))
        pair.run(0)
        pair.assert_alike()


def test_a_load_that_waits_for_a_rank_ends_with_it(tmp_path: Path) -> None:
    with connected() as pair:
        with pair.rank._step_lock:  # as if the rank ran a step that never ends
            loading = pair.pool.load(0, write(tmp_path / "a", 1), "a")
            pair.theirs.shutdown(socket.SHUT_RDWR)
            with pytest.raises(EngineUnavailable, match="rank 1 of this engine is gone"):
                loaded(loading)
        assert pair.pool.stats()[:3] == (0, 0, 0)

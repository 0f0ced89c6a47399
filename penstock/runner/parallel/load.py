"""Load a model on several ranks. This process is rank 0."""

from __future__ import annotations

import logging
from typing import cast

import msgspec
import torch

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.errors import ConfigError
from penstock.layers.parallel import Shard
from penstock.models.registry import CausalModel, Model
from penstock.runner.load import Loaded, warn_of_unmarked
from penstock.runner.load_kv_cache import allocate_cache, count_blocks
from penstock.runner.load_warmup import warm_up_runner
from penstock.runner.load_weights import adapter_sites, build_weights, num_vectors
from penstock.runner.parallel.adapter_orders import OtherReaders
from penstock.runner.parallel.adapters import ParallelAdapterPool
from penstock.runner.parallel.group import RankGroup
from penstock.runner.parallel.processes import Ranks
from penstock.runner.parallel.runner import ParallelGenerator, ParallelRunner
from penstock.runner.stopwatch import Stopwatch
from penstock.types import Task

log = logging.getLogger("penstock.load")


def load_parallel(spec: ModelSpec, settings: Resolved) -> Loaded:
    devices = rank_devices(settings)
    settings = msgspec.structs.replace(settings, device=devices[0])
    group = RankGroup(0, len(devices), prepare_device(settings), uses_nccl=uses_nccl(devices))
    ranks = Ranks(spec, settings, devices, uses_nccl=group.uses_nccl)
    try:
        return _load(spec, settings, ranks, group)
    except BaseException:
        ranks.stop()
        group.close()
        ranks.close()
        raise


def _load(spec: ModelSpec, settings: Resolved, ranks: Ranks, group: RankGroup) -> Loaded:
    watch = Stopwatch()
    device, dtype = group.device, getattr(torch, settings.dtype)
    with watch.timed("weights"):
        model, pooler = build_weights(spec, settings, device, Shard(group))
    _check_no_tower(model)
    generator = cache = None
    with watch.timed("other ranks"):
        blocks = min([own_blocks(model, settings, device), *ranks.wait_until_built()])
        ranks.start(blocks)
        group.connect(ranks.meeting)
    with watch.timed("memory"):
        if settings.generates:
            generator = ParallelGenerator(model.heads[Task.GENERATE], settings.max_num_seqs, group)
        if blocks:
            cache = allocate_cache(cast(CausalModel, model), settings, dtype, device, blocks)
    runner = ParallelRunner(model, pooler, settings.pipeline_depth, group, ranks, cache, generator)
    adapters = runner.adapters = _adapter_pool(model, settings, ranks, device)
    warm_up_runner(runner, spec, settings, blocks, watch, precompiles=False)
    log.info("%d ranks %s", group.size, watch)
    warn_of_unmarked(spec)
    return Loaded(runner, blocks, num_vectors(pooler), adapters=adapters, watch=ranks.watch)


def _adapter_pool(
    model: Model, settings: Resolved, ranks: Ranks, device: torch.device
) -> ParallelAdapterPool | None:
    """The adapters that requests may choose; None if the model takes none."""
    if (sites := adapter_sites(model)) is None:
        return None
    others = OtherReaders(ranks.adapter_sockets)
    return ParallelAdapterPool(sites, settings.max_cpu_loras, getattr(torch, settings.dtype), device, others)


def rank_devices(settings: Resolved) -> list[str]:
    """The device of each rank."""
    size, device = settings.tensor_parallel_size, settings.device
    if settings.devices:
        return list(settings.devices)
    if not device.startswith("cuda"):
        return [device] * size
    first = int(device.partition(":")[2] or 0)
    return [f"cuda:{number}" for number in range(first, first + size)]


def uses_nccl(devices: list[str]) -> bool:
    """Whether every rank has a GPU of its own."""
    return all(device.startswith("cuda") for device in devices) and len(set(devices)) == len(devices)


def prepare_device(settings: Resolved) -> torch.device:
    device = torch.device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(settings.threads)
    else:
        torch.cuda.set_device(device)
    return device


def own_blocks(model: Model, settings: Resolved, device: torch.device) -> int:
    """The KV cache blocks that this rank has room for; 0 if the model needs none."""
    if not (settings.chunked or settings.generates):
        return 0
    return count_blocks(cast(CausalModel, model), settings, getattr(torch, settings.dtype), device)


def _check_no_tower(model: Model) -> None:
    if getattr(model, "vision", None) is not None:
        raise ConfigError(
            "models with a vision tower run on one GPU; use --data-parallel-size for several",
            param="tensor_parallel_size",
        )

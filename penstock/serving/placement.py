"""Placement of a model's engines: which GPUs or cores each engine gets.

`place` is pure. `Hardware` detects GPUs and cores without torch, also in containers that hide parts of /sys.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from penstock.config import ModelConfig
from penstock.errors import ConfigError

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices and cores of one engine. Empty: the device of its settings, and all cores."""

    devices: tuple[str, ...] = ()  # one per tensor-parallel rank
    cpus: tuple[int, ...] = ()


class Hardware:
    """The GPUs and cores that this process may use."""

    @cached_property
    def has_gpu(self) -> bool:
        return Path("/dev/nvidiactl").exists()

    @cached_property
    def num_gpus(self) -> int:
        """The number of GPUs as CUDA counts them, within CUDA_VISIBLE_DEVICES."""
        count = ctypes.c_int(0)
        with contextlib.suppress(OSError, AttributeError):
            driver = ctypes.CDLL("libcuda.so.1")
            if driver.cuInit(0) == 0:
                driver.cuDeviceGetCount(ctypes.byref(count))
        return count.value

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The cores of each NUMA node. Hardware threads of one physical core are adjacent."""
        return numa_nodes(allowed_cpus())


def allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def numa_nodes(allowed: frozenset[int], system: Path = SYSTEM) -> tuple[tuple[int, ...], ...]:
    """Group the allowed cores by NUMA node. Cores without a known node form one more node."""
    nodes: list[tuple[int, ...]] = []
    for folder in sorted(system.glob("node/node[0-9]*"), key=lambda each: int(each.name[4:])):
        cores = frozenset(_read_cpus(folder / "cpulist")) & allowed
        nodes.append(_side_by_side(cores, system))
    nodes = [node for node in nodes if node]
    rest = allowed.difference(*nodes)
    if rest:
        nodes.append(_side_by_side(rest, system))
    return tuple(nodes)


def _side_by_side(cores: frozenset[int], system: Path) -> tuple[int, ...]:
    """Sort cores by number, with the hardware threads of one physical core adjacent."""

    def key(core: int) -> tuple[int, int]:
        siblings = _read_cpus(system / f"cpu/cpu{core}/topology/thread_siblings_list")
        return min(siblings, default=core), core

    return tuple(sorted(cores, key=key))


def _read_cpus(file: Path) -> list[int]:
    """Read a list of numbers such as 0-3,8; empty if it cannot be read."""
    numbers: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for part in file.read_text().strip().split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def place(config: ModelConfig, hardware: Hardware, used: Counter[str]) -> list[Placement]:
    """Choose what each engine of a model runs on. `used` counts the engines of other models on each GPU."""
    device = config.engine.device
    if device.startswith("cuda") or (device == "auto" and hardware.has_gpu):
        return [each for each in _on_gpus(config, hardware, used) for _ in range(config.engines_per_gpu)]
    if config.engines_per_gpu > 1:
        raise ConfigError(
            f"engines_per_gpu is {config.engines_per_gpu}, but the model does not run on a GPU; set "
            "data_parallel_size to start several engines on a CPU",
            param="engines_per_gpu",
        )
    size = config.data_parallel_size
    if device == "null":
        return [Placement()] * (1 if isinstance(size, str) else size)
    num_engines = len(hardware.nodes) if isinstance(size, str) else size
    return [Placement(cpus=cores) for cores in split_cores(hardware.nodes, num_engines)]


def _on_gpus(config: ModelConfig, hardware: Hardware, used: Counter[str]) -> list[Placement]:
    device, ranks, size = config.engine.device, config.engine.tensor_parallel_size, config.data_parallel_size
    if device.startswith("cuda:"):
        if size != 1:
            raise ConfigError(
                f"device {device} names one GPU, and data_parallel_size is {size}; use device cuda, and "
                "choose among the GPUs with CUDA_VISIBLE_DEVICES",
                param="device",
            )
        return [Placement(devices=_following(device, ranks))]
    if size == ranks == 1 and not used:
        return [Placement()]  # the first GPU, without querying the driver
    groups = [range(first, first + ranks) for first in range(0, hardware.num_gpus - ranks + 1, ranks)]
    num_engines = max(1, len(groups)) if isinstance(size, str) else size
    if num_engines > len(groups):
        if num_engines * ranks == 1:
            return [Placement()]  # the engine reports what is wrong with the device
        most = f"data_parallel_size up to {len(groups)}" if groups else "fewer"
        raise ConfigError(
            f"{_wanted(num_engines, ranks)} needs {num_engines * ranks} GPUs, and this machine has "
            f"{hardware.num_gpus}; use {most}",
            param="data_parallel_size" if num_engines > 1 else "tensor_parallel_size",
        )
    groups.sort(key=lambda group: (sum(used[f"cuda:{gpu}"] for gpu in group), group.start))
    chosen = sorted(groups[:num_engines], key=lambda group: group.start)
    return [Placement(devices=tuple(f"cuda:{gpu}" for gpu in group)) for group in chosen]


def _wanted(size: int | str, ranks: int) -> str:
    parts = [f"data_parallel_size {size}"] if size != 1 else []
    parts += [f"tensor_parallel_size {ranks}"] if ranks != 1 else []
    return " with ".join(parts)


def _following(device: str, ranks: int) -> tuple[str, ...]:
    """One GPU per rank, from `device` on. Empty if there is one rank or the name has no number."""
    number = device.removeprefix("cuda:")
    if ranks == 1 or not number.isdecimal():
        return ()  # use the engine's own setting
    return tuple(f"cuda:{int(number) + rank}" for rank in range(ranks))


def split_cores(nodes: Sequence[Sequence[int]], num_engines: int) -> list[tuple[int, ...]]:
    """Divide cores over engines: whole nodes or parts of one node if the numbers allow it.

    A single engine may use all cores. If there are more engines than cores, several engines share a core.
    """
    if num_engines == 1:
        return [()]
    cores = [core for node in nodes for core in node]
    if num_engines > len(cores):
        return [(cores[index % len(cores)],) for index in range(num_engines)]
    if num_engines % len(nodes) == 0 and all(len(node) * len(nodes) >= num_engines for node in nodes):
        return [part for node in nodes for part in _parts(node, num_engines // len(nodes))]
    return _parts(cores, num_engines)


def _parts(cores: Sequence[int], num_parts: int) -> list[tuple[int, ...]]:
    """Split into consecutive parts whose sizes differ by at most one."""
    cuts = [len(cores) * number // num_parts for number in range(num_parts + 1)]
    return [tuple(cores[begin:end]) for begin, end in pairwise(cuts)]

"""Record the memory of a server's processes, and of the device, while a load runs."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from checked_load import ENGINE, model_number, table
from soak import device_mib, processes, resident_mib

MIN_SAMPLES = 5  # per process
_ROLES = {"penstock.api.process": "API", "penstock": "supervisor"}


class MemoryRow(NamedTuple):
    """Resident MiB of a process: medians of the first and the last fifth of its samples, and the peak."""

    name: str  # its module and its process id
    first: float
    last: float
    peak: float

    @property
    def role(self) -> str:
        return self.name.split()[0]


@dataclass
class Memory:
    """Memory over time: resident memory of every process, by role and id, and memory in use on the device."""

    server_pid: int
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def sample(self) -> None:
        found: dict[str, float] = {}
        for pid, module in processes(self.server_pid):
            with suppress(OSError):
                if (role := _role(pid, module)) is not None:
                    found[f"{role} {pid}"] = resident_mib(pid)
        if (device := device_mib()) is not None:
            found["device"] = device
        self.samples.append((time.monotonic(), found))

    async def watch(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(1.0)

    def rows(self, warm_s: float) -> list[MemoryRow]:
        """A row for each process with at least `MIN_SAMPLES` samples after `warm_s`."""
        rows = []
        for name in dict.fromkeys(name for _, found in self.samples for name in found):
            values = [found[name] for at, found in self.samples if at >= warm_s and name in found]
            if len(values) >= MIN_SAMPLES:
                size = max(2, len(values) // 5)
                first, last = statistics.median(values[:size]), statistics.median(values[-size:])
                rows.append(MemoryRow(name, first, last, max(values)))
        return rows


def _role(pid: int, module: str) -> str | None:
    """The role of a process; None for an engine without a model."""
    if module != ENGINE:
        return _ROLES.get(module, module)
    return None if (number := model_number(pid)) is None else f"engine-{number}"


def memory_complaints(rows: list[MemoryRow], bound_mib: float) -> list[str]:
    """Check that no process ended with more memory than the first process of its role had when warm. An
    engine that replaces another begins with less."""
    warm = {row.role: row.first for row in reversed(rows)}
    return [
        f"{row.name} ends with {row.last:.0f} MiB; {warm[row.role]:.0f} + {bound_mib:g} are allowed"
        for row in rows
        if row.last > warm[row.role] + bound_mib
    ]


def memory_table(rows: list[MemoryRow]) -> str:
    return table(
        ["process", "first MiB", "last MiB", "peak MiB"],
        [[row.name, *(f"{value:,.0f}" for value in row[1:])] for row in rows],
    )

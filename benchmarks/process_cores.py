"""Reserve cores for the engines of a server, so that API processes and load clients cannot delay them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

ENGINE = "penstock.serving.engine_process"


@contextlib.contextmanager
def keep_cores(processes: Sequence[tuple[int, str]], cores_per_engine: int) -> Iterator[None]:
    """Within the block, every engine among `processes` (pid, module) has its own cores. The other processes,
    this process and its children have the rest. With 0 cores, or too few, nothing changes."""
    all_cores = sorted(os.sched_getaffinity(0))
    engines = [pid for pid, module in processes if module == ENGINE]
    num_taken = cores_per_engine * len(engines)
    if not 0 < num_taken < len(all_cores):
        if cores_per_engine:
            print(f"  {len(engines)} engines cannot have {cores_per_engine} of {len(all_cores)} cores each")
        yield
        return
    rest = all_cores[num_taken:]
    own = {pid: all_cores[at * cores_per_engine :][:cores_per_engine] for at, pid in enumerate(engines)}
    for pid, _ in processes:
        pin_process(pid, own.get(pid, rest))
    os.sched_setaffinity(0, rest)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def pin_process(pid: int, cores: Sequence[int]) -> None:
    """Run all threads of a process on these cores. Threads that start later inherit them."""
    with contextlib.suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(thread.name), cores)

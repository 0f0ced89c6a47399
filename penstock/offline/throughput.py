"""Measurement of the throughput of an engine in this process.

`penstock plan --measure` and `benchmarks/gpu_rates.py` use it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from penstock.errors import BadValue
from penstock.offline.engine import Engine
from penstock.types import Task

Row = str | Sequence[int]
MAX_ROWS_PER_CALL = 2048
_CALLERS = 3  # calls in flight: the engine runs one while the others are tokenised or collected
_MAX_CALL_S = 1.0  # duration of a call, or a third of the measured time if that is less
_MAX_ROUNDS = 8
_FASTER = 1.1  # speed-up over the previous round that shows that the engine is still warming up
_LOWEST_ID, _HIGHEST_ID = 1000, 20_000  # random token ids; low ids are often special tokens


@dataclass(frozen=True, slots=True)
class Throughput:
    """The work that an engine did in a measured time."""

    rows: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds


def random_rows(engine: Engine, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Make rows of random token ids with these lengths. Equal rows are unlikely."""
    highest = min(_HIGHEST_ID, engine.spec.vocab_size)
    lowest = min(_LOWEST_ID, highest // 2)
    rng = np.random.default_rng(seed)
    return [rng.integers(lowest, highest, length).tolist() for length in lengths]


def measure(engine: Engine, rows: Sequence[Row], lengths: Sequence[int], seconds: float) -> Throughput:
    """Run `rows`, whose token counts are `lengths`, repeatedly for about `seconds`.

    Open the engine with `share_identical=False`; otherwise equal rows in flight are computed once. At least
    one round of the same duration runs before the measured one, and rounds are repeated until the engine gets
    no faster: new shapes compile kernels and capture graphs.
    """
    run = _task(engine)
    size = _rows_per_call(run, rows, min(_MAX_CALL_S, seconds / 3))
    starts = count()
    found = Throughput(0, 0, seconds)
    for _ in range(_MAX_ROUNDS):
        before = found
        began = time.perf_counter()
        done = _run_callers(run, rows, size, starts, seconds)
        elapsed = time.perf_counter() - began
        tokens = sum(sum(_window(lengths, start, size)) for start in done)
        found = Throughput(size * len(done), tokens, elapsed)
        if found.tokens_per_s < _FASTER * before.tokens_per_s:
            break
    return found


def _run_callers(
    run: Callable[[list[Any]], object], rows: Sequence[Row], size: int, starts: Iterator[int], seconds: float
) -> list[int]:
    """Call `run` from several threads for about `seconds`. Returns the index of each call's first row."""
    done: list[int] = []
    failures: list[BaseException] = []
    deadline_s = time.perf_counter() + seconds

    def work() -> None:
        try:
            while True:  # at least once, however busy the machine is
                start = next(starts) * size % len(rows)
                run(_window(rows, start, size))
                done.append(start)
                if time.perf_counter() >= deadline_s or failures:
                    return
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=work) for _ in range(_CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    if failures:
        raise failures[0]
    return done


def _rows_per_call(run: Callable[[list[Any]], object], rows: Sequence[Row], long_s: float) -> int:
    """Find a number of rows for which a call takes at least `long_s`. This also warms the engine up."""
    size = 8
    while True:
        size = min(size, MAX_ROWS_PER_CALL)
        began = time.perf_counter()
        run(_window(rows, 0, size))
        if time.perf_counter() - began >= long_s or size == MAX_ROWS_PER_CALL:
            return size
        size *= 2


def _window(items: Sequence[Any], start: int, size: int) -> list[Any]:
    """Return `size` items from `start`, wrapping around at the end."""
    return [items[(start + at) % len(items)] for at in range(size)]


def _task(engine: Engine) -> Callable[[list[Any]], object]:
    """Choose the engine method for the model's main task."""
    spec = engine.spec
    order = [Task.EMBED, Task.TOKEN_EMBED, Task.SPARSE, Task.CLASSIFY]
    if spec.late is not None:
        order.insert(0, Task.TOKEN_EMBED)
    elif spec.sparse is not None and spec.sparse.kind == "splade":
        order.insert(0, Task.SPARSE)
    elif spec.score is not None:
        order.insert(0, Task.CLASSIFY)
    for task in order:
        if task in spec.tasks:
            run = getattr(engine, task.value)
            return partial(run, truncate_prompt_tokens=-1, progress=False)
    raise BadValue(f"{spec.name} has no task that can be measured here; give --rate", param="--measure")

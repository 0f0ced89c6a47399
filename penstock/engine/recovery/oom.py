"""Out of memory: run a step's rows again in two halves, and keep steps smaller for a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import Ints


def halves(scheduled: Sequence[ScheduledRows]) -> tuple[list[ScheduledRows], list[ScheduledRows]] | None:
    """Two parts with about the same number of tokens, to be run in this order. None: a single row that cannot
    be divided.

    Queries come before the documents that are scored against them. Only a row with a block table can be
    divided.
    """
    scheduled = [_queries_first(entry) for entry in scheduled]
    lengths = np.concatenate([num_scheduled_tokens(entry) for entry in scheduled])
    if len(lengths) < 2:
        return _halve_row(scheduled)
    ends = np.cumsum(lengths)
    at = int(np.argmin(np.abs(2 * ends[:-1] - ends[-1]))) + 1
    first: list[ScheduledRows] = []
    second: list[ScheduledRows] = []
    for entry in scheduled:
        size = len(entry.rows)
        if at >= size:
            first.append(entry)
        elif at <= 0:
            second.append(entry)
        else:  # cached documents are scored when all queries have run
            first.append(select(entry, slice(0, at))._replace(cached_documents=None))
            second.append(select(entry, slice(at, size)))
        at -= size
    return first, second


def num_scheduled_tokens(entry: ScheduledRows) -> Ints:
    """[rows], how many tokens of each row are scheduled."""
    if entry.begins is not None and entry.ends is not None:
        return entry.ends - entry.begins
    return entry.request.lengths[entry.rows]


def _queries_first(entry: ScheduledRows) -> ScheduledRows:
    if entry.request.pairs is None or len(entry.rows) < 2:
        return entry
    order = np.argsort(entry.rows >= entry.request.num_queries, kind="stable")
    return select(entry, order.astype(np.int32))


def select(entry: ScheduledRows, index: slice | Ints) -> ScheduledRows:
    """Some of the scheduled rows, by index."""
    return entry._replace(
        rows=entry.rows[index],
        begins=None if entry.begins is None else entry.begins[index],
        ends=None if entry.ends is None else entry.ends[index],
        tables=tuple(entry.tables[i] for i in np.arange(len(entry.rows))[index]) if entry.tables else (),
    )


def _halve_row(
    scheduled: Sequence[ScheduledRows],
) -> tuple[list[ScheduledRows], list[ScheduledRows]] | None:
    """Divide the tokens of the only row into two chunks. Entries without rows only score cached documents,
    and go last."""
    (entry,) = [entry for entry in scheduled if len(entry.rows)] or (None,)
    if entry is None or entry.begins is None or entry.ends is None or entry.tables[0] is None:
        return None
    middle = (entry.begins + entry.ends) // 2
    if middle[0] == entry.begins[0]:
        return None
    others = [other for other in scheduled if other is not entry]
    return [entry._replace(ends=middle, cached_documents=None)], [entry._replace(begins=middle), *others]


@dataclass(slots=True)
class TokenBackoff:
    """A token budget that is halved when memory runs out, and doubled again after enough good steps."""

    full_tokens: int
    max_tokens: int
    num_good_steps: int = 0

    PATIENCE = 64  # good steps before the budget grows

    @classmethod
    def of(cls, max_tokens: int) -> TokenBackoff:
        return cls(max_tokens, max_tokens)

    @property
    def is_reduced(self) -> bool:
        return self.max_tokens < self.full_tokens

    def ran_out(self, num_tokens: int) -> None:
        """A step of this many tokens did not fit."""
        self.max_tokens = max(1, min(self.max_tokens, num_tokens) // 2)
        self.num_good_steps = 0

    def succeeded(self) -> None:
        self.num_good_steps += 1
        if self.num_good_steps >= self.PATIENCE:
            self.max_tokens, self.num_good_steps = min(self.full_tokens, 2 * self.max_tokens), 0

"""What helps when a step needs more memory than the device has: the step in two parts, and smaller steps for
a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.scheduler.scheduler import Budget, ScheduledRows
from penstock.types import Ints


def halves(shares: Sequence[ScheduledRows]) -> tuple[list[ScheduledRows], list[ScheduledRows]] | None:
    """Two parts of about as many tokens, to be run in this order; None for a row that cannot be divided.

    Queries come before the documents that are scored against them. A row is cut only where its keys are kept.
    """
    shares = [_queries_first(share) for share in shares]
    lengths = np.concatenate([tokens_of_rows(share) for share in shares])
    if len(lengths) < 2:
        return _cut(shares)
    ends = np.cumsum(lengths)
    at = int(np.argmin(np.abs(2 * ends[:-1] - ends[-1]))) + 1
    first: list[ScheduledRows] = []
    second: list[ScheduledRows] = []
    for share in shares:
        size = len(share.rows)
        if at >= size:
            first.append(share)
        elif at <= 0:
            second.append(share)
        else:  # documents that lie in the store are scored when all queries have been run
            first.append(part_of(share, slice(0, at))._replace(stored=None))
            second.append(part_of(share, slice(at, size)))
        at -= size
    return first, second


def tokens_of_rows(share: ScheduledRows) -> Ints:
    """How many tokens of each of its rows a share runs."""
    if share.begins is not None and share.ends is not None:
        return share.ends - share.begins
    return share.request.lengths[share.rows]


def _queries_first(share: ScheduledRows) -> ScheduledRows:
    if share.request.pairs is None or len(share.rows) < 2:
        return share
    order = np.argsort(share.rows >= share.request.num_queries, kind="stable")
    return part_of(share, order.astype(np.int32))


def part_of(share: ScheduledRows, which: slice | Ints) -> ScheduledRows:
    """Some places of a share."""
    places = np.arange(len(share.rows))[which]
    return share._replace(
        rows=share.rows[which],
        begins=None if share.begins is None else share.begins[which],
        ends=None if share.ends is None else share.ends[which],
        tables=tuple(share.tables[place] for place in places) if share.tables else (),
    )


def _cut(shares: Sequence[ScheduledRows]) -> tuple[list[ScheduledRows], list[ScheduledRows]] | None:
    """The tokens of one row in two steps. Shares without rows only read what is stored: they go last."""
    (share,) = [share for share in shares if len(share.rows)] or (None,)
    if share is None or share.begins is None or share.ends is None or share.tables[0] is None:
        return None
    middle = (share.begins + share.ends) // 2
    if middle[0] == share.begins[0]:
        return None
    others = [other for other in shares if other is not share]
    return [share._replace(ends=middle, stored=None)], [share._replace(begins=middle), *others]


@dataclass(slots=True)
class Pressure:
    """The token budget: halved when memory runs out, doubled again after enough steps that went well."""

    full: int
    now: int
    good_steps: int = 0

    PATIENCE = 64

    @classmethod
    def of(cls, budget: Budget) -> Pressure:
        return cls(budget.tokens, budget.tokens)

    def ran_out(self, tokens: int) -> None:
        """A step of so many tokens did not fit."""
        self.now = max(1, min(self.now, tokens) // 2)
        self.good_steps = 0

    def went_well(self) -> None:
        self.good_steps += 1
        if self.good_steps >= self.PATIENCE:
            self.now, self.good_steps = min(self.full, 2 * self.now), 0

"""The few shapes that steps are padded to where they are replayed, and where their integers lie.

A graph is captured for one shape and replayed for every step that fits it: rows beyond a step's own are
empty, and tokens beyond them belong to no row, so that nobody reads what is computed for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.types import Ints, LengthGroup, StepPlan

# Small products take as long as twice their tokens; large ones do not, so shapes lie closer there.
TOKENS = (
    *(16, 32, 64, 128, 256),
    *range(384, 1025, 128),
    *range(1280, 4097, 256),
    *range(4608, 8193, 512),
    *range(9216, 16385, 1024),
)
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
LONGEST = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REMEMBERED = (4096, 16384, 65536)  # keys of earlier steps, of all rows
_TILE = 64  # tokens; attention shares rows out between programs in such pieces
_FEW = 512  # pieces; so many cost nothing even if most are empty


class Bucket(NamedTuple):
    tokens: int
    rows: int
    longest: int  # tokens of the longest row


def bucket_of(tokens: int, rows: int, longest: int) -> Bucket | None:
    """The smallest bucket that holds such a step. None: it is too large, or rows of too different lengths
    would leave most of attention's programs without work."""
    if tokens > TOKENS[-1] or rows > ROWS[-1] or not rows:
        return None
    size = TOKENS[bisect_left(TOKENS, tokens)]
    count = min(ROWS[bisect_left(ROWS, rows)], size)
    length = size if rows == 1 else min(LONGEST[bisect_left(LONGEST, longest)], size)
    pieces = count * -(-length // _TILE)
    if pieces > max(_FEW, 4 * (size // _TILE + count)):
        return None
    return Bucket(size, count, length)


def memory_of(remembered: int) -> int | None:
    """Room for what a step reads of earlier ones. None: it is too much."""
    at = bisect_left(REMEMBERED, remembered)
    return REMEMBERED[at] if at < len(REMEMBERED) else None


class NotCapturable(RuntimeError):
    """The model needs to know the step itself."""


class NoGroups(tuple[LengthGroup, ...]):
    """In place of the groups of a step that is not known yet. Whoever asks for them cannot be captured."""

    def __iter__(self) -> Iterator[LengthGroup]:
        raise NotCapturable("the model works on rows of equal length, group after group")


_OF_MEMORY = ("cu_keys", "token_slots", "read_slots")
_ENDS = ("cu_lengths", "cu_keys")
_FILL = {"token_slots": -1}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a step's arrays lie in one buffer of integers, each with room for the bucket's."""

    bucket: Bucket
    types: bool
    skip: bool
    memory: int | None = None  # remembered keys; None: nothing is read of earlier steps nor kept
    places: dict[str, tuple[int, int]] = field(init=False)  # name → where it begins, and its room
    size: int = field(init=False)

    def __post_init__(self) -> None:
        tokens, rows, _ = self.bucket
        rooms = {"cu_lengths": rows + 1, "lengths": rows, "token_ids": tokens, "positions": tokens}
        if self.types:
            rooms["type_ids"] = tokens
        if self.skip:
            rooms["skip"] = rows
        if self.memory is not None:
            rooms |= {"cu_keys": rows + 1, "token_slots": tokens, "read_slots": self.memory}
        places, at = {}, 0
        for name, room in rooms.items():
            places[name] = (at, room)
            at += -(-room // 4) * 4  # so that each begins at a multiple of 16 bytes
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "size", at)

    def write(self, out: Ints, plan: StepPlan) -> None:
        """The step's integers, and behind each array what makes the rest of it empty: no length, and the
        first token of the vocabulary, in the first place, which is kept nowhere."""
        for name, (begin, room) in self.places.items():
            array: Ints | None = getattr(plan.kv if name in _OF_MEMORY else plan, name)
            if array is None:  # the layout has room for what this step has none of
                out[begin : begin + room] = 0
                continue
            end = begin + len(array)
            out[begin:end] = array
            out[end : begin + room] = array[-1] if name in _ENDS else _FILL.get(name, 0)


def largest_size() -> int:
    """Of any layout."""
    return Layout(Bucket(TOKENS[-1], ROWS[-1], LONGEST[-1]), True, True, REMEMBERED[-1]).size

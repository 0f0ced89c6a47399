"""Prompt lookup: proposes the tokens that followed an earlier occurrence of a sequence's last n-gram.

Answers that quote their prompt, such as answers about retrieved documents, repeat long runs of it. A hash
index maps each n-gram of a slot to the token after its latest occurrence. So proposals for all sequences
together cost a few NumPy calls, however long the sequences are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.slots import SlotTable
from penstock.types import Ints, runs

MAX_BUCKETS = 1 << 15  # per slot and n-gram size; on a collision the newer n-gram replaces the older one
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HASH_SHIFT = np.uint64(40)  # only the upper bits of a product are well mixed


class Proposals(NamedTuple):
    """Tokens that may follow each sequence."""

    token_ids: Ints  # [sequences, num_tokens]
    counts: Ints  # [sequences], how many of the tokens are proposed
    seconds: float = 0.0  # time to make the proposals
    catch_up_s: float = 0.0  # part of `seconds` spent once per sequence, on reading its known tokens


class PromptLookup:
    """Proposes tokens for the slots of a `SlotTable` from their own known tokens."""

    is_free = True

    def __init__(self, slots: SlotTable, num_tokens: int, min_ngram: int, max_ngram: int) -> None:
        self.num_tokens = num_tokens
        self._slots = slots
        self._sizes = range(min_ngram, max_ngram + 1)
        num_buckets = 1 << int(slots.token_ids.shape[1]).bit_length()
        self._num_buckets = min(MAX_BUCKETS, num_buckets)
        # Position of the token after an n-gram; 0: none. Entries of earlier sequences may stay, because every
        # match is compared with the tokens themselves. Untouched entries take no physical memory.
        shape = (len(self._sizes), slots.num_slots, self._num_buckets)
        self._following: Ints = np.zeros(shape, dtype=np.int32)
        self._num_indexed: Ints = np.zeros(slots.num_slots, dtype=np.int32)

    def forget(self, slots: Ints) -> None:
        """Forget the sequences of these slots, because other sequences have taken them."""
        self._num_indexed[slots] = 0

    def propose(self, slots: Ints, max_counts: Ints) -> Proposals:
        """Propose what followed the latest occurrence of the longest n-gram that ends each sequence. A
        proposal always has full length, because a shorter one would not be cheaper."""
        self._index(slots)
        tokens, known = self._slots.token_ids, self._slots.num_known[slots]
        found = np.zeros(len(slots), dtype=np.int32)
        for size, following in self._buckets(slots, known - 1):
            at = self._following[size - self._sizes[0], slots, following]
            matches = (at >= size) & (at < known) & (known >= size)
            for back in range(1, size + 1):
                # The clamped indices only affect rows that are too short for this n-gram; they do not match.
                before, end = np.maximum(at - back, 0), np.maximum(known - back, 0)
                matches &= tokens[slots, before] == tokens[slots, end]
            found = np.where(matches, at, found)
        # A continuation that reaches the end of the sequence starts over from its beginning.
        period = np.where(found > 0, known - found, 1)
        ahead = np.arange(self.num_tokens, dtype=np.int32)
        proposed: Ints = tokens[slots[:, None], found[:, None] + ahead % period[:, None]]
        return Proposals(proposed, np.where(found > 0, np.int32(self.num_tokens), np.int32(0)))

    def _index(self, slots: Ints) -> None:
        """Index the n-grams that are followed by a known token and not indexed yet."""
        ends = self._slots.num_known[slots] - 1  # n-grams that end before this position have a successor
        begins = np.minimum(self._num_indexed[slots], ends)
        counts = ends - begins
        self._num_indexed[slots] = ends
        row = np.repeat(slots, counts)
        last = runs(begins, counts)
        for size, bucket in self._buckets(row, last):
            inside = last >= size - 1
            following = self._following[size - self._sizes[0]]
            if inside.all():
                following[row, bucket] = last + 1  # of equal n-grams, the last one is kept
            else:
                following[row[inside], bucket[inside]] = last[inside] + 1

    def _buckets(self, slots: Ints, last: Ints) -> list[tuple[int, NDArray[np.intp]]]:
        """For each size, the buckets of the n-grams of these slots that end at the positions `last`."""
        tokens, found = self._slots.token_ids, []
        mixed = np.zeros(len(slots), dtype=np.uint64)
        for back in range(self._sizes[-1]):
            mixed = (
                mixed + tokens[slots, np.maximum(last - back, 0)].astype(np.uint64) + np.uint64(1)
            ) * _MULTIPLIER
            mixed ^= mixed >> np.uint64(29)
            if back + 1 >= self._sizes[0]:
                bucket = (mixed * _MULTIPLIER >> _HASH_SHIFT) & np.uint64(self._num_buckets - 1)
                found.append((back + 1, bucket.astype(np.intp)))
        return found

"""The settings and needs of each sampler slot, updated as sequences join and leave. No torch.

A slot's settings are one row of int32, with floats as bit patterns. The row is sent to the device when a
sequence joins, and stays there. A batch needs the union of its slots' flags.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.types import Ints, SamplerParams, check_sampling

GREEDY_BELOW = 1e-5  # below this temperature, the likeliest token is taken


class Need(enum.IntFlag):
    """What a sequence needs beyond taking the likeliest token."""

    NOTHING = 0
    NOISE = 1  # for a temperature above 0
    FILTER = 2  # for top-k, top-p, min-p
    COUNTS = 4  # for penalties
    MASK = 8  # for allowed ids, structured output
    ENTRIES = 16  # for bias, bad words, min tokens
    TAIL = 32  # for bad words of several tokens: a record of the last sampled tokens
    LOGPROBS = 64


EDITS = Need.COUNTS | Need.MASK | Need.ENTRIES  # needs that change logits, in an fp32 copy of the row


class Column(enum.IntEnum):
    """The columns of a slot's row of settings, int32; the first six are float32."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5
    KEY = 6  # two words of the seed
    STREAM = 8  # two words, 0 for seeded rows
    TOP_K = 10  # 0: off
    COUNT_ROW = 11  # row in the table of token counts; -1: none
    MASK_ROW = 12  # row in the table of masks; -1: none
    WORK_ROW = 13  # row in the fp32 copy of edited rows; -1: none
    MIN_TOKENS = 14


WIDTH = 15
FLOATS = 6


class Entry(enum.IntEnum):
    """Kinds of edits of single tokens' logits. An edit is (kind, token, a, b)."""

    BIAS = 0  # a: the bit pattern of the bias
    STOP = 1  # forbidden before `min_tokens`
    WORD = 2  # forbidden after the b tokens at index a of the prefixes


@dataclass(slots=True)
class RowPool:
    """Allocator of row numbers, lowest first. `size` is the largest number of rows in use at once so far."""

    size: int = 0
    _free: list[int] = field(default_factory=list)

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.size += 1
        return self.size - 1

    def free(self, number: int) -> None:
        heapq.heappush(self._free, number)

    @property
    def used(self) -> int:
        return self.size - len(self._free)


@dataclass(frozen=True, slots=True, eq=False)
class SlotEntries:
    """The single-token edits of one slot, made when its sequence joins."""

    entries: Ints  # [entries, 4] of (kind, token, a, b)
    prefixes: Ints  # tokens of each bad word except the last; `a` is an index into them
    longest_word: int  # number of tokens of the longest prefix

    @property
    def only_stops(self) -> bool:
        return bool((self.entries[:, 0] == Entry.STOP).all())


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The single-token edits of all slots, as one array to send."""

    data: Ints  # spans of slots, then entries, then prefixes of bad words
    num_entries: int


@dataclass(slots=True)
class SlotPlan:
    """The sampler's state on the host. It is updated without reading from the device."""

    vocab_size: int
    max_slots: int  # one more slot is for padding rows of a graph: greedy, with no other needs
    seed: int
    flags: NDArray[np.int32] = field(init=False)
    generated: Ints = field(init=False)  # [slots], tokens sampled so far
    logprobs: Ints = field(init=False)  # [slots], likeliest tokens to report; -1: no log probabilities
    table: Ints = field(init=False)  # [slots, WIDTH]
    held: dict[int, SamplerParams] = field(default_factory=dict)
    entries_of: dict[int, SlotEntries] = field(default_factory=dict)
    stops_until: Ints = field(init=False)  # [slots], `min_tokens` if all entries are stop tokens, otherwise 0
    counts: RowPool = field(default_factory=RowPool)
    masks: RowPool = field(default_factory=RowPool)
    works: RowPool = field(default_factory=RowPool)
    version: int = 0  # changes whenever `flags` change
    longest_word: int = 0
    _streams: int = 0

    def __post_init__(self) -> None:
        total = self.max_slots + 1
        self.flags, self.generated, self.stops_until = (np.zeros(total, np.int32) for _ in range(3))
        self.logprobs = np.full(total, -1, np.int32)
        self.table = np.zeros((total, WIDTH), np.int32)
        self.table[:] = self._row(SamplerParams(temperature=0.0), stream=0)

    def join(self, slot: int, params: SamplerParams, generated: int, stream: int | None = None) -> Need:
        """Assign the slot to a sequence. A preempted sequence has sampled `generated` tokens before."""
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot {slot} is not in 0 … {self.max_slots - 1}")
        if slot in self.held:
            raise ValueError(f"slot {slot} is taken by another sequence, which must leave first")
        check_sampling(params, self.vocab_size)
        if params.seed is not None:
            stream = 0
        elif stream is None:
            self._streams += 1
            stream = self._streams
        entries = _entries(params, generated, self.vocab_size)
        need = _need(params) | (Need.NOTHING if entries is None else Need.ENTRIES)
        row = self.table[slot]
        row[:] = self._row(params, stream)
        if need & Need.COUNTS:
            row[Column.COUNT_ROW] = self.counts.take()
        if need & Need.MASK:
            row[Column.MASK_ROW] = self.masks.take()
        if need & EDITS:
            row[Column.WORK_ROW] = self.works.take()
        if entries is not None:
            self.entries_of[slot] = entries
            self.longest_word = max(self.longest_word, entries.longest_word)
        self.held[slot], self.flags[slot], self.generated[slot] = params, need, generated
        if params.logprobs is not None:
            self.logprobs[slot] = self.vocab_size if params.logprobs < 0 else params.logprobs
        only_stops = entries is not None and entries.only_stops
        self.stops_until[slot] = params.min_tokens if only_stops else 0
        self.version += 1
        return need

    def add_mask(self, slot: int) -> int:
        """Return the mask row of a slot; allocate it if the slot has none."""
        row = self.table[slot]
        if row[Column.MASK_ROW] < 0:
            row[Column.MASK_ROW] = self.masks.take()
            if row[Column.WORK_ROW] < 0:
                row[Column.WORK_ROW] = self.works.take()
            self.flags[slot] |= Need.MASK
            self.version += 1
        return int(row[Column.MASK_ROW])

    def leave(self, slot: int) -> bool:
        """Free the slot. Return whether it had single-token edits."""
        if slot not in self.held:
            raise ValueError(f"slot {slot} is free")
        del self.held[slot]
        row = self.table[slot]
        for pool, column in (
            (self.counts, Column.COUNT_ROW),
            (self.masks, Column.MASK_ROW),
            (self.works, Column.WORK_ROW),
        ):
            if row[column] >= 0:
                pool.free(int(row[column]))
                row[column] = -1
        self.flags[slot], self.logprobs[slot], self.stops_until[slot] = 0, -1, 0
        self.version += 1
        return self.entries_of.pop(slot, None) is not None

    def need(self, slots: Ints) -> Need:
        """What a batch of these slots needs."""
        need = self._union(slots)
        if need & Need.ENTRIES:  # drop entries of sequences that have reached their min tokens
            done = slots[(self.stops_until[slots] > 0) & (self.generated[slots] >= self.stops_until[slots])]
            if len(done):
                self.flags[done] &= ~Need.ENTRIES
                self.stops_until[done] = 0
                self.version += 1
                need = self._union(slots)
        return need

    def step(self, slots: Ints) -> Need:
        """Return what a batch of these slots needs, and count the token that each slot samples."""
        need = self.need(slots)
        self.generated[slots] += 1
        return need

    def rewind(self, slots: Ints, num_sampled: Ints) -> Need:
        """Set the number of tokens that these slots have sampled. Return what a batch of them needs."""
        need = self.need(slots)
        if need & (EDITS | Need.TAIL):
            raise ValueError("a slot with logits processors that depend on its tokens cannot be rewound")
        self.generated[slots] = num_sampled
        return need

    def rows(self, slots: Ints, need: Need) -> Ints:
        """The rows of a batch whose slots have any of these flags."""
        return np.flatnonzero(self.flags[slots] & need).astype(np.int32)

    def entries(self) -> Entries:
        """Lay all entries out in one array: [slots, 2] of (begin, end), then [entries, 4], then prefixes."""
        spans = np.zeros((self.max_slots + 1, 2), np.int32)
        entries, prefixes = [], []
        num_entries = num_prefixes = 0
        for slot, of_slot in self.entries_of.items():
            part = of_slot.entries
            if len(of_slot.prefixes) and num_prefixes:
                part = part.copy()
                part[part[:, 0] == Entry.WORD, 2] += num_prefixes
            spans[slot] = num_entries, num_entries + len(part)
            entries.append(part.reshape(-1))
            prefixes.append(of_slot.prefixes)
            num_entries += len(part)
            num_prefixes += len(of_slot.prefixes)
        return Entries(np.concatenate((spans.reshape(-1), *entries, *prefixes)), num_entries)

    def check_integrity(self) -> None:
        """Assert that every table row belongs to one slot and that free slots have no rows."""
        for pool, column in (
            (self.counts, Column.COUNT_ROW),
            (self.masks, Column.MASK_ROW),
            (self.works, Column.WORK_ROW),
        ):
            rows = self.table[:, column]
            taken = rows[rows >= 0].tolist()
            assert len(set(taken)) == len(taken) == pool.used, f"{column.name}: {taken}, {pool}"
        free = [slot for slot in range(self.max_slots + 1) if slot not in self.held]
        assert not self.flags[free].any() and self.entries_of.keys() <= self.held.keys()

    def _union(self, slots: Ints) -> Need:
        return Need(int(np.bitwise_or.reduce(self.flags[slots]))) if len(slots) else Need.NOTHING

    def _row(self, params: SamplerParams, stream: int) -> Ints:
        row = np.zeros(WIDTH, np.int32)
        greedy = params.temperature < GREEDY_BELOW
        row[:FLOATS].view(np.float32)[:] = (
            0.0 if greedy else params.temperature,
            1.0 if greedy else params.top_p,
            0.0 if greedy else params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        seed = self.seed if params.seed is None else params.seed
        words = np.array([seed % 2**64, stream], np.uint64).view(np.int32)
        row[Column.KEY : Column.KEY + 4] = words
        row[Column.TOP_K] = 0 if greedy or params.top_k >= self.vocab_size else max(params.top_k, 0)
        row[Column.COUNT_ROW] = row[Column.MASK_ROW] = row[Column.WORK_ROW] = -1
        row[Column.MIN_TOKENS] = params.min_tokens
        return row


def packed_bits(ids: Iterable[int], vocab_size: int) -> Ints:
    """Pack allowed ids as bits, 32 per word, lowest bit first: [⌈vocab / 32⌉]."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _need(params: SamplerParams) -> Need:
    need = Need.NOTHING
    if params.temperature >= GREEDY_BELOW:
        need |= Need.NOISE
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            need |= Need.FILTER
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        need |= Need.COUNTS
    if params.allowed_token_ids is not None:
        need |= Need.MASK
    if any(len(word) > 1 for word in params.bad_token_ids):
        need |= Need.TAIL
    if params.logprobs is not None:
        need |= Need.LOGPROBS
    return need


def _entries(params: SamplerParams, generated: int, vocab_size: int) -> SlotEntries | None:
    """The single-token edits of a sequence that has sampled `generated` tokens; None if there are none."""
    bias = np.zeros((len(params.logit_bias), 4), np.int32)
    bias[:, 0], bias[:, 1] = Entry.BIAS, list(params.logit_bias)
    bias[:, 2] = np.array(list(params.logit_bias.values()), np.float32).view(np.int32)
    stops = np.zeros((0, 4), np.int32)
    if params.min_tokens > generated:
        ids = np.unique(np.array([*params.stop_token_ids, *params.eos_token_ids], np.int32))
        ids = ids[ids < vocab_size]
        stops = np.zeros((len(ids), 4), np.int32)
        stops[:, 0], stops[:, 1] = Entry.STOP, ids
    bad_words = [word for word in params.bad_token_ids if word]
    words = np.zeros((len(bad_words), 4), np.int32)
    lengths = np.array([len(word) - 1 for word in bad_words], np.int32)
    words[:, 0], words[:, 1] = Entry.WORD, [word[-1] for word in bad_words]
    words[:, 2], words[:, 3] = np.cumsum(lengths) - lengths, lengths
    entries = np.concatenate((bias, stops, words))
    if not len(entries):
        return None
    prefixes = np.array([token for word in bad_words for token in word[:-1]], np.int32)
    return SlotEntries(entries, prefixes, int(lengths.max(initial=0)))

"""Encodes a step's plan as one array of integers, which other ranks read from shared memory.

Ranks other than 0 only run the model, so they are sent only what the model reads. Results, and what is done
with them, stay on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from penstock.runner.inputs import OutputPlan
from penstock.types import (
    GeneratePlan,
    Ints,
    KeyLimits,
    KVPlan,
    LengthGroup,
    PagedPlan,
    PoolPlan,
    PromptPlan,
    SamplePlan,
    StepPlan,
)

T = TypeVar("T")
_GROUP_NUMBERS = 7  # fields of a `LengthGroup`
_NONE = np.zeros(0, dtype=np.int32)


class SlotOrders(NamedTuple):
    """What other ranks do with their parts of adapters before they run a step."""

    writes: Ints  # [writes · 2]: the number of a copy, and the slot to write it to
    drops: Ints  # copies to drop after the writes


class StepSlots(NamedTuple):
    """The adapters of a step."""

    rank: int  # bucket of the largest rank
    row_slots: Ints  # [rows]; -1: none


@dataclass(frozen=True, slots=True, eq=False)
class RankStep:
    """What another rank needs to run a step."""

    plan: StepPlan
    outputs: OutputPlan | None = None  # of a pooling step
    slots: StepSlots | None = None  # None: no row has an adapter
    orders: SlotOrders | None = None


class Message:
    """Numbers, then arrays. The numbers include the lengths of the arrays."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._arrays: list[Ints] = []

    @property
    def size(self) -> int:
        """Number of integers that `write` writes."""
        return 1 + len(self._numbers) + sum(map(len, self._arrays))

    def write(self, into: Ints) -> None:
        numbers = np.array([len(self._numbers), *self._numbers], dtype=np.int32)
        np.concatenate([numbers, *self._arrays], out=into, casting="no")

    def number(self, value: int) -> None:
        self._numbers.append(int(value))

    def array(self, values: Ints | None) -> None:
        """Add a one-dimensional array, or None."""
        self._numbers.append(-1 if values is None else len(values))
        if values is not None:
            self._arrays.append(values)

    def optional(self, value: T | None, add: Callable[[Message, T], None]) -> None:
        self.number(value is not None)
        if value is not None:
            add(self, value)


class MessageReader:
    """Reads a message in the order in which it was made. Arrays are views of the message."""

    def __init__(self, message: Ints) -> None:
        count = int(message[0])
        self._numbers: Iterator[int] = iter(message[1 : 1 + count].tolist())
        self._rest = message[1 + count :]

    def number(self) -> int:
        return next(self._numbers)

    def maybe_array(self) -> Ints | None:
        if (size := self.number()) < 0:
            return None
        values, self._rest = self._rest[:size], self._rest[size:]
        return values

    def array(self) -> Ints:
        values = self.maybe_array()
        assert values is not None
        return values

    def optional(self, read: Callable[[MessageReader], T]) -> T | None:
        return read(self) if self.number() else None


def encode_step(
    plan: StepPlan,
    outputs: OutputPlan | None = None,
    slots: StepSlots | None = None,
    orders: SlotOrders | None = None,
) -> Message:
    message = Message()
    message.number(isinstance(plan, PoolPlan))
    message.optional(orders, _add_orders)
    message.optional(slots, _add_slots)
    for array in (plan.token_ids, plan.positions, plan.cu_lengths, plan.lengths):
        message.array(array)
    message.array(_flat_groups(plan.groups))
    if isinstance(plan, PoolPlan):
        message.array(plan.type_ids)
        message.optional(plan.kv, _add_kv)
        message.optional(plan.limits, _add_limits)
        message.optional(outputs, _add_outputs)
    else:
        _add_kv(message, plan.kv)
        _add_paged(message, plan.paged)
        _add_sample(message, plan.sample, has_adapters=slots is not None)
    return message


def decode_step(message: Ints) -> RankStep:
    reader = MessageReader(message)
    pools = bool(reader.number())
    orders, slots = reader.optional(_read_orders), reader.optional(_read_slots)
    token_ids, positions, cu_lengths, lengths = (reader.array() for _ in range(4))
    groups = _groups(reader.array())
    if not pools:
        return RankStep(
            GeneratePlan(
                token_ids=token_ids,
                positions=positions,
                cu_lengths=cu_lengths,
                lengths=lengths,
                groups=groups,
                kv=_read_kv(reader),
                paged=_read_paged(reader),
                sample=_read_sample(reader),
            ),
            slots=slots,
            orders=orders,
        )
    plan = PoolPlan(
        token_ids=token_ids,
        positions=positions,
        cu_lengths=cu_lengths,
        lengths=lengths,
        groups=groups,
        slices=(),
        variants=(),
        type_ids=reader.maybe_array(),
        kv=reader.optional(_read_kv),
        limits=reader.optional(_read_limits),
    )
    return RankStep(plan, reader.optional(_read_outputs), slots, orders)


def _add_orders(message: Message, orders: SlotOrders) -> None:
    for array in orders:
        message.array(array)


def _read_orders(reader: MessageReader) -> SlotOrders:
    return SlotOrders(reader.array(), reader.array())


def _add_slots(message: Message, slots: StepSlots) -> None:
    message.number(slots.rank)
    message.array(slots.row_slots)


def _read_slots(reader: MessageReader) -> StepSlots:
    return StepSlots(reader.number(), reader.array())


def _flat_groups(groups: tuple[LengthGroup, ...]) -> Ints:
    numbers = [
        (g.first_row, g.num_rows, g.length, g.first_token, g.num_cached, g.first_key, g.key_limit)
        for g in groups
    ]
    return np.array(numbers, dtype=np.int32).reshape(-1)


def _groups(flat: Ints) -> tuple[LengthGroup, ...]:
    return tuple(LengthGroup(*numbers) for numbers in flat.reshape(-1, _GROUP_NUMBERS).tolist())


def _add_kv(message: Message, kv: KVPlan) -> None:
    """Running sums (`kv.carry`) are left out, because only the pooler reads them."""
    message.number(kv.max_keys)
    for array in (kv.cu_keys, kv.new_key_at, kv.cached_key_at, kv.read_slots):
        message.array(array)
    for array in (kv.write_tokens, kv.write_slots, kv.token_slots):
        message.array(array)


def _read_kv(reader: MessageReader) -> KVPlan:
    max_keys = reader.number()
    cu_keys, new_key_at, cached_key_at, read_slots = (reader.array() for _ in range(4))
    write_tokens, write_slots, token_slots = (reader.array() for _ in range(3))
    return KVPlan(
        cu_keys=cu_keys,
        max_keys=max_keys,
        new_key_at=new_key_at,
        cached_key_at=cached_key_at,
        read_slots=read_slots,
        write_tokens=write_tokens,
        write_slots=write_slots,
        token_slots=token_slots,
    )


def _add_limits(message: Message, limits: KeyLimits) -> None:
    message.number(limits.max_length)
    message.number(limits.max_keys)
    for array in (limits.tokens, limits.cu_lengths, limits.keys, limits.cu_keys):
        message.array(array)


def _read_limits(reader: MessageReader) -> KeyLimits:
    max_length, max_keys = reader.number(), reader.number()
    tokens, cu_lengths, keys, cu_keys = (reader.array() for _ in range(4))
    return KeyLimits(tokens, cu_lengths, keys, cu_keys, max_length, max_keys)


def _add_outputs(message: Message, outputs: OutputPlan) -> None:
    for array in outputs:
        message.array(array)


def _read_outputs(reader: MessageReader) -> OutputPlan:
    return OutputPlan(reader.array(), reader.array(), reader.array())


def _add_paged(message: Message, paged: PagedPlan) -> None:
    message.number(paged.num_rows)
    message.number(paged.max_blocks)
    message.array(paged.block_tables)
    message.array(paged.num_keys)


def _read_paged(reader: MessageReader) -> PagedPlan:
    num_rows, max_blocks = reader.number(), reader.number()
    return PagedPlan(num_rows, max_blocks, reader.array(), reader.array())


def _add_sample(message: Message, sample: SamplePlan, *, has_adapters: bool) -> None:
    """The rows of tokens are sent only with adapters: only adapters of the head need them."""
    prompts = sample.prompts
    for array in (sample.sampled_tokens, sample.sampled_slots, sample.fed_tokens, sample.fed_slots):
        message.array(array)
    message.array(sample.sampled_rows if has_adapters else _NONE)
    message.array(None if prompts is None else prompts.tokens)
    if prompts is not None:
        message.array(prompts.rows if has_adapters else _NONE)
        message.array(prompts.counts if has_adapters else _NONE)


def _read_sample(reader: MessageReader) -> SamplePlan:
    sampled_tokens, sampled_slots, fed_tokens, fed_slots = (reader.array() for _ in range(4))
    sampled_rows, prompts = reader.array(), None
    if (tokens := reader.maybe_array()) is not None:
        rows, counts = reader.array(), reader.array()
        prompts = PromptPlan(
            rows=rows,
            begins=_NONE,
            counts=counts,
            tokens=tokens,
            next_tokens=_NONE,
            max_logprobs=0,
        )
    return SamplePlan(
        slots=_NONE,
        epochs=_NONE,
        visits=_NONE,
        ends=_NONE,
        sampled_rows=sampled_rows,
        sampled_tokens=sampled_tokens,
        sampled_slots=sampled_slots,
        num_logprobs=_NONE,
        fed_tokens=fed_tokens,
        fed_slots=fed_slots,
        prompts=prompts,
    )

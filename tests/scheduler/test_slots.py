"""The slot table ends sequences at their stop tokens, however many they have, and no request widens it."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.content import PrefixKeys
from penstock.scheduler.sequence import SequenceState
from penstock.scheduler.slots import MAX_INLINE_STOPS, SlotTable
from tests.generation.fakes import generation_request
from tests.helpers import ints


def assigned(table: SlotTable, name: str, stops: range) -> SequenceState:
    request = generation_request(name, [[1, 2]], 10, stop_token_ids=tuple(stops))
    assert request.sampling is not None
    sequence = SequenceState(request, request.sampling, 0, (0.0, 0, 0), PrefixKeys(request, 0, 16))
    table.assign(sequence)
    return sequence


@pytest.mark.parametrize("count", [0, 1, MAX_INLINE_STOPS, MAX_INLINE_STOPS + 1, 1024])
def test_a_sequence_ends_at_each_of_its_stop_tokens_and_at_no_other(count: int) -> None:
    table = SlotTable(4, 64, 4)
    size = table.stop_ids.nbytes
    few, many = assigned(table, "few", range(5, 7)), assigned(table, "many", range(100, 100 + count))
    for sequence in (few, many):
        table.num_known[sequence.slot] += 1  # the token that may end the sequence
    slots = ints([few.slot, many.slot])
    for own, other, ends in ((5, 99, [True, False]), (100, 100 + count - 1, [False, count > 0])):
        assert table.stopped(slots, ints([own, other])).tolist() == ends
    assert table.stopped(slots[::-1], ints([100, 5])).tolist() == [count > 0, True]
    assert table.stopped(slots, ints([6, 100 + count])).tolist() == [True, False]
    assert table.stop_ids.nbytes == size
    table.free(many)
    next_one = assigned(table, "next", range(0))
    table.num_known[next_one.slot] += 1
    assert next_one.slot == many.slot
    assert not table.stopped(ints([next_one.slot]), np.array([100], np.int32)).any()

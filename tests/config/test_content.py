"""Content identity: no two rows that a model would answer differently have the same key."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from penstock.content import ROW_FIELDS, TOKEN_FIELDS, PrefixKeys, row_keys, scope
from penstock.types import Request, SamplerParams
from tests.helpers import ints, make_request

LENGTHS = [4, 1, 7]
BLOCK = 4

# Fields of a request that are no content of its rows: they say what to compute of them, when, and for whom.
NOT_CONTENT = {
    *("id", "params", "extra_params", "pairs", "priority", "arrival_s", "deadline_s"),
    *("reuse_prefix", "lengths", "starts", "num_truncated", "client", "weight", "is_background"),
    "rope_positions",  # they follow from the tokens and the images
}
# Fields that `row_keys`, `scope` or `PrefixKeys` read by name.
READ_BY_NAME = {"token_ids", "cache_salt", "sampling", "images"}


def with_changes(request: Request, **changes: object) -> Request:
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def identity(request: Request) -> tuple[object, ...]:
    return (*row_keys(request), *scope(request))


def prefix_keys(request: Request, row: int = 0) -> list[bytes]:
    start, length = int(request.starts[row]), int(request.lengths[row])
    return PrefixKeys(request, row, BLOCK).extend(request.token_ids[start : start + length])


def test_every_field_of_a_request_is_known_to_be_content_or_not() -> None:
    """A new field that changes what a model computes must join the keys, or caches give wrong answers."""
    names = {field.name for field in fields(Request)}
    assert names == {*TOKEN_FIELDS, *ROW_FIELDS} | NOT_CONTENT | READ_BY_NAME


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"type_ids": [1] * 12},
        {"skip": [1, 0, 2]},
        {"type_ids": [0, 1] * 6, "skip": [3, 0, 1], "key_limits": [2, 1, 5]},
    ],
)
def test_a_row_has_the_same_key_alone_as_among_others(more: dict[str, Any]) -> None:
    """Or a request of one row would never follow one of many."""
    together = make_request("all", LENGTHS, **more)
    ends = np.cumsum(LENGTHS)
    for row, key in enumerate(row_keys(together)):
        alone = make_request("one", [LENGTHS[row]])
        tokens = slice(int(ends[row]) - LENGTHS[row], int(ends[row]))
        alone.token_ids = together.token_ids[tokens]
        for name in more:
            part = tokens if name == "type_ids" else slice(row, row + 1)
            setattr(alone, name, getattr(together, name)[part])
        assert row_keys(alone) == [key]
        assert scope(alone) == scope(together)


@pytest.mark.parametrize("lengths", [[12], LENGTHS])
@pytest.mark.parametrize("name", [*TOKEN_FIELDS, *ROW_FIELDS])
def test_every_content_field_separates_rows_of_equal_tokens(name: str, lengths: list[int]) -> None:
    size = 12 if name in TOKEN_FIELDS else len(lengths)
    plain = make_request("a", lengths)
    zeros = with_changes(make_request("b", lengths), **{name: ints([0] * size)})
    ones = with_changes(make_request("c", lengths), **{name: ints([1] * size)})
    assert len({identity(request) for request in (plain, zeros, ones)}) == 3


def test_equal_numbers_in_different_fields_are_different_content() -> None:
    requests = [
        with_changes(make_request("a", [12]), **{name: ints([1] * (12 if name in TOKEN_FIELDS else 1))})
        for name in (*TOKEN_FIELDS, *ROW_FIELDS)
    ]
    assert len({identity(request) for request in requests}) == len(requests)


def test_a_salt_separates_rows_of_equal_tokens() -> None:
    plain, salted = make_request("a", [12]), with_changes(make_request("b", [12]), cache_salt="x")
    assert identity(plain) != identity(salted)


@pytest.mark.parametrize(
    "changes",
    [
        {"adapters": ints([0])},
        {"adapters": ints([1])},
        {"key_limits": ints([6])},
        {"type_ids": ints([0] * 12)},
        {"type_ids": ints([1] + [0] * 11)},
        {"cache_salt": "x"},
        {"sampling": SamplerParams()},
    ],
    ids=str,
)
def test_prefixes_with_other_hidden_states_have_no_key_in_common(changes: dict[str, Any]) -> None:
    plain = prefix_keys(make_request("a", [12]))
    changed = prefix_keys(with_changes(make_request("b", [12]), **changes))
    assert len(plain) == len(changed) == 3
    assert not set(plain) & set(changed)


def test_rows_share_prefix_keys_up_to_the_first_type_id_that_differs() -> None:
    types = [0] * 6 + [1] * 6
    one = prefix_keys(make_request("a", [12], type_ids=types))
    other = prefix_keys(make_request("b", [12], type_ids=[*types[:-1], 0]))
    assert one[:2] == other[:2] and one[2] != other[2]


@pytest.mark.parametrize(
    "changes", [{"skip": ints([3])}, {"token_mask": ints([1, 0] * 6)}, {"priority": 3}], ids=str
)
def test_rows_share_prefixes_whatever_of_them_is_read_afterwards(changes: dict[str, Any]) -> None:
    assert prefix_keys(with_changes(make_request("b", [12]), **changes)) == prefix_keys(
        make_request("a", [12])
    )


def test_a_row_without_an_adapter_shares_prefixes_with_rows_of_requests_that_have_some() -> None:
    mixed = with_changes(make_request("a", [12, 12]), adapters=ints([-1, 2]))
    assert prefix_keys(mixed, 0) == prefix_keys(make_request("b", [12]))
    assert prefix_keys(mixed, 1) != prefix_keys(make_request("c", [12], first_token=13))


def test_keys_of_a_row_that_grows_are_those_of_the_whole_row() -> None:
    request = with_changes(make_request("a", [6]), sampling=SamplerParams(), adapters=ints([1]))
    tokens = ints(range(1, 31))
    growing = PrefixKeys(request, 0, BLOCK)
    for end in (6, 7, 8, 8, 15, 30):
        keys = growing.extend(tokens[:end])
        assert len(keys) == end // BLOCK
    assert keys == PrefixKeys(request, 0, BLOCK).extend(tokens)


def test_a_salt_is_never_mistaken_for_other_content() -> None:
    """A salt may have any form, even that of what stands before it."""
    salts = ["", " ", "0", "-1 0 0 ", "\0", "1"]
    keys = {
        prefix_keys(with_changes(make_request("a", [12]), cache_salt=salt, adapters=adapters))[0]
        for salt in salts
        for adapters in (None, ints([0]), ints([10]))
    }
    assert len(keys) == 3 * len(salts)

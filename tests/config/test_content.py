"""Content identity: rows with different answers never have the same key."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from penstock.content import ROW_FIELDS, TOKEN_FIELDS, PrefixKeys, row_keys, scope, select_rows
from penstock.types import Request, SamplerParams
from tests.helpers import ints, make_images, make_request

LENGTHS = [4, 1, 7]
BLOCK = 4

# Request fields that are not row content: they define what to compute from the rows, when, and for whom.
NOT_CONTENT = {
    *("id", "params", "extra_params", "pairs", "priority", "arrival_s", "deadline_s"),
    *("reuse_prefix", "lengths", "starts", "num_rows", "num_tokens", "num_truncated"),
    *("client", "weight", "is_background"),
    "rope_positions",  # determined by the tokens and the images
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
    """A new field that changes results must become part of the keys. Otherwise caches give wrong answers."""
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
    """Otherwise a request of one row could not share the result of a request with many."""
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


def test_an_image_separates_rows_of_equal_tokens_and_so_does_its_place() -> None:
    plain = make_request("a", [12])
    pictures = [
        make_images([(2, 2)], [0], starts=[start], num_tokens=[4], seed=seed)
        for start, seed in ((0, 0), (4, 0), (0, 1))
    ]
    requests = [plain, *(with_changes(make_request("b", [12]), images=images) for images in pictures)]
    assert len({identity(request) for request in requests}) == 4
    again = with_changes(make_request("c", [12]), images=pictures[0])
    assert identity(again) == identity(requests[1])


def test_a_row_with_images_has_the_same_key_alone_as_among_others() -> None:
    images = make_images([(2, 2), (1, 3), (2, 1)], [0, 2, 2], starts=[0, 1, 4], num_tokens=[2, 3, 2])
    together = with_changes(make_request("all", LENGTHS), images=images)
    for row in (0, 2):
        alone = select_rows(together, ints([row]), "one")
        assert row_keys(alone) == [row_keys(together)[row]]
        assert scope(alone) == scope(together)
    assert select_rows(together, ints([1]), "text").images is None


def test_selected_rows_keep_their_images_in_the_new_order() -> None:
    images = make_images([(2, 2), (1, 3), (2, 1)], [0, 2, 2], starts=[0, 1, 4], num_tokens=[2, 3, 2])
    request = with_changes(make_request("all", LENGTHS), images=images)
    chosen = select_rows(request, ints([2, 0]), "some").images
    assert chosen is not None
    assert chosen.rows.tolist() == [0, 0, 1] and chosen.starts.tolist() == [1, 4, 0]
    assert np.array_equal(chosen.patches, np.concatenate([images.patches[4:9], images.patches[:4]]))
    assert np.array_equal(chosen.digests, images.digests[[1, 2, 0]])


def test_a_number_of_an_image_is_never_mistaken_for_a_token() -> None:
    """A row whose token ids equal the key bytes of another row's tokens and image has another key."""
    images = make_images([(1, 1)], [0])
    pictured = with_changes(make_request("a", [2, 2]), images=images)
    (key, _), written = row_keys(pictured), make_request("b", [1])
    written.token_ids = np.frombuffer(key, dtype=np.int32)
    written.lengths = ints([len(written.token_ids)])
    other = with_changes(make_request("c", [2, 2]), images=images)
    other.token_ids = np.concatenate([other.token_ids, written.token_ids])
    other.lengths = ints([2, 2, len(written.token_ids)])
    other.__post_init__()
    assert row_keys(other)[2] != key


def test_rows_share_prefix_keys_up_to_the_first_image_that_differs() -> None:
    def keys(seed: int) -> list[bytes]:
        images = make_images([(2, 2)], [0], starts=[6], num_tokens=[4], seed=seed)
        return prefix_keys(with_changes(make_request("a", [16]), images=images))

    one, other = keys(0), keys(1)
    assert one[0] == other[0] == prefix_keys(make_request("b", [16]))[0]
    assert not set(one[1:]) & set(other[1:])


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
    """A salt may be any string, even one that looks like the preceding part of the key."""
    salts = ["", " ", "0", "-1 0 0 ", "\0", "1"]
    keys = {
        prefix_keys(with_changes(make_request("a", [12]), cache_salt=salt, adapters=adapters))[0]
        for salt in salts
        for adapters in (None, ints([0]), ints([10]))
    }
    assert len(keys) == 3 * len(salts)

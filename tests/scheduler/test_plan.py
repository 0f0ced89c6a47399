"""Step plans equal what plain loops over their rows compute."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import OutputDtype, PoolingParams, PoolPlan, Request
from tests.helpers import ints, make_request, row_tokens
from tests.thinning import num_examples

PARAMS = [PoolingParams(), PoolingParams(dimensions=4), PoolingParams(dtype=OutputDtype.INT8)]


@st.composite
def shares(draw: st.DrawFn) -> list[ScheduledRows]:
    out, first_token = [], 1
    for number in range(draw(st.integers(1, 6))):
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
        total = sum(lengths)
        request = make_request(
            str(number),
            lengths,
            first_token=first_token,
            params=draw(st.sampled_from(PARAMS)),
            type_ids=draw(st.none() | st.lists(st.integers(0, 1), min_size=total, max_size=total)),
            skip=draw(st.none() | st.just([draw(st.integers(0, n - 1)) for n in lengths])),
            key_limits=draw(st.none() | st.just([draw(st.integers(1, n)) for n in lengths])),
        )
        first_token += total
        rows = draw(
            st.lists(st.integers(0, len(lengths) - 1), unique=True, min_size=1, max_size=len(lengths))
        )
        out.append(ScheduledRows(request, ints(rows)))
    return out


def rows_in_slots(plan: PoolPlan) -> dict[int, tuple[Request, int]]:
    """slot → (request, row), from the plan's slices."""
    return {
        int(slot): (piece.request, int(row))
        for piece in plan.slices
        for row, slot in zip(piece.rows, piece.step_rows, strict=True)
    }


@given(shares())
@settings(max_examples=num_examples(200), deadline=None)
def test_a_plan_holds_exactly_the_scheduled_rows(given_shares: list[ScheduledRows]) -> None:
    plan = build_plan(given_shares)
    placed = rows_in_slots(plan)
    wanted = [(share.request, int(row)) for share in given_shares for row in share.rows]
    assert sorted(placed) == list(range(len(wanted))) == list(range(plan.num_rows))
    assert {(request.id, row) for request, row in placed.values()} == {(r.id, row) for r, row in wanted}
    for slot, (request, row) in placed.items():
        begin, end = plan.cu_lengths[slot], plan.cu_lengths[slot + 1]
        assert plan.token_ids[begin:end].tolist() == row_tokens(request, row)
        assert plan.positions[begin:end].tolist() == list(range(end - begin))
        assert plan.lengths[slot] == request.lengths[row]


@given(shares())
@settings(max_examples=num_examples(200), deadline=None)
def test_type_ids_and_skips_follow_their_rows_and_default_to_zero(
    given_shares: list[ScheduledRows],
) -> None:
    plan = build_plan(given_shares)
    requests = [share.request for share in given_shares]
    assert (plan.type_ids is None) == all(request.type_ids is None for request in requests)
    assert (plan.skip is None) == all(request.skip is None for request in requests)
    for slot, (request, row) in rows_in_slots(plan).items():
        begin, end = plan.cu_lengths[slot], plan.cu_lengths[slot + 1]
        start = int(request.lengths[:row].sum())
        if plan.type_ids is not None:
            own = np.zeros(request.num_tokens) if request.type_ids is None else request.type_ids
            assert plan.type_ids[begin:end].tolist() == own[start : start + end - begin].tolist()
        if plan.skip is not None:
            assert plan.skip[slot] == (0 if request.skip is None else request.skip[row])


@given(shares())
@settings(max_examples=num_examples(200), deadline=None)
def test_rows_are_ordered_by_length_and_groups_cover_them_all(given_shares: list[ScheduledRows]) -> None:
    plan = build_plan(given_shares)
    assert np.all(np.diff(plan.lengths) >= 0)
    assert plan.max_length == plan.lengths.max()
    row = token = 0
    for group in plan.groups:
        assert (group.first_row, group.first_token) == (row, token)
        assert group.num_rows > 0
        assert np.all(plan.lengths[row : row + group.num_rows] == group.length)
        row += group.num_rows
        token += group.num_rows * group.length
    assert (row, token) == (plan.num_rows, plan.num_tokens)
    kinds = {(group.length, group.key_limit) for group in plan.groups}
    assert len(kinds) == len(plan.groups), "one group a length and key limit"


@given(shares())
@settings(max_examples=num_examples(200), deadline=None)
def test_every_row_is_in_the_variant_of_its_parameters(given_shares: list[ScheduledRows]) -> None:
    plan = build_plan(given_shares)
    kinds = {share.request.params for share in given_shares}
    assert {variant.params for variant in plan.variants} == kinds
    if len(kinds) == 1:
        assert plan.variants[0].rows is None
        return
    placed = rows_in_slots(plan)
    seen: list[int] = []
    for variant in plan.variants:
        assert variant.rows is not None
        seen += variant.rows.tolist()
        assert all(placed[int(slot)][0].params == variant.params for slot in variant.rows)
    assert sorted(seen) == list(range(plan.num_rows))


@given(shares())
@settings(max_examples=num_examples(50), deadline=None)
def test_all_integers_of_a_plan_are_int32(given_shares: list[ScheduledRows]) -> None:
    plan = build_plan(given_shares)
    arrays = [plan.token_ids, plan.positions, plan.cu_lengths, plan.lengths, plan.type_ids, plan.skip]
    arrays += [variant.rows for variant in plan.variants] + [piece.step_rows for piece in plan.slices]
    assert all(array.dtype == np.int32 for array in arrays if array is not None)


def test_rows_of_equal_length_keep_the_order_of_their_requests() -> None:
    plan = build_plan(
        [
            ScheduledRows(make_request("a", [3]), ints([0])),
            ScheduledRows(make_request("b", [3], first_token=50), ints([0])),
        ]
    )
    assert plan.token_ids.tolist() == [1, 2, 3, 50, 51, 52]
    assert len(plan.groups) == 1


@pytest.mark.parametrize("lengths", [[1], [7]])
def test_a_plan_may_hold_a_single_row(lengths: list[int]) -> None:
    plan = build_plan([ScheduledRows(make_request("a", lengths), ints([0]))])
    assert plan.token_ids.tolist() == list(range(1, lengths[0] + 1))
    assert plan.cu_lengths.tolist() == [0, lengths[0]]


@given(shares())
@settings(max_examples=num_examples(200), deadline=None)
def test_rows_with_a_key_limit_form_their_own_groups(given_shares: list[ScheduledRows]) -> None:
    plan = build_plan(given_shares)
    seen: dict[int, int] = {}
    for slot, (request, row) in rows_in_slots(plan).items():
        seen[slot] = int(request.lengths[row] if request.key_limits is None else request.key_limits[row])
    for group in plan.groups:
        for slot in range(group.first_row, group.first_row + group.num_rows):
            assert (group.key_limit or group.length) == seen[slot]
    limited = [slot for slot in range(plan.num_rows) if seen[slot] < plan.lengths[slot]]
    if not limited:
        assert plan.limits is None
        return
    assert plan.limits is not None
    starts = plan.cu_lengths.tolist()
    tokens = [t for slot in limited for t in range(starts[slot], starts[slot + 1])]
    keys = [starts[slot] + i for slot in limited for i in range(seen[slot])]
    assert (plan.limits.tokens.tolist(), plan.limits.keys.tolist()) == (tokens, keys)
    assert np.diff(plan.limits.cu_lengths).tolist() == [int(plan.lengths[slot]) for slot in limited]
    assert np.diff(plan.limits.cu_keys).tolist() == [seen[slot] for slot in limited]
    assert plan.limits.max_length == max(int(plan.lengths[slot]) for slot in limited)
    assert plan.limits.max_keys == max(seen[slot] for slot in limited)


def test_key_limits_of_the_whole_row_are_dropped() -> None:
    plan = build_plan([ScheduledRows(make_request("a", [3, 5], key_limits=[3, 9]), ints([0, 1]))])
    assert plan.limits is None and all(group.key_limit == 0 for group in plan.groups)


def test_a_chunked_row_cannot_have_a_key_limit() -> None:
    request = make_request("a", [4], key_limits=[2])
    share = ScheduledRows(request, ints([0]), ints([0]), ints([4]), (None,))
    with pytest.raises(ValueError, match="no key limit"):
        build_plan([share], block_size=4)


def test_chunkable_rows_that_run_whole_do_not_use_the_kv_cache() -> None:
    whole = ScheduledRows(make_request("a", [4, 2]), ints([0, 1]), ints([0, 0]), ints([4, 2]), (None, None))
    cut = ScheduledRows(make_request("b", [9]), ints([0]), ints([0]), ints([3]), ([0, 1, 2],))
    alone, together = build_plan([whole], block_size=4), build_plan([whole, cut], block_size=4)
    assert alone.kv is None and alone.variants[0].rows is None
    assert together.kv is not None and together.kv.write_tokens.tolist() == [2, 3, 4]

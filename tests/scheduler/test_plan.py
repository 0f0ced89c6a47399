"""A plan against plain loops over the rows of its shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import OutputDtype, PoolingParams, Request, StepPlan
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import Share
from tests.helpers import ints, make_request, row_tokens

PARAMS = [PoolingParams(), PoolingParams(dimensions=4), PoolingParams(dtype=OutputDtype.INT8)]


@st.composite
def shares(draw: st.DrawFn) -> list[Share]:
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
        )
        first_token += total
        rows = draw(
            st.lists(st.integers(0, len(lengths) - 1), unique=True, min_size=1, max_size=len(lengths))
        )
        out.append(Share(request, ints(rows)))
    return out


def rows_in_slots(plan: StepPlan) -> dict[int, tuple[Request, int]]:
    """slot → (request, row), as the plan's slices say."""
    return {
        int(slot): (piece.request, int(row))
        for piece in plan.slices
        for row, slot in zip(piece.rows, piece.slots, strict=True)
    }


@given(shares())
@settings(max_examples=200, deadline=None)
def test_a_plan_holds_exactly_the_rows_of_its_shares(given_shares: list[Share]) -> None:
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
@settings(max_examples=200, deadline=None)
def test_segments_and_skips_follow_their_rows_and_are_zero_where_a_request_has_none(
    given_shares: list[Share],
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
@settings(max_examples=200, deadline=None)
def test_rows_are_ordered_by_length_and_groups_cover_them_all(given_shares: list[Share]) -> None:
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
    assert len({group.length for group in plan.groups}) == len(plan.groups), "one group a length"


@given(shares())
@settings(max_examples=200, deadline=None)
def test_every_row_stands_in_the_variant_of_its_own_parameters(given_shares: list[Share]) -> None:
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
@settings(max_examples=50, deadline=None)
def test_all_integers_of_a_plan_are_int32(given_shares: list[Share]) -> None:
    plan = build_plan(given_shares)
    arrays = [plan.token_ids, plan.positions, plan.cu_lengths, plan.lengths, plan.type_ids, plan.skip]
    arrays += [variant.rows for variant in plan.variants] + [piece.slots for piece in plan.slices]
    assert all(array.dtype == np.int32 for array in arrays if array is not None)


def test_rows_of_equal_length_keep_the_order_of_their_requests() -> None:
    plan = build_plan(
        [Share(make_request("a", [3]), ints([0])), Share(make_request("b", [3], first_token=50), ints([0]))]
    )
    assert plan.token_ids.tolist() == [1, 2, 3, 50, 51, 52]
    assert len(plan.groups) == 1


@pytest.mark.parametrize("lengths", [[1], [7]])
def test_a_single_row_is_a_plan_of_its_own(lengths: list[int]) -> None:
    plan = build_plan([Share(make_request("a", lengths), ints([0]))])
    assert plan.token_ids.tolist() == list(range(1, lengths[0] + 1))
    assert plan.cu_lengths.tolist() == [0, lengths[0]]

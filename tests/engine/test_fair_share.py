"""Pooling and generation share the device time. Neither accumulates credit while it has no work."""

from __future__ import annotations

import pytest

from penstock.engine.fair_share import FairShare

POOL_S, TOKEN_S = 0.09, 0.005  # duration of a pooling step of 4,096 tokens, and of a decode step


def run(turns: FairShare, kinds: str, steps: int, depth: int = 1) -> dict[bool, float]:
    """Device seconds spent on each kind of step. The kinds in `kinds` ("p", "g") always have work."""
    spent, flights = {False: 0.0, True: 0.0}, []

    def end() -> None:
        generates, estimate = flights.pop(0)
        took = TOKEN_S if generates else POOL_S
        spent[generates] += took
        turns.succeeded(generates, 128 if generates else 4096, estimate, took)

    for _ in range(steps):
        generates = turns.prefers_generation if len(kinds) == 2 else kinds == "g"
        others = len(kinds) == 2
        flights.append(
            (generates, turns.launched(generates, 128 if generates else 4096, other_has_work=others))
        )
        if len(flights) >= depth:
            end()
    while flights:
        end()
    return spent


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_both_kinds_of_steps_get_the_same_device_time(depth: int) -> None:
    spent = run(FairShare(), "pg", 2000, depth)
    assert abs(spent[False] - spent[True]) < 3 * POOL_S
    assert spent[True] > 1


def test_steps_that_take_no_time_alternate() -> None:
    turns, order = FairShare(), []
    for _ in range(6):
        order.append(generates := turns.prefers_generation)
        turns.succeeded(generates, 1, turns.launched(generates, 1, other_has_work=True), 0.0)
    assert order == [True, False] * 3


@pytest.mark.parametrize("alone", ["p", "g"])
def test_a_kind_without_work_saves_up_no_device_time(alone: str) -> None:
    turns = FairShare()
    run(turns, alone, 1000)
    spent = run(turns, "pg", 400)
    assert abs(spent[False] - spent[True]) < 3 * POOL_S


def test_a_failed_step_costs_its_kind_no_device_time() -> None:
    turns = FairShare()
    run(turns, "pg", 400)
    before = list(turns._spent_s)
    for _ in range(50):
        turns.failed(False, turns.launched(False, 4096, other_has_work=True))
    assert turns._spent_s == pytest.approx(before)

"""Which engine gets a request: the one with the least queued work, or the one that has cached its prefix or
query."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.balance import UNAVAILABLE, Affinity, Balancer, divide, home


def key(number: int) -> bytes:
    return number.to_bytes(16)


def test_the_least_loaded_engine_is_chosen_and_equal_ones_take_turns() -> None:
    balancer = Balancer()
    assert balancer.choose([5, 3, 4]) == 1
    assert [balancer.choose([0, 0, 0]) for _ in range(6)] == [2, 0, 1, 2, 0, 1]


def test_an_unavailable_engine_is_never_chosen() -> None:
    balancer = Balancer()
    assert {balancer.choose([UNAVAILABLE, 9, UNAVAILABLE]) for _ in range(4)} == {1}
    assert balancer.choose([UNAVAILABLE, UNAVAILABLE]) is None
    query = Affinity([key(1)], 5)
    owner = balancer.choose([0, 0], query, slack_tokens=10)
    assert owner is not None
    loads = [0.0, 0.0]
    loads[owner] = UNAVAILABLE
    assert balancer.choose(loads, query, slack_tokens=10) == 1 - owner


def test_a_known_key_is_preferred_up_to_what_it_saves_or_the_slack() -> None:
    balancer = Balancer()
    query = Affinity([key(1)], 20)
    owner = balancer.choose([0, 0, 0], query)
    assert owner is not None

    def with_load(load: float) -> list[float]:
        return [load if index == owner else 0.0 for index in range(3)]

    assert balancer.choose(with_load(20), query) == owner
    assert balancer.choose(with_load(50), query, slack_tokens=50) == owner
    assert balancer.choose(with_load(51), query, slack_tokens=50) != owner


def test_the_longest_known_prefix_decides() -> None:
    balancer = Balancer()
    first = balancer.choose([0, 9, 9], Affinity([key(1), key(2)], 64), slack_tokens=1)
    assert first == 0
    other = balancer.choose([999, 0, 999], Affinity([key(1), key(3)], 64), slack_tokens=1)
    assert other == 1, "the first engine is too busy"
    assert balancer.choose([0, 0, 0], Affinity([key(1), key(2), key(4)], 64)) == 0
    assert balancer.choose([0, 0, 0], Affinity([key(1), key(3), key(5)], 64)) == 1


def test_old_keys_are_forgotten() -> None:
    balancer = Balancer(max_known_keys=2)
    for number in range(4):
        balancer.choose([0, 0], Affinity([key(number)], 1), slack_tokens=10)
    assert len(balancer._known) == 2


def test_every_process_sends_a_new_key_to_the_same_engine_and_keys_are_spread() -> None:
    loads = [0.0] * 4
    homes = [home(key(number), loads) for number in range(400)]
    assert homes == [home(key(number), loads) for number in range(400)]
    assert all(60 < count < 140 for count in Counter(homes).values())
    moved = [home(key(number), [UNAVAILABLE, 0, 0, 0]) for number in range(400)]
    assert all(new == old for old, new in zip(homes, moved, strict=True) if old != 0)


@pytest.mark.parametrize(
    ("loads", "num_tokens", "min_tokens", "expected"),
    [
        ([0, 0, 0], 300, 10, [100, 100, 100]),
        ([0, 60, 0], 300, 10, [120, 60, 120]),
        ([0, 500, 0], 300, 10, [150, 0, 150]),
        ([0, 95, 0], 210, 10, [105, 0, 105]),
        ([0, UNAVAILABLE, 100], 300, 10, [200, 0, 100]),
        ([UNAVAILABLE, 7], 300, 10, [0, 300]),
        ([UNAVAILABLE, UNAVAILABLE], 300, 10, [0, 0]),
    ],
)
def test_a_large_request_is_divided_so_that_all_engines_finish_together(
    loads: list[float], num_tokens: int, min_tokens: int, expected: list[int]
) -> None:
    assert divide(loads, num_tokens, min_tokens) == expected

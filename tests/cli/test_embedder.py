"""Reading ahead: in order, one at a time too many at most, and never left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from penstock.cli.embedder import ahead
from penstock.errors import BadValue


def readers() -> int:
    return sum(thread.name == "penstock-read" for thread in threading.enumerate())


def test_items_come_in_order() -> None:
    assert list(ahead(iter(range(50)))) == list(range(50))


def test_the_next_item_is_made_while_this_one_is_used() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    ahead_of = ahead(items())
    assert next(ahead_of) == 0
    deadline_s = time.monotonic() + 10
    while len(made) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    time.sleep(0.02)
    assert made == [0, 1, 2]  # one waits, one is held by the thread, and no more
    ahead_of.close()


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise BadValue("line 2 is bad")

    found = []
    with pytest.raises(BadValue, match="line 2"):
        for item in ahead(items()):
            found.append(item)
    assert found == [1]


def test_a_reader_that_nobody_waits_for_ends() -> None:
    before = readers()
    for _ in ahead(iter(range(1000))):
        break
    deadline_s = time.monotonic() + 10
    while readers() > before:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)

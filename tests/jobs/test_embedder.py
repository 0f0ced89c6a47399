"""Read-ahead: in order, at most two items ahead, and without leaking threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.errors import BadValue
from penstock.jobs.embedder import read_ahead
from tests.waiting import PATIENCE_S, wait_until


def readers() -> int:
    return sum(thread.name == "penstock-read" for thread in threading.enumerate())


def test_items_come_in_order() -> None:
    assert list(read_ahead(iter(range(50)))) == list(range(50))


def test_the_next_item_is_read_while_this_one_is_used() -> None:
    read, has_read = [], threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            has_read.release()
            yield number

    for used, _ in enumerate(read_ahead(items()), start=1):
        assert len(read) <= used + 2  # one item waits in the queue, another in the thread
        if used == 1:
            for _ in range(3):
                assert has_read.acquire(timeout=PATIENCE_S)


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise BadValue("line 2 is bad")

    found = []
    with pytest.raises(BadValue, match="line 2"):
        for item in read_ahead(items()):
            found.append(item)
    assert found == [1]


def test_a_reader_thread_ends_when_its_consumer_stops() -> None:
    before = readers()
    for _ in read_ahead(iter(range(1000))):
        break
    wait_until(lambda: readers() <= before)

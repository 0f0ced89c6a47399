"""Rows that a resumed run reads: all missing ones, with the same chunk boundaries."""

from __future__ import annotations

import random

import pytest

from penstock.jobs.parts import Cut, Span
from penstock.jobs.plan import RowRange, first_missing, missing_ranges

CUT = Cut(rows=10)


def test_inputs_without_known_rows_are_one_range_from_the_first_gap() -> None:
    done = {Span(0, 10), Span(20, 10)}
    assert first_missing(done) == 10
    assert missing_ranges(None, CUT, 50, done) == [RowRange(10, 50)]


def test_ranges_end_where_files_end_and_skip_what_is_committed() -> None:
    assert missing_ranges((25, 5), CUT, None, set()) == [RowRange(0, 30)]
    assert missing_ranges((25, 5), CUT, None, {Span(10, 10)}) == [RowRange(0, 10), RowRange(20, 30)]
    assert missing_ranges((25, 5), CUT, 22, {Span(0, 10)}) == [RowRange(10, 22)]
    assert missing_ranges((25, 5), CUT, None, {Span(0, 10), Span(10, 10), Span(20, 5), Span(25, 5)}) == []


def test_a_chunk_of_which_a_piece_is_missing_is_read_again() -> None:
    done = {Span(0, 4), Span(7, 3)}  # of the pieces 0-4, 4-7 and 7-10
    assert missing_ranges((20,), CUT, None, done) == [RowRange(0, 20)]
    assert missing_ranges((20,), CUT, None, {*done, Span(4, 3)}) == [RowRange(10, 20)]


@pytest.mark.parametrize("seed", range(20))
def test_ranges_hold_every_missing_row_once(seed: int) -> None:
    chance = random.Random(seed)
    files = tuple(chance.randint(0, 45) for _ in range(4))
    grid, before = [], 0
    for rows in files:
        grid += [Span(at, min(10, before + rows - at)) for at in range(before, before + rows, 10)]
        before += rows
    done = {span for span in grid if chance.random() < 0.5}
    missing = {row for span in grid if span not in done for row in range(span.first, span.end)}
    ranges = missing_ranges(files, CUT, None, done)
    assert sorted(missing) == [row for start, stop in ranges for row in range(start, stop or before)]

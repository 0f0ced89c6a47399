"""Progress lines of a job without a terminal."""

from __future__ import annotations

import pytest

from penstock.jobs.progress import duration, log_lines


def test_a_line_says_rows_share_and_time_left_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    advance = log_lines(1000, lambda: now_s, every_s=30.0)
    for share in (0.1, 0.2, 0.3, 0.4):
        now_s += 20.0
        advance(100, share)
    assert capsys.readouterr().err.splitlines() == [
        "1,200 rows, 20.0%, 0:02:40 left",
        "1,400 rows, 40.0%, 0:02:00 left",
    ]


def test_an_input_of_unknown_size_has_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    advance = log_lines(0, lambda: now_s, every_s=30.0)
    now_s = 31.0
    advance(5, None)
    assert capsys.readouterr().err == "5 rows\n"


def test_durations_are_hours_minutes_and_seconds() -> None:
    assert [duration(seconds) for seconds in (0.4, 61, 3600 * 30 + 5)] == ["0:00:00", "0:01:01", "30:00:05"]

"""Progress of a running job: a progress bar on a terminal, otherwise occasional log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOG_SECONDS = 30.0
Advance = Callable[[int, float | None], None]  # number of further rows, share of the input read


def report_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@contextmanager
def show_progress(rows: int) -> Iterator[Advance]:
    """Show the progress of a run that starts with `rows` rows already done."""
    if sys.stderr.isatty():
        with _bar(rows) as advance:
            yield advance
    else:
        yield log_lines(rows, time.monotonic)


def log_lines(rows: int, clock: Callable[[], float], every_s: float = LOG_SECONDS) -> Advance:
    """Report progress as lines on stderr, at most one every `every_s` seconds."""
    began_s = said_s = clock()
    done, first_share = rows, None

    def advance(count: int, share: float | None) -> None:
        nonlocal done, said_s, began_s, first_share
        done += count
        if first_share is None:
            first_share, began_s = share, clock()
        if clock() - said_s < every_s:
            return
        said_s = clock()
        report_line(f"{done:,} rows{_time_left(first_share, share, said_s - began_s)}")

    return advance


def _time_left(first_share: float | None, share: float | None, elapsed_s: float) -> str:
    """Format the share done and the time left. `elapsed_s` is the time from `first_share` to `share`."""
    if share is None or first_share is None:
        return ""
    shown = f", {share:.1%}"
    if share <= first_share:
        return shown
    left_s = elapsed_s * (1.0 - share) / (share - first_share)
    return f"{shown}, {duration(left_s)} left"


def duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


@contextmanager
def _bar(rows: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, rows=rows)

        def advance(count: int, share: float | None) -> None:
            done = bar.tasks[0].fields["rows"] + count
            bar.update(task, rows=done, total=None if share is None else 1.0, completed=share or 0.0)

        yield advance

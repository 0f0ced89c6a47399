"""The progress bar of long offline calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.tasks.run import WINDOW_ROWS

_MIN_ROWS = 2 * WINDOW_ROWS


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the bar. By default (None) only long calls on a terminal show a bar."""
    show = total > _MIN_ROWS and sys.stderr.isatty() if wanted is None else wanted
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)

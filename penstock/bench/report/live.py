"""The live line of a running load on a terminal: requests, tokens/s, p50, p99, errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.bench.load.fleet import Watch
from penstock.bench.load.progress import Progress


@contextmanager
def live(title: str, duration_s: float | None = None) -> Iterator[Watch | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as view:

        def watch(progress: Progress) -> None:
            view.update(Text.from_markup(title + state(progress, duration_s)), refresh=True)

        yield watch


def state(progress: Progress, duration_s: float | None = None) -> str:
    """One line, short enough for a terminal of 80 columns."""
    p50, p99 = progress.percentiles_ms()
    done = progress.completed + progress.failed
    elapsed = progress.elapsed_s
    if progress.planned is not None:
        count = f"{done}/{progress.planned}"
    else:
        count = f"{done} in {elapsed:.0f}/{duration_s or 0:g} s"
    errors = f"[red]{progress.failed} failed[/red]" if progress.failed else "0 failed"
    return (
        f"{count} · {progress.completed / elapsed:,.0f} req/s · {progress.tokens / elapsed:,.0f} tok/s · "
        f"p50 {p50:.1f} p99 {p99:.1f} ms · {errors}"
    )

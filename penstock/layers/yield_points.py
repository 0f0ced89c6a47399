"""Points where a step on a CPU lets other work run. Layers call `yield_point` before each large product.

The hook is thread-local, so engines in one process do not share hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Hook = Callable[[], None]


class _Thread(threading.local):
    hook: Hook | None = None


_thread = _Thread()


def yield_point() -> None:
    """Let other work run if this thread's step can be interrupted."""
    if (hook := _thread.hook) is not None:
        hook()


@contextmanager
def yielding_to(hook: Hook | None) -> Iterator[None]:
    """Call `hook` at every yield point of this thread; None: call nothing."""
    before = _thread.hook
    _thread.hook = hook
    try:
        yield
    finally:
        _thread.hook = before

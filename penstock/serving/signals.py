"""Signals that one thread waits for, instead of handling them between any two instructions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from types import FrameType


@contextmanager
def waited_for(signals: Set[signal.Signals]) -> Iterator[None]:
    """Within the block, the main thread can wait for these signals by `signal.sigtimedwait`.

    They are blocked in this thread and in those that it starts. Threads that are older, such as those of
    NumPy's matrix library, do not block them: the system may choose one of these for a signal to the process,
    where the default action would end the process at once. A handler passes such a signal on to this thread.
    Python runs it when the thread does not wait, so `sigtimedwait` needs a short timeout.
    """
    waiting = threading.get_ident()

    def pass_on(number: int, frame: FrameType | None) -> None:
        signal.pthread_kill(waiting, number)

    handlers = {each: signal.signal(each, pass_on) for each in signals}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

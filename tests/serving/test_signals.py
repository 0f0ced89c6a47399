"""Signals wait for the thread that asks for them, whatever other threads there are."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The thread does not block the signal, as those of NumPy's matrix library do not.
PROGRAM = """
import signal, sys, threading
from penstock.serving.signals import waited_for

threading.Thread(target=threading.Event().wait, daemon=True).start()
with waited_for({signal.SIGTERM, signal.SIGCHLD}):
    print("busy", flush=True)
    sys.stdin.readline()
    while (info := signal.sigtimedwait({signal.SIGTERM, signal.SIGCHLD}, 0.1)) is None:
        pass
    print(info.si_signo, flush=True)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGCHLD])
def test_a_signal_that_comes_while_the_thread_is_busy_is_taken_later(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        process.send_signal(number)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{number.value}\n"
        assert process.stdout.readline() == "True\n", "the handlers from before are back"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM

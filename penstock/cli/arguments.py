"""Hides secrets in the command line of this process, which other users of the machine can see."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Collection
from pathlib import Path

_ARGUMENTS_BEGIN = 45  # field of /proc/self/stat, counted from the one after the name


def hide_arguments(flags: Collection[str]) -> None:
    """Overwrite all values of these flags in the command line."""
    for argument, following in zip(sys.argv, [*sys.argv[1:], None], strict=True):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") in flags:
            hide_argument(value if equals else following)


def hide_argument(secret: str | None) -> None:
    """Overwrite a secret in the command line that `ps` shows. Linux only; elsewhere it stays visible.

    The kernel shows the memory in which the process received its arguments, and the process may change it.
    """
    if not secret:
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = (int(field) for field in fields[_ARGUMENTS_BEGIN : _ARGUMENTS_BEGIN + 2])
        shown, hidden = Path("/proc/self/cmdline").read_bytes(), secret.encode()
        if begin == 0 or len(shown) != end - begin:
            return  # something else, such as setproctitle, manages this memory
        for argument in shown.split(b"\0"):
            if argument == hidden or argument.endswith(b"=" + hidden):
                ctypes.memset(begin + len(argument) - len(hidden), ord("x"), len(hidden))
            begin += len(argument) + 1

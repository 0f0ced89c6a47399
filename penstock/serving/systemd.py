"""What systemd is told about a server that it has started as a service of `Type=notify`."""

from __future__ import annotations

import contextlib
import os
import socket
import time

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"

_MAX_ALIVE_S = 1.0  # between two signs of life
_SEND_S = 1.0  # for a message to a manager that has not read the last ones yet
_last_alive_s = float("-inf")


def notify(*states: str) -> None:
    """Send assignments such as `READY=1` to systemd. Does nothing in a process that it has not started."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        _send(address, "\n".join(states))


def notify_alive() -> None:
    """Tell systemd that this process is not stuck, as often as it has to know. Does nothing for a unit
    without `WatchdogSec=`."""
    global _last_alive_s
    if not (allowed := os.environ.get("WATCHDOG_USEC", "")).isdigit():
        return
    now_s = time.monotonic()
    if now_s - _last_alive_s >= min(_MAX_ALIVE_S, int(allowed) / 4e6):
        _last_alive_s = now_s
        notify(ALIVE)


def _send(address: str, message: str) -> None:
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),  # a server outlives its service manager
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        sender.settimeout(0 if message == ALIVE else _SEND_S)  # the next sign of life comes soon anyway
        sender.sendto(message.encode(), address)

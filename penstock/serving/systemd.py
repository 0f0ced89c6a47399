"""What systemd is told about a server that it has started as a service of `Type=notify`."""

from __future__ import annotations

import contextlib
import os
import socket

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"


def notify(*states: str) -> None:
    """Send assignments such as `READY=1` to systemd. Does nothing in a process that it has not started."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        _send(address, "\n".join(states))


def notify_alive() -> None:
    """Tell systemd that this process is not stuck. Does nothing for a unit without `WatchdogSec=`."""
    if "WATCHDOG_USEC" in os.environ:
        notify(ALIVE)


def _send(address: str, message: str) -> None:
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),  # a server outlives its service manager
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        sender.setblocking(False)
        sender.sendto(message.encode(), address)

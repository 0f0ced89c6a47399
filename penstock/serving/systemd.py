"""Notifications to systemd from a server that runs as a `Type=notify` service."""

from __future__ import annotations

import contextlib
import os
import socket
import time

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"

_MAX_ALIVE_S = 1.0  # longest time between two watchdog notifications
_SEND_S = 1.0  # send timeout when systemd has not read earlier messages yet
_last_alive_s = float("-inf")


def notify(*states: str) -> None:
    """Send assignments such as `READY=1` to systemd. Does nothing if systemd did not start this process."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        _send(address, "\n".join(states))


def notify_alive() -> None:
    """Reset systemd's watchdog, at most once per interval. Does nothing for a unit without `WatchdogSec=`."""
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
        contextlib.suppress(OSError),  # the server must not fail because systemd is gone
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        # Watchdog notifications never wait: the next one follows soon.
        sender.settimeout(0 if message == ALIVE else _SEND_S)
        sender.sendto(message.encode(), address)

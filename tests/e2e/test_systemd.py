"""A server started by systemd reports that it is ready, that it is alive, and that it stops."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.e2e.server import serving
from tests.waiting import PATIENCE_S


def test_a_service_of_type_notify_follows_the_server(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        asked = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "60000000"}
        with serving("--device", "null", environment={**os.environ, **asked}) as server:
            messages = [manager.recv(1000).decode()]
            while not messages[-1].startswith("READY=1"):
                messages.append(manager.recv(1000).decode())
            assert "\nSTATUS=serving " in messages[-1]
            while messages[-1] != "WATCHDOG=1":
                messages.append(manager.recv(1000).decode())
            assert server.terminate() == 0
            while messages[-1] != "STOPPING=1":
                messages.append(manager.recv(1000).decode())

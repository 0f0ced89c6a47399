"""Starts real servers for tests, on loopback, ended by their process id."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def children(self, module: str) -> list[int]:
        """Process ids of this server's children that run `module`."""
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            if parent == self.process.pid and module.encode() in words:
                found.append(int(folder.name))
        return found

    def wait_ready(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError("the server ended:\n" + "".join(self.log))
            try:
                if httpx.get(f"{self.url}/ready", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError("the server is not ready:\n" + "".join(self.log))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        rows = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, flags=re.MULTILINE)
        return sum(float(value) for value in rows)

    def wait_for(self, condition: object, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline, "waited in vain\n" + "".join(self.log)
            time.sleep(0.05)

    def terminate(self) -> int:
        os.kill(self.process.pid, signal.SIGTERM)
        return self.process.wait(150)


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    port = _free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", "--port", str(port), "--api-server-count", "1", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = Server(process, port)
    reader = threading.Thread(target=_collect, args=(server,), daemon=True)
    reader.start()
    try:
        server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            server.terminate()
        reader.join(5)


def _collect(server: Server) -> None:
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.log.append(line)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

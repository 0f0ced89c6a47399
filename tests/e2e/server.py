"""Real servers for tests, on loopback ports. Each is terminated by its process id."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from tests.api.model_server import serving_models
from tests.waiting import PATIENCE_S, wait_until

ENGINE, API = "penstock.serving.engine_process", "penstock.api.process"
_READY = re.compile(r"(?:is|are) ready at https?://\S+:(\d+)")


@dataclass
class Server:
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    @cached_property
    def port(self) -> int:
        """The port that the server chose and logged when it became ready."""
        return int(next(found[1] for line in self.log if (found := _READY.search(line))))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def http(self) -> httpx.Client:
        """A shared client: creating one costs more than most requests."""
        return self.client()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def children(self, module: str) -> list[int]:
        """Process ids of the server's children that run `module`."""
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

    @contextmanager
    def stopped(self, module: str) -> Iterator[int]:
        """Stop the only child that runs `module` with SIGSTOP. Continue it afterwards if it lives."""
        (pid,) = self.children(module)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            if pid in self.children(module):
                os.kill(pid, signal.SIGCONT)

    @property
    def runtime_folder(self) -> Path:
        """The server's runtime folder, found in the supervisor's memory maps."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return Path(next(line.split()[-1] for line in maps if line.endswith("/engine.status"))).parents[1]

    def engines(self) -> list[int]:
        """Process ids of engines that serve or start, without the standby engine."""
        found = []
        for pid in self.children(ENGINE):
            with contextlib.suppress(OSError):
                if re.search(r"/engine\d*\.status", Path(f"/proc/{pid}/maps").read_text()):
                    found.append(pid)
        return found

    def kill(self, module: str) -> None:
        """Kill the only child that runs `module`, and wait until it has been replaced."""
        (pid,) = self.children(module)
        os.kill(pid, signal.SIGKILL)
        self.wait_for(lambda: self.children(module) not in ([], [pid]))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = self.http.get("/metrics").text
        rows = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, flags=re.MULTILINE)
        return sum(float(value) for value in rows)

    def wait_for(self, condition: Callable[[], object]) -> None:
        def holds() -> object:
            assert self.process.poll() is None, "the server exited:\n" + "".join(self.log)
            return condition()

        wait_until(holds, explain=lambda: "".join(self.log))

    def wait_for_metric(self, name: str, value: float) -> None:
        self.wait_for(lambda: self.metric(name) == value)

    def wait_for_log(self, words: str) -> None:
        self.wait_for(lambda: any(words in line for line in list(self.log)))

    def wait_ready(self) -> None:
        """Wait until the server is ready, for example after a process was killed."""

        def ready() -> bool:
            try:
                return self.http.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        self.wait_for(ready)

    def terminate(self) -> int:
        """Terminate the server with SIGTERM, as an operator would, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def serving(
    *flags: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[Server]:
    """Start a server with one API process and yield it when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", "--port", "0", "--api-server-count", "1", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=cwd,
    )
    server = Server(process)
    reader = threading.Thread(target=_collect_log, args=(server,), daemon=True)
    reader.start()
    try:
        server.wait_for_log(" ready at ")
        yield server
    finally:
        if "http" in vars(server):
            server.http.close()
        if process.poll() is None:
            server.terminate()
        reader.join(PATIENCE_S)


@contextmanager
def serving_here(folder: Path, **options: Any) -> Iterator[httpx.Client]:
    """Serve a model from this process, where torch is already imported. For tests of a model's answers that
    do not depend on processes. The options are fields of `EngineConfig`."""
    with (
        serving_models({folder.name: folder}, {folder.name: options}) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_S) as http,
    ):
        yield http


class ServerPool:
    """Servers that stay up until the session ends, one for each set of flags."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, ...], Server] = {}
        self._stack = ExitStack()

    def get(self, *flags: str) -> Server:
        if flags not in self._running:
            self._running[flags] = self._stack.enter_context(serving(*flags))
        return self._running[flags]

    def close(self) -> None:
        self._stack.close()


def _collect_log(server: Server) -> None:
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.log.append(line)

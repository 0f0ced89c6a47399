"""Start a server for a measurement, and keep it busy with a light client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection


@dataclass(frozen=True)
class Running:
    port: int
    pid: int


@contextmanager
def start(
    flags: list[str], tree: str | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Start `penstock serve` on a free loopback port, wait until it is ready, stop it with SIGTERM. `tree` is
    the checkout to run, by default that of this process. `environment` is added to the current
    environment."""
    port = free_port()
    added = {**(environment or {}), **({} if tree is None else {"PYTHONPATH": tree})}
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", "--port", str(port), "--log-level", "warning", *flags],
        env={**os.environ, **added},
        cwd=tree,
    )
    try:
        until = time.monotonic() + 120
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit("the server did not start")
            time.sleep(0.01)
        yield Running(port, process.pid)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def run_load(port: int, texts: list[str], clients: int, latencies: list[float] | None = None) -> float:
    """Seconds until every text has been answered, one text per request, `clients` requests at a time. Each
    request's seconds are appended to `latencies`."""
    bodies = [json.dumps({"input": text, "truncate_prompt_tokens": -1}).encode() for text in texts]
    return asyncio.run(_load(port, bodies, clients, [] if latencies is None else latencies))


async def _load(port: int, bodies: list[bytes], clients: int, latencies: list[float]) -> float:
    waiting = iter(bodies)

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body in waiting:
            head = f"POST /v1/embeddings HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
            sent = time.perf_counter()
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            status = answer.split(b" ", 2)[1]
            length = next(
                int(line.split(b":")[1])
                for line in answer.split(b"\r\n")
                if line.startswith(b"content-length")
            )
            await reader.readexactly(length)
            latencies.append(time.perf_counter() - sent)
            if status != b"200":
                raise SystemExit(f"the server answered {status.decode()}")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - began

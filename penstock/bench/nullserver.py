"""A server that computes nothing: `python -m penstock.bench.nullserver`.

It answers every request with the same prepared bytes, and sends streams event by event, so that `--self-test`
measures the load client alone.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.bench.load.worker import fast_loop
from penstock.isolation import isolated_environment, isolated_python

_LENGTH = b"content-length:"


class NullProtocol(asyncio.Protocol):
    """Looks only for the end of a request: the blank line after its headers plus its Content-Length."""

    pieces: Sequence[bytes] = (b"",)  # parts of the answer, with one write for each

    def __init__(self) -> None:
        self._rest = b""
        self._missing = 0  # bytes of the current body that have not arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = transport.write  # type: ignore[attr-defined]
        self._closing = transport.is_closing
        self._later = asyncio.get_running_loop().call_soon

    def _answer(self, at: int = 0) -> None:
        """Write one piece per iteration of the event loop, so that all connections take turns."""
        if self._closing():
            return
        self._write(self.pieces[at])
        if at + 1 < len(self.pieces):
            self._later(self._answer, at + 1)

    def data_received(self, data: bytes) -> None:
        if self._missing > len(data):
            self._missing -= len(data)
            return
        if self._missing:
            data, self._missing = data[self._missing :], 0
            self._answer()
        data = self._rest + data
        self._rest = b""
        while data:
            head = data.find(b"\r\n\r\n")
            if head < 0:
                self._rest = data
                return
            end = head + 4 + _body_size(data[:head])
            if len(data) < end:
                self._missing = end - len(data)
                return
            self._answer()
            data = data[end:]


def _body_size(head: bytes) -> int:
    lower = head.lower()
    at = lower.find(_LENGTH)
    return int(lower[at + len(_LENGTH) :].split(b"\r\n", 1)[0]) if at >= 0 else 0


@contextmanager
def null_server(
    body: Sequence[bytes], processes: int = 1, content_type: str = "application/json"
) -> Iterator[int]:
    """Run the server in separate processes on one port; yield the port."""
    size = sum(map(len, body))
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {size}\r\n\r\n"
    pieces = [head.encode() + body[0], *body[1:]]
    port, started = 0, []
    try:
        for _ in range(processes):
            process, port = _start(port, pieces)
            started.append(process)
        yield port
    finally:
        for process in started:
            process.communicate(timeout=10)  # the process ends when its input closes


def _start(port: int, pieces: Sequence[bytes]) -> tuple[subprocess.Popen[bytes], int]:
    process = subprocess.Popen(
        isolated_python("-m", "penstock.bench.nullserver"),
        env=isolated_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    sizes = " ".join(str(len(piece)) for piece in pieces)
    process.stdin.write(f"{port} {sizes}\n".encode() + b"".join(pieces))
    process.stdin.flush()
    return process, int(process.stdout.readline())


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(NullProtocol, "127.0.0.1", port, backlog=4096, reuse_port=True)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.buffer.read)  # until the parent closes it


def main() -> None:
    """Read a line with the port and the size of each piece from stdin, then the pieces."""
    port, *sizes = (int(word) for word in sys.stdin.buffer.readline().split())
    NullProtocol.pieces = [sys.stdin.buffer.read(size) for size in sizes]
    with asyncio.Runner(loop_factory=fast_loop) as runner:
        runner.run(_serve(port))


if __name__ == "__main__":
    main()

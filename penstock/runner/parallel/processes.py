"""The processes of the ranks from 1 on. Rank 0 starts and watches them.

They are children of rank 0's process, and end with it, because their socket closes. If one of them ends first
or reports an error, rank 0 gives up: no step can run without all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import subprocess
from collections.abc import Callable
from threading import Lock, Thread
from typing import IO, cast

import msgspec

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.errors import DeviceFailed, ModelLoadError
from penstock.isolation import isolated_environment, isolated_python
from penstock.logs import JsonFormatter
from penstock.runner.parallel.plans import Message
from penstock.runner.parallel.ring import PlanWriter, create_memory, receive

log = logging.getLogger("penstock.parallel")
RANK_MODULE = "penstock.runner.parallel.rank"
_LENGTH = struct.Struct("<q")
_STOP_TIMEOUT_S = 10.0


class RankLaunch(msgspec.Struct, frozen=True):
    """The configuration of one rank, which it reads from its standard input."""

    rank: int
    device: str
    uses_nccl: bool
    spec: ModelSpec
    settings: Resolved
    memory: int  # descriptor of the shared memory for plans
    connection: int  # descriptor of the socket to rank 0
    adapter_connection: int | None  # of the socket for adapter orders; None: the model takes no adapters
    meeting: str  # path of the file by which ranks connect; every rank has its descriptor
    log_level: str
    log_format: str


class Built(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded its share of the model."""

    num_blocks: int = 0  # KV cache blocks that its device has room for


class Start(msgspec.Struct, frozen=True, tag=True):
    """Sent by rank 0 when all ranks have loaded their shares: connect, then run plans."""

    num_blocks: int = 0  # KV cache blocks of every rank


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot continue."""

    message: str
    is_lasting: bool = False  # another start would fail in the same way


RankMessage = Built | Failed


def send_message(connection: socket.socket, message: msgspec.Struct) -> None:
    content = msgspec.json.encode(message)
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive_message(connection: socket.socket) -> bytes | None:
    """The next message as JSON; None if the other end is closed."""
    if (length := receive(connection, _LENGTH.size)) is None:
        return None
    return receive(connection, _LENGTH.unpack(length)[0])


class Ranks:
    """The other ranks, from the view of rank 0."""

    def __init__(self, spec: ModelSpec, settings: Resolved, devices: list[str], *, uses_nccl: bool) -> None:
        """Start a process for each rank from 1 on. `devices`: the device of every rank, including rank 0."""
        self.failure: DeviceFailed | None = None
        self._uses_nccl = uses_nccl
        self._on_failed: list[Callable[[DeviceFailed], None]] = []
        self._lock = Lock()
        self._is_closing = self._is_closed = False
        # An anonymous file by which ranks connect: nothing is left behind, however the processes end.
        self._meeting = os.memfd_create("penstock-ranks", os.MFD_CLOEXEC)
        self.meeting = f"/proc/self/fd/{self._meeting}"
        self._sockets: list[socket.socket] = []
        self.adapter_sockets: list[socket.socket] = []  # empty: the model takes no adapters
        self._processes: list[subprocess.Popen[bytes]] = []
        self._wake, self._woken = socket.socketpair()
        self._watcher: Thread | None = None
        self._plans: PlanWriter | None = None
        memory = create_memory()
        try:
            for rank, device in enumerate(devices[1:], start=1):
                self._spawn(rank, device, spec, settings, memory)
            self._plans = PlanWriter(memory, self._sockets, self.check)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)  # it stays mapped

    def _spawn(self, rank: int, device: str, spec: ModelSpec, settings: Resolved, memory: int) -> None:
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        given = [theirs]
        if settings.max_loras:
            ours, for_adapters = socket.socketpair()
            self.adapter_sockets.append(ours)
            given.append(for_adapters)
        level, format = _logging()
        launch = RankLaunch(
            rank=rank,
            device=device,
            uses_nccl=self._uses_nccl,
            spec=spec,
            settings=settings,
            memory=memory,
            connection=theirs.fileno(),
            adapter_connection=given[1].fileno() if settings.max_loras else None,
            meeting=self.meeting,
            log_level=level,
            log_format=format,
        )
        try:
            process = subprocess.Popen(
                isolated_python("-m", RANK_MODULE),
                stdin=subprocess.PIPE,
                pass_fds=(memory, self._meeting, *(each.fileno() for each in given)),
                env=isolated_environment(),
            )
        finally:
            for each in given:
                each.close()
        self._processes.append(process)
        stdin = cast(IO[bytes], process.stdin)
        with contextlib.suppress(BrokenPipeError), stdin:  # an early exit is noticed at the socket
            stdin.write(msgspec.json.encode(launch))

    def wait_until_built(self) -> list[int]:
        """Wait until all ranks have loaded their shares. Returns the KV cache blocks that fit on each."""
        counts = []
        for rank, connection in enumerate(self._sockets, start=1):
            message = self._receive(rank, connection)
            if isinstance(message, Failed):
                words = f"rank {rank} cannot load the model: {message.message}"
                raise ModelLoadError(words, param="model") if message.is_lasting else DeviceFailed(words)
            counts.append(message.num_blocks)
        return counts

    def start(self, num_blocks: int) -> None:
        """Let all ranks connect, and watch them from here on."""
        for connection in self._sockets:
            send_message(connection, Start(num_blocks))
        self._watcher = Thread(target=self._watch, name="penstock-ranks", daemon=True)
        self._watcher.start()

    def send(self, message: Message) -> None:
        """Tell every rank to run a plan."""
        self.check()
        assert self._plans is not None
        try:
            self._plans.send(message)
        except OSError as error:
            raise self._fail(f"a rank of this engine is gone: {error}") from error

    def check(self) -> None:
        """Raise if a rank is gone."""
        if self.failure is not None:
            raise self.failure

    def watch(self, on_failed: Callable[[DeviceFailed], None]) -> None:
        """Call a function, on another thread, when a rank is gone; at once if a rank is gone already."""
        with self._lock:
            self._on_failed.append(on_failed)
            failure = self.failure
        if failure is not None:
            on_failed(failure)

    def stop(self) -> None:
        """Tell all ranks to exit."""
        self._is_closing = True
        if self._plans is not None:
            self._plans.stop()

    def close(self) -> None:
        """End the processes of all ranks."""
        self.stop()
        with contextlib.suppress(OSError):
            self._wake.send(b"!")
        if self._watcher is not None:
            self._watcher.join()
        for each in (*self._sockets, *self.adapter_sockets, self._wake, self._woken):
            each.close()
        for process in self._processes:
            _end(process)
        if not self._is_closed:
            os.close(self._meeting)
            self._is_closed = True

    def _receive(self, rank: int, connection: socket.socket) -> RankMessage:
        content = receive_message(connection)
        if content is None:
            raise DeviceFailed(self._describe_exit(rank))
        message: RankMessage = msgspec.json.decode(content, type=Built | Failed)
        return message

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, 0)
            for rank, connection in enumerate(self._sockets, start=1):
                selector.register(connection, selectors.EVENT_READ, rank)
            while not self._is_closing:
                for key, _ in selector.select():
                    if key.data and not self._is_closing:
                        self._fail(self._explain(key.data, self._sockets[key.data - 1]))
                        return

    def _explain(self, rank: int, connection: socket.socket) -> str:
        try:
            message = self._receive(rank, connection)
        except DeviceFailed as error:
            return error.message
        return f"rank {rank} failed: {message.message if isinstance(message, Failed) else message}"

    def _describe_exit(self, rank: int) -> str:
        process = self._processes[rank - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        code = process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        return f"rank {rank} of this engine {how}"

    def _fail(self, message: str) -> DeviceFailed:
        with self._lock:
            if self.failure is None:
                self.failure = DeviceFailed(message)
                log.error("%s", message)
            waiting, self._on_failed = self._on_failed, []
            failure = self.failure
        for each in waiting:
            each(failure)
        return failure


def _logging() -> tuple[str, str]:
    """The level and the format of this process's logs."""
    root = logging.getLogger()
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
    return logging.getLevelName(root.getEffectiveLevel()), "json" if is_json else "text"


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

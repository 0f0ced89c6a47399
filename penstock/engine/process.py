"""The engine's own process: an `EngineCore` behind a ZeroMQ socket.

Reads its launch order from standard input, so that nothing secret stands on the command line, loads
the model, and serves until it is told to stop or its parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from threading import Thread

import msgspec
import zmq

from penstock.checkpoint.spec import ModelSpec, with_limit
from penstock.config import EngineConfig
from penstock.core import Array, Continued, Generated, Names
from penstock.engine.arena import Place, open_arena
from penstock.engine.build import build_core
from penstock.engine.core import EngineCore, Failure, Outcome
from penstock.engine.messages import (
    Attached,
    Cancel,
    Compare,
    GivenBack,
    Hello,
    Ready,
    Submit,
    decode_to_engine,
    encode,
    in_messages,
    pack_outcomes,
    unpack_comparison,
    unpack_requests,
)
from penstock.engine.stream import Division
from penstock.errors import PenstockError
from penstock.runner.load import settle
from penstock.runner.profile import ProfiledRunner

log = logging.getLogger("penstock.engine")
EXIT_BAD_MODEL = 3  # restarting would fail in the same way
EXIT_DEVICE_FAILED = 4  # only a new process can use the device again


class Launch(msgspec.Struct, frozen=True):
    """What the supervisor tells an engine process."""

    engine: EngineConfig
    spec: ModelSpec
    address: str
    log_level: str = "info"
    shared_memory_mb: int = 0
    metrics_folder: str | None = None  # where processes share their metrics; None: they do not


class EngineServer:
    """Owns the core and the socket; one thread, which sleeps until a message or a finished step."""

    IDLE_MS = 1000
    UNSHOWN_MS = 100  # the same, while the metrics do not show how things stand
    LAST_WORDS_S = 0.2  # for others to read why requests failed: with the connection goes what is unread

    def __init__(self, address: str, shared_bytes: int = 0) -> None:
        self.arena = open_arena(shared_bytes)
        self._context = zmq.Context(io_threads=4)  # large answers to several API processes leave side by side
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._address = address
        self._bell_in, self._bell_out = socket.socketpair()
        self._bell_in.setblocking(False)
        self._bell_out.setblocking(False)
        self._owner: dict[str, bytes] = {}  # request → API process
        self._told: dict[bytes, Names] = {}  # API process → the rows that it was last told go on
        self._division = Division()
        self._stopping = False

    def wake(self) -> None:
        """Ring the bell; callable from any thread and from a signal handler."""
        with contextlib.suppress(BlockingIOError):
            self._bell_in.send(b"!")

    def stop(self) -> None:
        self._stopping = True
        self.wake()

    def serve(self, core: EngineCore, ready: Ready, observe: Callable[[EngineCore], bool]) -> None:
        if self.arena is not None:
            core.empty = self.arena.empty
            ready = msgspec.structs.replace(ready, shared=self.arena.shared)
        self._core, self._ready = core, ready
        self._socket.bind(self._address)  # only now: a connection means that the engine can serve
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell_out.fileno(), zmq.POLLIN)
        shown = True
        while core.broken is None and (not self._stopping or core.busy):
            if self._bell_out.fileno() in dict(poller.poll(self._patience_ms(shown))):
                self._hush()
            self._answer(self._receive())
            self._answer(core.step())
            if not core.busy:
                self._told.clear()  # or the names of processes that have gone would stay
            shown = observe(core)
        if core.broken is None:  # else its threads may wait for the device for ever
            core.close()
        else:
            time.sleep(self.LAST_WORDS_S)
        self._context.destroy(linger=2000)
        if self.arena is not None:
            self.arena.close()

    def _patience_ms(self, shown: bool) -> int:
        idle_ms = self.IDLE_MS if shown else self.UNSHOWN_MS
        deadline = self._core.next_deadline_s()
        if deadline is None:
            return idle_ms
        return max(1, min(idle_ms, int((deadline - self._core.clock()) * 1000) + 1))

    def _hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._bell_out.recv(4096)) == 4096:
                pass

    def _receive(self) -> list[Outcome]:
        """Take the messages that have arrived, all of them or until the device could have a full step: in a
        flood it would wait for the last. What cannot be taken on fails at once."""
        refused: list[Outcome] = []
        while True:
            try:
                sender, header, *bulk = self._socket.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return refused
            message = decode_to_engine(header)
            if isinstance(message, Submit):
                refused += self._submit(sender, message, bulk[0])
            elif isinstance(message, Compare):
                self._owner[message.id] = sender
                self._core.compare(unpack_comparison(message, bulk))
            elif isinstance(message, Cancel):
                for request_id in message.ids:
                    self._core.cancel(request_id)
                    self._owner.pop(request_id, None)
            elif isinstance(message, Hello):
                self._socket.send_multipart([sender, encode(self._ready)])
            elif self.arena is not None and message.shared == self.arena.shared.name:
                if isinstance(message, Attached):
                    self.arena.attach(sender, message.reader, message.pid)
                elif isinstance(message, GivenBack):
                    self.arena.give_back(sender, message.blocks)
            if self._core.starving:  # looked at behind each message, so that every turn takes one
                return refused

    def _submit(self, sender: bytes, message: Submit, frame: bytes) -> list[Outcome]:
        refused: list[Outcome] = []
        for request in unpack_requests(message.entries, frame):
            self._owner[request.id] = sender
            try:
                self._core.add(request)
            except PenstockError as error:
                refused.append(Failure(request.id, error))
        return refused

    def _answer(self, outcomes: list[Outcome]) -> None:
        """All outcomes of one turn, one message for each API process and each large answer. Sending never
        waits: an API process that reads slowly has its messages kept for it."""
        by_owner: dict[bytes, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            if isinstance(outcome, Continued):
                for whose, (rows, places) in self._division.of(outcome.rows, self._owner).items():
                    by_owner[whose].append(Continued(rows, outcome.token_ids[places]))
            elif (owner := self._owner.get(outcome.id)) is not None:
                by_owner[owner].append(outcome)
        for outcome in outcomes:
            if isinstance(outcome, Continued):
                continue
            if not isinstance(outcome, Generated) or not self._core.generates(outcome.id):
                self._owner.pop(outcome.id, None)
        for owner, theirs in by_owner.items():
            told = self._told.get(owner, ())
            for some in in_messages(theirs):
                frames = pack_outcomes(some, told, partial(self._lend, owner))
                self._socket.send_multipart([owner, *frames], zmq.NOBLOCK, copy=False)
                told = next((o.rows for o in reversed(some) if isinstance(o, Continued)), told)
            self._told[owner] = told

    def _lend(self, owner: bytes, array: Array) -> Place | None:
        return None if self.arena is None else self.arena.lend(array, owner)


def prepare_child() -> None:
    """What every child of the supervisor does first: die with it, take signals, leave ctrl-C to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2}
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def begin(device: str) -> None:
    """What a start takes longest for, and needs to know no model for."""
    if device == "null":
        return
    if device != "cpu":
        Thread(target=_wake_driver, args=(device,), daemon=True).start()
    import torch  # noqa: F401


def _wake_driver(device: str) -> None:
    """The context of a GPU, made while torch is imported, which then finds it there."""
    with contextlib.suppress(OSError, ValueError):
        number = int(device.partition(":")[2] or 0)
        driver, made = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(made), number)


def main() -> None:
    prepare_child()
    begin(*sys.argv[1:2] or ("null",))
    order = sys.stdin.buffer.read()
    if not order:  # whoever began it has thought better of it
        return
    launch = msgspec.json.decode(order, type=Launch)
    if launch.metrics_folder is not None:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = launch.metrics_folder  # read by the library's import
    logging.basicConfig(level=launch.log_level.upper(), format="%(levelname)s engine: %(message)s")
    server = EngineServer(launch.address, launch.shared_memory_mb << 20)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    try:
        settings = settle(launch.engine, launch.spec)
        from penstock.engine.metrics import EngineMetrics

        metrics = EngineMetrics(launch.spec.name, server.arena)
        core = build_core(
            with_limit(launch.spec, settings.max_model_len), settings, server.wake, metrics.step
        )
    except PenstockError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(EXIT_BAD_MODEL)
    if isinstance(profiled := core.runner, ProfiledRunner):
        signal.signal(signal.SIGUSR2, lambda *_: profiled.again())
    gc.collect()
    gc.freeze()  # what is there now stays: no later collection has to look at it
    server.serve(core, Ready(os.getpid(), msgspec.to_builtins(settings)), metrics.turn)
    if core.broken is not None:
        log.error("%s", core.broken.message)
        logging.shutdown()
        os._exit(EXIT_DEVICE_FAILED)  # a lost device must not be tidied up


if __name__ == "__main__":
    main()

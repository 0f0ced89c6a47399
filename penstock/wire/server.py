"""The engine's side of the wire: an `EngineCore` behind a ZeroMQ socket."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from penstock.engine.loop import EngineCore
from penstock.errors import PenstockError
from penstock.types import Array, Failure, Outcome, SequenceIds
from penstock.wire.messages import (
    BlocksReleased,
    Cancel,
    Compare,
    Hello,
    MemoryMapped,
    Ready,
    Submit,
    decode_to_engine,
    encode,
    last_decoded_rows,
    pack_outcomes,
    split_into_messages,
    unpack_comparison,
    unpack_requests,
)
from penstock.wire.router import OutcomeRouter
from penstock.wire.shared_memory import Region, open_shared_memory


class EngineServer:
    """Owns the core and the socket; one thread, which sleeps until a message or a finished step."""

    IDLE_MS = 1000
    UNSHOWN_MS = 100  # the same, while the metrics do not show how things stand
    LAST_WORDS_S = 0.2  # for others to read why requests failed: with the connection goes what is unread

    def __init__(self, address: str, shared_bytes: int = 0) -> None:
        self.arena = open_shared_memory(shared_bytes)
        self._context = zmq.Context(io_threads=4)  # large answers to several API processes leave side by side
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._address = address
        self._bell_in, self._bell_out = socket.socketpair()
        self._bell_in.setblocking(False)
        self._bell_out.setblocking(False)
        self._router: OutcomeRouter[bytes] = OutcomeRouter()  # owners are the connections of API processes
        self._last_rows: dict[bytes, SequenceIds] = {}  # of the last `DecodedTokens` sent to each
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
            self._send_outcomes(self._receive())
            self._send_outcomes(core.step())
            if not core.busy:
                self._last_rows.clear()  # or connections that are gone would stay
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
                self._router.add(message.id, sender)
                self._core.compare(unpack_comparison(message, bulk))
            elif isinstance(message, Cancel):
                for request_id in message.ids:
                    self._core.cancel(request_id)
                    self._router.remove(request_id)
            elif isinstance(message, Hello):
                self._socket.send_multipart([sender, encode(self._ready)])
            elif self.arena is not None and message.shared == self.arena.shared.name:
                if isinstance(message, MemoryMapped):
                    self.arena.attach(sender, message.reader, message.pid)
                elif isinstance(message, BlocksReleased):
                    self.arena.give_back(sender, message.blocks)
            if self._core.starving:  # looked at behind each message, so that every turn takes one
                return refused

    def _submit(self, sender: bytes, message: Submit, frame: bytes) -> list[Outcome]:
        refused: list[Outcome] = []
        for request in unpack_requests(message.entries, frame):
            self._router.add(request.id, sender)
            try:
                self._core.add(request)
            except PenstockError as error:
                refused.append(Failure(request.id, error))
        return refused

    def _send_outcomes(self, outcomes: list[Outcome]) -> None:
        """Send the outcomes of one turn: a message for each API process, and one for each large answer.

        Sending never waits: ZeroMQ keeps the messages of an API process that reads slowly.
        """
        for owner, theirs in self._router.route(outcomes, self._core.generates).items():
            last_rows = self._last_rows.get(owner, ())
            for group in split_into_messages(theirs):
                frames = pack_outcomes(group, last_rows, partial(self._lend, owner))
                self._socket.send_multipart([owner, *frames], zmq.NOBLOCK, copy=False)
                last_rows = last_decoded_rows(group, last_rows)
            self._last_rows[owner] = last_rows

    def _lend(self, owner: bytes, array: Array) -> Region | None:
        return None if self.arena is None else self.arena.lend(array, owner)

"""The engine's side of the wire: an `EngineCore` behind a ZeroMQ socket."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from penstock.engine.loop import EngineCore
from penstock.errors import PenstockError
from penstock.types import Array, DecodedTokens, Failure, GeneratedTokens, Outcome, SequenceIds
from penstock.wire.messages import (
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
from penstock.wire.router import Division
from penstock.wire.shared_memory import Place, open_arena


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
        self._told: dict[bytes, SequenceIds] = {}  # API process → the rows that it was last told go on
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
            core.pending.allocate = self.arena.empty
            ready = msgspec.structs.replace(ready, shared=self.arena.shared)
        self._core, self._ready = core, ready
        self._socket.bind(self._address)  # only now: a connection means that the engine can serve
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell_out.fileno(), zmq.POLLIN)
        shown = True
        while core.device_failure is None and (not self._stopping or core.busy):
            if self._bell_out.fileno() in dict(poller.poll(self._patience_ms(shown))):
                self._hush()
            self._answer(self._receive())
            self._answer(core.step())
            if not core.busy:
                self._told.clear()  # or the names of processes that have gone would stay
            shown = observe(core)
        if core.device_failure is None:  # else its threads may wait for the device for ever
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
            if self._core.can_fill_step:  # looked at behind each message, so that every turn takes one
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
            if isinstance(outcome, DecodedTokens):
                for whose, (rows, places) in self._division.of(outcome.rows, self._owner).items():
                    by_owner[whose].append(DecodedTokens(rows, outcome.token_ids[places]))
            elif (owner := self._owner.get(outcome.id)) is not None:
                by_owner[owner].append(outcome)
        for outcome in outcomes:
            if isinstance(outcome, DecodedTokens):
                continue
            if not isinstance(outcome, GeneratedTokens) or not self._core.generates(outcome.id):
                self._owner.pop(outcome.id, None)
        for owner, theirs in by_owner.items():
            told = self._told.get(owner, ())
            for some in in_messages(theirs):
                frames = pack_outcomes(some, told, partial(self._lend, owner))
                self._socket.send_multipart([owner, *frames], zmq.NOBLOCK, copy=False)
                told = next((o.rows for o in reversed(some) if isinstance(o, DecodedTokens)), told)
            self._told[owner] = told

    def _lend(self, owner: bytes, array: Array) -> Place | None:
        return None if self.arena is None else self.arena.lend(array, owner)

"""How rank 0 has the other ranks read their parts of an adapter, over a socket beside that of plans.

All ranks read an adapter at the same time, and it is loaded if all of them have read it: a rank that cannot
says why, and the others drop what they have. Where a number needs the inputs of all ranks, such as the length
of a row for DoRA, they meet at rank 0, which adds them up.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint.adapter_files import Marks
from penstock.checkpoint.adapters import LoraSpec
from penstock.errors import DeviceFailed, EngineError, PenstockError, revive
from penstock.runner.parallel.processes import receive_message, send_message


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read your part of an adapter."""

    copy: int  # the number by which it is known from here on; used once
    spec: LoraSpec
    marks: Marks  # of the files that are meant


class Total(msgspec.Struct, frozen=True, tag=True):
    """The sum of what all ranks have sent."""

    values: bytes  # fp32


class CancelRead(msgspec.Struct, frozen=True, tag=True):
    """Drop what was read, or stop reading it."""

    copy: int


class Addend(msgspec.Struct, frozen=True, tag=True):
    """A rank's part of a sum."""

    values: bytes  # fp32


class HasRead(msgspec.Struct, frozen=True, tag=True):
    """A rank has its part of the adapter in host memory, and room for it on its device."""


class CannotRead(msgspec.Struct, frozen=True, tag=True):
    """A rank has nothing of the adapter."""

    kind: str  # of the error
    message: str
    param: str | None = None


AdapterOrder = ReadAdapter | Total | CancelRead
AdapterReply = Addend | HasRead | CannotRead


def to_bytes(values: Tensor) -> bytes:
    return values.to(device="cpu", dtype=torch.float32).numpy().tobytes()


def from_bytes(values: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(values, dtype=np.float32).copy())


class OtherReaders:
    """The other ranks, as the thread of rank 0 that reads adapters sees them."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        """`sockets` are those of the ranks from 1 on."""
        self._sockets = list(sockets)
        self._is_done: list[bool] = []  # which of them have ended the read that runs now

    @contextmanager
    def reading(self, copy: int, spec: LoraSpec, marks: Marks) -> Iterator[None]:
        """Read an adapter on all ranks; what is done inside is rank 0's part. Raises if a rank cannot read
        it; then none has it."""
        self._is_done = [False] * len(self._sockets)
        try:
            self._send(ReadAdapter(copy, spec, marks))
            yield
            for number in range(len(self._sockets)):
                if not isinstance(reply := self._receive(number), HasRead):
                    raise EngineError(f"rank {number + 1} gave {type(reply).__name__} instead of an end")
        except BaseException:
            self._cancel(copy)
            raise

    def sum(self, values: Tensor) -> Tensor:
        """Add up what all ranks have, while they read."""
        total = values.to(device="cpu", dtype=torch.float32).clone()
        for number in range(len(self._sockets)):
            if not isinstance(reply := self._receive(number), Addend):
                raise EngineError(f"rank {number + 1} gave {type(reply).__name__} instead of an addend")
            total += from_bytes(reply.values)
        self._send(Total(to_bytes(total)))
        return total

    def close(self) -> None:
        """Let a read that waits for a rank fail."""
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the rank is gone

    def _send(self, order: AdapterOrder) -> None:
        for number, connection in enumerate(self._sockets):
            try:
                send_message(connection, order)
            except OSError as error:
                self._is_done[number] = True
                raise _gone(number) from error

    def _receive(self, number: int) -> AdapterReply:
        try:
            content = receive_message(self._sockets[number])
        except OSError:
            content = None
        if content is None:
            self._is_done[number] = True
            raise _gone(number)
        reply: AdapterReply = msgspec.json.decode(content, type=Addend | HasRead | CannotRead)
        self._is_done[number] = not isinstance(reply, Addend)
        if isinstance(reply, CannotRead):
            raise revive(reply.kind, f"rank {number + 1}: {reply.message}", reply.param)
        return reply

    def _cancel(self, copy: int) -> None:
        """Let all ranks drop the adapter, and read their replies up to the end of it."""
        for number, connection in enumerate(self._sockets):
            try:
                send_message(connection, CancelRead(copy))
            except OSError:
                self._is_done[number] = True
        for number in range(len(self._sockets)):
            while not self._is_done[number]:
                try:
                    self._receive(number)
                except PenstockError:
                    continue  # the first error is the one that is told


def _gone(number: int) -> DeviceFailed:
    return DeviceFailed(f"rank {number + 1} of this engine is gone")

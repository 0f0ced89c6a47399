"""Orders of rank 0 to read an adapter, and the replies of other ranks, over a separate socket from plans.

All ranks read their parts of an adapter at the same time. It is loaded if all of them succeed. If a rank
fails, it reports why, and the others drop their parts. Some numbers need inputs of all ranks, such as the
norm of a row for DoRA. Rank 0 adds up these inputs.
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

    copy: int  # the number of this part in later orders; never reused
    spec: LoraSpec
    marks: Marks  # expected marks of the files


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
    """A rank could not read its part, and keeps nothing of the adapter."""

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
    """The other ranks' readers of adapters. Used by the thread of rank 0 that reads adapters."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        """`sockets`: one for each rank from 1 on."""
        self._sockets = list(sockets)
        self._is_done: list[bool] = []  # whether each has finished the current read

    @contextmanager
    def reading(self, copy: int, spec: LoraSpec, marks: Marks) -> Iterator[None]:
        """Read an adapter on all ranks. Rank 0 reads its part inside the context. If a rank cannot read its
        part, this raises, and no rank keeps the adapter."""
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
        """Add up the values of all ranks during a read."""
        total = values.to(device="cpu", dtype=torch.float32).clone()
        for number in range(len(self._sockets)):
            if not isinstance(reply := self._receive(number), Addend):
                raise EngineError(f"rank {number + 1} gave {type(reply).__name__} instead of an addend")
            total += from_bytes(reply.values)
        self._send(Total(to_bytes(total)))
        return total

    def close(self) -> None:
        """Shut the sockets down, so that a read that waits for a rank fails."""
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
        """Let all ranks drop the adapter, and read their replies until each has finished."""
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
                    continue  # only the first error is raised


def _gone(number: int) -> DeviceFailed:
    return DeviceFailed(f"rank {number + 1} of this engine is gone")

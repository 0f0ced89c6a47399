"""The control channel between the supervisor and its child processes.

Messages are lines of JSON on a Unix socket in the runtime folder. API processes send operators' orders and
receive the model table. Engines receive orders to sleep, wake and change adapters, and request memory. Client
requests never use this channel.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Literal

import msgspec

from penstock.errors import PenstockError
from penstock.serving.launch import AdapterLaunch, ModelLaunch

log = logging.getLogger("penstock.control")
SEND_TIMEOUT_S = 5.0  # a process that does not read for this long hangs, and is replaced
_PIECE_BYTES = 1 << 16
Action = Literal["load", "unload", "sleep", "wake", "load_adapter", "unload_adapter"]


class ApiAttached(msgspec.Struct, frozen=True, tag=True):
    """The first message of an API process."""

    pid: int


class ApiServes(msgspec.Struct, frozen=True, tag=True):
    """An API process accepts connections."""


class ApiConnected(msgspec.Struct, frozen=True, tag=True):
    """An API process is connected to an engine of a model."""

    model: int
    engine_pid: int
    index: int = 0  # the engine's number within its model


class ApiCannotServe(msgspec.Struct, frozen=True, tag=True):
    """An API process cannot serve a model, for example because it cannot read its tokenizer."""

    model: int
    reason: str


class TableApplied(msgspec.Struct, frozen=True, tag=True):
    """An API process has applied this version of the table, and sends nothing to models outside it."""

    version: int


class AdapterReleased(msgspec.Struct, frozen=True, tag=True):
    """An API process has no more requests that use an adapter that was removed from the table."""

    model: int
    adapter: int  # its id


class Order(msgspec.Struct, frozen=True, tag=True):
    """An operator's order."""

    id: int
    action: Action
    model: str  # a name or alias; for `load`, the model to load
    level: int | None = None  # sleep level
    # `load`: fields of `ModelConfig` and `EngineConfig`. Adapters: name, path, replaces.
    settings: dict[str, Any] = {}


class EngineAttached(msgspec.Struct, frozen=True, tag=True):
    """An engine process can take orders."""

    model: int
    pid: int
    device: str
    index: int = 0  # the engine's number within its model


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """An engine process cannot load its model."""

    model: int
    reason: str
    index: int = 0


class OrderDone(msgspec.Struct, frozen=True, tag=True):
    """An engine has finished an `EngineOrder`. `error` is the reason if it failed."""

    id: int
    error: str | None = None


class AdapterDone(msgspec.Struct, frozen=True, tag=True):
    """An engine has finished an `AdapterOrder`. `error` is the reason if it failed."""

    id: int
    error: str | None = None
    kind: str = ""  # the class of the error
    param: str | None = None  # the field that caused the error


class AdapterLost(msgspec.Struct, frozen=True, tag=True):
    """A starting engine cannot load an adapter of its model. It serves without the adapter."""

    model: int
    adapter: int  # its id
    reason: str


class RoomWanted(msgspec.Struct, frozen=True, tag=True):
    """An engine is about to allocate more memory than its device has free."""

    id: int
    num_bytes: int


class ModelTable(msgspec.Struct, frozen=True, tag=True):
    """The models of the server, in order."""

    version: int
    models: tuple[ModelLaunch, ...]


class OrderAnswer(msgspec.Struct, frozen=True, tag=True):
    """The outcome of an operator's order."""

    id: int
    model: str
    state: str = ""
    seconds: float = 0.0
    error: str | None = None
    is_client_error: bool = False  # the operator can fix it
    kind: str = ""  # the class of the error, if it is more specific than `is_client_error`
    param: str | None = None  # the field of the order that caused the error


class EngineOrder(msgspec.Struct, frozen=True, tag=True):
    id: int
    action: Literal["sleep", "wake"]
    level: int | None = None


class AdapterOrder(msgspec.Struct, frozen=True, tag=True):
    """Load or unload an adapter."""

    id: int
    action: Literal["load", "unload"]
    adapter: AdapterLaunch


class RoomMade(msgspec.Struct, frozen=True, tag=True):
    """The requested memory is free, or no further engine could free some."""

    id: int


class Closed(msgspec.Struct, frozen=True):
    """The process at the other end has closed the connection."""


FromApi = ApiAttached | ApiServes | ApiConnected | ApiCannotServe | TableApplied | AdapterReleased | Order
FromEngine = EngineAttached | EngineFailed | OrderDone | AdapterDone | AdapterLost | RoomWanted
ToApi = ModelTable | OrderAnswer
ToEngine = EngineOrder | AdapterOrder | RoomMade
_to_supervisor: msgspec.json.Decoder[FromApi | FromEngine] = msgspec.json.Decoder(FromApi | FromEngine)
_to_api: msgspec.json.Decoder[ToApi] = msgspec.json.Decoder(ToApi)
_to_engine: msgspec.json.Decoder[ToEngine] = msgspec.json.Decoder(ToEngine)


def encode_line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_for_api(line: bytes) -> ToApi:
    return _to_api.decode(line)


@dataclass(slots=True, eq=False)
class Link:
    """The supervisor's end of a connection."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    is_open: bool = True

    def send(self, message: ToApi | ToEngine) -> None:
        """Send a message. If that fails or times out, drop the connection."""
        if not self.is_open:
            return
        try:
            self.socket.sendall(encode_line(message))
        except OSError:
            self.close()

    def close(self) -> None:
        """Shut the connection down. The reader thread then reports `Closed`."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class ControlServer:
    """The supervisor's side. A thread reads messages, and `take` returns them."""

    def __init__(self, path: Path, wake: Callable[[], None]) -> None:
        """`wake` is called from the reader thread when a message is ready to be taken."""
        self._wake = wake
        self._inbox: queue.SimpleQueue[tuple[Link, FromApi | FromEngine | Closed]] = queue.SimpleQueue()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._selector.register(self._stop_reader, selectors.EVENT_READ)
        self._thread = Thread(target=self._read, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[tuple[Link, FromApi | FromEngine | Closed]]:
        """Return the messages since the last call, in order."""
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._inbox.get_nowait())
        return taken

    def close(self) -> None:
        self._stop_writer.close()
        if self._thread.ident is not None:
            self._thread.join(1.0)
        self._listener.close()

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stop_reader:
                    return
                if key.fileobj is self._listener:
                    accepted, _ = self._listener.accept()
                    accepted.settimeout(SEND_TIMEOUT_S)
                    self._selector.register(accepted, selectors.EVENT_READ, Link(accepted))
                else:
                    self._receive(key.data)

    def _receive(self, link: Link) -> None:
        try:
            piece = link.socket.recv(_PIECE_BYTES)
        except TimeoutError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._selector.unregister(link.socket)
            link.is_open = False
            link.socket.close()
            self._put(link, Closed())
            return
        link.received += piece
        *lines, rest = link.received.split(b"\n")
        link.received = bytearray(rest)
        for line in lines:
            try:
                self._put(link, _to_supervisor.decode(line))
            except msgspec.MsgspecError:
                log.exception("a message on the control channel cannot be read")

    def _put(self, link: Link, message: FromApi | FromEngine | Closed) -> None:
        self._inbox.put((link, message))
        self._wake()


class EngineControl:
    """An engine's side. A thread reads orders; any thread may request memory."""

    def __init__(self, path: str, model: int, index: int = 0) -> None:
        """`index` is the number of this engine within its model."""
        self._model, self._index = model, index
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._lock = Lock()
        self._ids = itertools.count()
        self._asked: dict[int, Event] = {}
        self.on_order: Callable[[EngineOrder], None] = lambda order: None
        self.on_adapter: Callable[[AdapterOrder], None] = lambda order: None
        Thread(target=self._read, name="control", daemon=True).start()

    def attach(self, pid: int, device: str) -> None:
        """Report that this engine accepts orders."""
        self._send(EngineAttached(self._model, pid, device, self._index))

    def failed(self, reason: str) -> None:
        self._send(EngineFailed(self._model, reason, self._index))

    def done(self, order: EngineOrder, error: str | None = None) -> None:
        self._send(OrderDone(order.id, error))

    def adapter_done(self, order: AdapterOrder, error: PenstockError | None = None) -> None:
        if error is None:
            self._send(AdapterDone(order.id))
        else:
            self._send(AdapterDone(order.id, error.message, type(error).__name__, error.param))

    def adapter_lost(self, adapter: int, reason: str) -> None:
        self._send(AdapterLost(self._model, adapter, reason))

    def make_room(self, num_bytes: int, timeout_s: float = 120.0) -> None:
        """Block until sleeping models have freed this many bytes, or no other model can help."""
        number, answered = next(self._ids), Event()
        self._asked[number] = answered
        self._send(RoomWanted(number, num_bytes))
        answered.wait(timeout_s)
        self._asked.pop(number, None)

    def _send(self, message: FromEngine) -> None:
        with self._lock, contextlib.suppress(OSError):  # the supervisor has exited, and this process will too
            self._socket.sendall(encode_line(message))

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                try:
                    self._handle(_to_engine.decode(line))
                except Exception:
                    log.exception("an order of the supervisor cannot be followed")
        for waiting in list(self._asked.values()):
            waiting.set()

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, EngineOrder):
            self.on_order(message)
        elif isinstance(message, AdapterOrder):
            self.on_adapter(message)
        elif (asked := self._asked.get(message.id)) is not None:
            asked.set()

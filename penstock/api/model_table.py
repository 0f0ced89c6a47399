"""The models of an API process, which follow the table that the supervisor publishes.

An unloaded model gets no further requests. Its connection is closed when the last answer has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.api.adapters import ServedAdapter, updated
from penstock.api.admission import Admission
from penstock.api.metrics import RETRIED
from penstock.api.state import ServedModel, ServerState, engine_reason
from penstock.checkpoint.spec import with_max_model_len
from penstock.config import ServerConfig
from penstock.errors import BadValue, EngineUnavailable, OrderFailed, PenstockError, revive
from penstock.serving.control import (
    Action,
    AdapterReleased,
    ApiAttached,
    ApiCannotServe,
    ApiConnected,
    ApiServes,
    FromApi,
    ModelTable,
    Order,
    OrderAnswer,
    TableApplied,
    decode_for_api,
    encode_line,
)
from penstock.serving.launch import EngineAddress, ModelLaunch
from penstock.tasks.model import TextModel
from penstock.wire.client import EngineClient
from penstock.wire.group import EngineGroup
from penstock.wire.liveness import HangLimits
from penstock.wire.status import GroupStatus, StatusPage, StatusReader

log = logging.getLogger("penstock.api")
MAX_LINE_BYTES = 1 << 26  # of a message; a table includes every model's config.json
_UNUSED_POLL_S = 0.05
CLOSED = "the server is closing"


def build_model(launch: ModelLaunch, server: ServerConfig) -> ServedModel:
    """A model, not yet connected to its engines."""
    engine_config, config = launch.config.engine, launch.config
    spec = with_max_model_len(launch.spec, engine_config.max_model_len or launch.spec.max_model_len)
    clients = [_client(address, server) for address in launch.engines]
    engine: EngineClient | EngineGroup = clients[0]
    status: StatusPage | None = clients[0].status
    num_engines: Callable[[], int] = lambda: 1  # noqa: E731
    if len(clients) > 1:
        engine = group = EngineGroup(clients, spec.name)
        group.uses_affinity = server.engine_affinity
        group.on_retry = RETRIED.labels(spec.name).inc
        status = _group_status(group, clients)
        num_engines = lambda: max(1, group.num_ready)  # noqa: E731
    text = TextModel(spec, chat_template=config.chat_template or server.chat_template)
    text.warm_up()
    return ServedModel(
        text=text,
        engine=engine,
        created_s=int(time.time()),
        admission=Admission(status, lambda: engine.engine_settings, num_engines=num_engines),
        auto_truncate=config.auto_truncate,
        default_chunking=config.default_chunking,
        number=launch.number,
        aliases=launch.names[1:],
        status=status,
        state_files=tuple(Path(address.state_file) for address in launch.engines),
        takes_adapters=engine_config.enable_lora,
        adapters=updated({}, launch.adapters, lambda adapter: None),
    )


def _client(address: EngineAddress, server: ServerConfig) -> EngineClient:
    return EngineClient(
        address.socket,
        partial(engine_reason, Path(address.state_file)),
        None if address.status_file is None else StatusReader(Path(address.status_file)),
        HangLimits.for_refusing(server.engine_hang_timeout_s, server.engine_step_timeout_s),
    )


def _group_status(group: EngineGroup, clients: Sequence[EngineClient]) -> GroupStatus | None:
    pages = [client.status for client in clients if client.status is not None]
    return GroupStatus(pages, lambda: group.engines_ready) if len(pages) == len(clients) else None


class ModelTableFollower:
    """Serves the models in the supervisor's table, and passes operators' orders on to the supervisor."""

    def __init__(self, state: ServerState, control: str) -> None:
        self._state = state
        self._control = control
        self._numbers = itertools.count()
        self._orders: dict[int, asyncio.Future[OrderAnswer]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._apply = asyncio.Lock()

    async def start(self) -> None:
        """Connect to the supervisor. Report when the present models connect to their engines."""
        reader, self._writer = await asyncio.open_unix_connection(self._control, limit=MAX_LINE_BYTES)
        self._send(ApiAttached(os.getpid()))
        for model in self._state.models.values():
            self._report_connection(model)
        self._run(self._read(reader))

    def report_serving(self) -> None:
        """Report that this process accepts connections."""
        self._send(ApiServes())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_orders()
        if self._writer is not None:
            self._writer.close()

    async def order(
        self,
        action: Action,
        model: str,
        *,
        level: int | None = None,
        settings: dict[str, Any] | None = None,
    ) -> OrderAnswer:
        """Have the supervisor carry out an order. Raises `OrderFailed` or `BadValue` if it cannot."""
        number = next(self._numbers)
        answered: asyncio.Future[OrderAnswer] = asyncio.get_running_loop().create_future()
        self._orders[number] = answered
        self._send(Order(number, action, model, level, settings or {}))
        try:
            answer = await answered
        finally:
            self._orders.pop(number, None)
        if answer.error is not None:
            if answer.kind:
                raise revive(answer.kind, answer.error, answer.param)
            kind = BadValue if answer.is_client_error else OrderFailed
            raise kind(answer.error, param=answer.param)
        return answer

    def _send(self, message: FromApi) -> None:
        if self._writer is None or self._writer.is_closing():
            raise EngineUnavailable(CLOSED)
        self._writer.write(encode_line(message))

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                try:
                    message = decode_for_api(line)
                except msgspec.MsgspecError:
                    log.exception("a message of the supervisor cannot be read")
                    continue
                if isinstance(message, ModelTable):
                    self._run(self._apply_table(message))
                elif (answered := self._orders.get(message.id)) is not None and not answered.done():
                    answered.set_result(message)
        self._fail_orders()  # the supervisor is gone, and this process exits too

    def _fail_orders(self) -> None:
        for answered in self._orders.values():
            if not answered.done():
                answered.set_exception(EngineUnavailable(CLOSED))

    def _report_connection(self, model: ServedModel) -> None:
        if isinstance(model.engine, EngineClient):
            model.engine.on_ready = lambda pid: self._send(ApiConnected(model.number, pid))
        elif isinstance(model.engine, EngineGroup):
            model.engine.on_ready = lambda index, pid: self._send(ApiConnected(model.number, pid, index))

    async def _apply_table(self, table: ModelTable) -> None:
        """Serve the models of a table. Builds new ones on a thread: reading a tokenizer takes time."""
        async with self._apply:
            present = {model.number: model for model in self._state.models.values()}
            served: list[ServedModel] = []
            for launch in table.models:
                model = present.pop(launch.number, None)
                if model is None:
                    model = await self._begin(launch)
                else:
                    release = partial(self._release, launch.number)
                    model.adapters = updated(model.adapters, launch.adapters, release)
                if model is not None:
                    served.append(model)
            self._state.serve_models(served)
            self._send(TableApplied(table.version))
            for model in present.values():
                self._run(close_when_unused(model))

    def _release(self, model: int, adapter: ServedAdapter) -> None:
        """Tell the supervisor that no request uses an adapter any more."""
        with contextlib.suppress(EngineUnavailable):  # the supervisor is gone, and this process exits too
            self._send(AdapterReleased(model, adapter.id))

    async def _begin(self, launch: ModelLaunch) -> ServedModel | None:
        """Build a model and connect it to its engine. On failure, tell the supervisor and return None."""
        try:
            model = await asyncio.to_thread(build_model, launch, self._state.config)
        except Exception as error:
            reason = error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            log.warning("%s cannot be served: %s", launch.spec.name, reason)
            self._send(ApiCannotServe(launch.number, reason))
            return None
        self._report_connection(model)
        model.engine.start()
        return model


async def close_when_unused(model: ServedModel) -> None:
    """Close a model whose last requests have been answered."""
    while model.engine.stats().num_requests:  # noqa: ASYNC110 (an event would cost every request)
        await asyncio.sleep(_UNUSED_POLL_S)
    close_models([model])


def close_models(models: Sequence[ServedModel]) -> None:
    for model in models:
        model.engine.close()
        model.text.close()

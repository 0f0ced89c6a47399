"""Operators' orders to load, unload, sleep and wake models, from arrival to answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.spec import ModelSpec
from penstock.config import ModelConfig
from penstock.errors import BadValue, ClientError, PenstockError
from penstock.serving.control import Link, Order, OrderAnswer
from penstock.serving.engines import ManagedEngine
from penstock.serving.models import ManagedModel, mark_dead

if TYPE_CHECKING:
    from penstock.serving.supervisor import Supervisor

log = logging.getLogger("penstock")
Described = tuple[ModelConfig, ModelSpec]
Describe = Callable[[str, Mapping[str, Any]], Described]
_FIELDS_OF_LOAD = ("model", "served_model_name", "aliases", "settings")


@dataclass(slots=True, eq=False)
class _Pending:
    """An order that is not answered yet."""

    link: Link
    order: Order
    began_s: float
    description: Future[Described] | None = None  # while the files of a model to load are being read
    model: ManagedModel | None = None

    def answer(self, state: str = "", error: str | None = None) -> None:
        self.link.send(OrderAnswer(self.order.id, self._name, state, self._seconds, error))

    def refuse(self, error: PenstockError) -> None:
        """Answer that the order cannot be carried out, with the field of the request body that caused it."""
        param, is_client_error = error.param, isinstance(error, ClientError)
        if self.order.action == "load" and is_client_error and param not in _FIELDS_OF_LOAD:
            param = "settings" if param is None else f"settings.{param}"
        self.link.send(
            OrderAnswer(
                self.order.id, self._name, "", self._seconds, error.message, is_client_error, param=param
            )
        )

    @property
    def _name(self) -> str:
        return self.order.model if self.model is None else self.model.name

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.began_s


class Orders:
    def __init__(self, supervisor: Supervisor, describe: Describe | None, wake: Callable[[], None]) -> None:
        self._supervisor = supervisor
        self._describe = describe
        self._wake = wake
        self.pending: list[_Pending] = []
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="describe")  # a download takes minutes

    @property
    def leaving(self) -> list[ManagedModel]:
        """Models that are being unloaded. Their engines may still run."""
        return [each.model for each in self.pending if each.model is not None and each.model.is_leaving]

    def take(self, link: Link, order: Order) -> None:
        """Start to carry out an operator's order."""
        pending = _Pending(link, order, time.monotonic())
        if order.action == "load":
            self._begin_load(pending)
            return
        model = self._supervisor.models.find(order.model)
        if model is None:
            pending.refuse(BadValue(f"model {order.model!r} is not served here", param="model"))
            return
        pending.model = model
        if order.action in ("load_adapter", "unload_adapter"):
            self._supervisor.adapters.take(link, order, model)
        elif order.action == "unload":
            self._begin_unload(pending, model)
        else:
            self._begin_sleep(pending, model)

    def advance(self) -> None:
        """Advance all unfinished orders."""
        for pending in list(self.pending):
            if pending.order.action == "load":
                self._advance_load(pending)
            elif pending.model is not None and pending.model.is_leaving:
                self._advance_unload(pending, pending.model)

    def closed(self, link: Link) -> None:
        """Log the orders of an API process that has exited. They are carried out without an answer."""
        for pending in self.pending:
            if pending.link is link:
                log.warning("an API process exited before it was told about %s %s", *_words(pending.order))

    def loads(self, model: ManagedModel) -> bool:
        """Whether an order to load this model has not been answered yet."""
        return any(each.model is model and each.order.action == "load" for each in self.pending)

    def load_failed(self, model: ManagedModel, reason: str) -> bool:
        """Fail the operator's order for a model that cannot be served. Returns whether there was one."""
        pending = next((each for each in self.pending if each.model is model), None)
        if pending is None:
            return False
        log.error("%s cannot be loaded: %s", model.name, reason)
        if not model.is_leaving:
            pending.answer(error=reason)
            self._supervisor.remove_model(model)
        return True

    # Load.

    def _begin_load(self, pending: _Pending) -> None:
        describe = self._describe
        if describe is None:
            pending.answer(error="this server cannot load models")
            return
        order = pending.order
        pending.description = self._reader.submit(describe, order.model, order.settings)
        pending.description.add_done_callback(lambda _: self._wake())
        self.pending.append(pending)

    def _advance_load(self, pending: _Pending) -> None:
        if pending.description is not None:
            if not pending.description.done():
                return
            try:
                config, spec = pending.description.result()
                pending.description = None
                pending.model = self._supervisor.add_model(config, spec)
            except PenstockError as error:
                pending.refuse(error)
                self.pending.remove(pending)
                return
            except Exception as error:
                log.exception("%s cannot be described", pending.order.model)
                pending.answer(error=f"the model cannot be read: {type(error).__name__}: {error}")
                self.pending.remove(pending)
                return
            self._supervisor.publish_models()
        model = pending.model
        if model is not None and model.is_leaving:
            self._advance_unload(pending, model)  # loading failed, and the order has been answered
        elif model is not None and model.is_ready:
            pending.answer("awake")
            self.pending.remove(pending)

    # Unload.

    def _begin_unload(self, pending: _Pending, model: ManagedModel) -> None:
        if len(self._supervisor.models) == 1:
            why = "it is the only model of this server; load another first, or stop the server"
            pending.refuse(BadValue(f"{model.name} cannot be unloaded: {why}", param="model"))
            return
        if any(each.model is model for each in self.pending):
            why = "an order for it is not finished"
            pending.refuse(BadValue(f"{model.name} cannot be unloaded: {why}", param="model"))
            return
        self._supervisor.remove_model(model)
        self.pending.append(pending)

    def _advance_unload(self, pending: _Pending, model: ManagedModel) -> None:
        """Stop the engines once no API process sends them requests. They finish their requests first."""
        version = self._supervisor.models.version
        if any(api.serves and api.table_version < version for api in self._supervisor.apis):
            return
        for engine in model.engines:
            self._stop(engine)
        if any(engine.child.process is not None for engine in model.engines):
            return
        for engine in model.engines:
            self._supervisor.sleepers.engine_exited(engine)  # another engine may be waiting for its memory
        model.remove_files()
        if pending.order.action == "unload":
            pending.answer("unloaded")
        self.pending.remove(pending)

    def _stop(self, engine: ManagedEngine) -> None:
        """Terminate an engine process; forget it once it has exited."""
        process = engine.child.process
        if process is None:
            return
        now_s = time.monotonic()
        if process.poll() is not None:
            mark_dead(process.pid)
            engine.child.process = None
        elif not engine.child.kill_reason:
            engine.child.kill_reason = "it is unloaded"
            engine.started_s = now_s
            process.terminate()
        elif now_s - engine.started_s > self._supervisor.config.drain_s:
            process.kill()

    # Sleep and wake.

    def _begin_sleep(self, pending: _Pending, model: ManagedModel) -> None:
        state = "asleep" if pending.order.action == "sleep" else "awake"

        def done(error: str | None) -> None:
            if pending in self.pending:
                self.pending.remove(pending)
            pending.answer("" if error else state, error)

        self.pending.append(pending)
        self._supervisor.sleepers.order(model, pending.order.action, pending.order.level, done)


def _words(order: Order) -> tuple[str, str]:
    return order.action, order.model

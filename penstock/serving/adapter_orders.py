"""Orders to load and unload LoRA adapters, from their arrival to the answer.

To load an adapter, every engine of its model loads it, and then every API process gets the new table. Only
then is the order answered. If one engine cannot load the adapter, the others unload it. To unload or replace
an adapter, the API processes get the new table first. Engines unload it once no request uses it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.errors import (
    AdapterNotFound,
    BadValue,
    EngineError,
    EngineUnavailable,
    PenstockError,
    revive,
)
from penstock.serving.adapters import check_enabled, check_name, read_adapter
from penstock.serving.control import AdapterDone, AdapterLost, AdapterOrder, Link, Order, OrderAnswer
from penstock.serving.engines import ManagedEngine
from penstock.serving.launch import AdapterLaunch
from penstock.serving.models import ManagedModel

if TYPE_CHECKING:
    from penstock.serving.supervisor import ApiProcess, Supervisor

log = logging.getLogger("penstock")


@dataclass(slots=True, eq=False)
class _Change:
    """An order that is not answered yet."""

    link: Link
    order: Order
    model: ManagedModel
    name: str
    began_s: float
    reading: Future[AdapterLaunch] | None = None  # while the adapter's files are being read
    adapter: AdapterLaunch | None = None  # the adapter to load, once its files are read
    unsent: list[ManagedEngine] = field(default_factory=list)  # engines still to be sent the order
    told: list[ManagedEngine] = field(default_factory=list)
    waiting: set[ManagedEngine] = field(default_factory=set)  # engines that have not answered yet
    version: int | None = None  # version of the table with the change, once it is published

    def answer(self, error: PenstockError | None = None) -> None:
        seconds = time.monotonic() - self.began_s
        if error is None:
            state = "loaded" if self.order.action == "load_adapter" else "unloaded"
            self.link.send(OrderAnswer(self.order.id, self.model.name, state, seconds))
        else:
            kind, param = type(error).__name__, error.param
            answer = OrderAnswer(
                self.order.id, self.model.name, "", seconds, error.message, kind=kind, param=param
            )
            self.link.send(answer)


@dataclass(slots=True, eq=False)
class _Retired:
    """An adapter that was removed from the table."""

    model: ManagedModel
    adapter: AdapterLaunch
    apis: set[ApiProcess]  # API processes whose requests may still use it
    engines: list[ManagedEngine]  # engines that still have it loaded


class AdapterOrders:
    def __init__(self, supervisor: Supervisor, wake: Callable[[], None]) -> None:
        self._supervisor = supervisor
        self._wake = wake
        self._reader = ThreadPoolExecutor(2, thread_name_prefix="adapters")
        self._ids = itertools.count()
        self._sent: dict[int, tuple[ManagedEngine, _Change | None]] = {}
        self._changes: list[_Change] = []
        self._retired: list[_Retired] = []

    @property
    def pending(self) -> bool:
        return bool(self._changes or self._retired)

    def take(self, link: Link, order: Order, model: ManagedModel) -> None:
        """Start to carry out an operator's order."""
        name = str(order.settings.get("name", ""))
        change = _Change(link, order, model, name, time.monotonic())
        try:
            if any(each.model is model and each.name == name for each in self._changes):
                raise BadValue(f"an order for adapter {name!r} is not finished", param="lora_name")
            if order.action == "load_adapter":
                self._begin_load(change)
            else:
                self._begin_unload(change)
        except PenstockError as error:
            change.answer(error)
        else:
            self._changes.append(change)

    def _begin_load(self, change: _Change) -> None:
        model, name, settings = change.model, change.name, change.order.settings
        engine = model.config.engine
        check_enabled(engine, model.name)
        check_name(
            name, model.spec, {each for other in self._supervisor.models for each in other.launch.names}
        )
        if model.adapter(name) is not None and not settings.get("replaces"):
            raise BadValue(
                f"The lora adapter '{name}' has already been loaded. Set load_inplace to replace it.",
                param="lora_name",
            )
        root, path = self._supervisor.config.lora_root, str(settings.get("path", ""))
        number = model.next_adapter_id()
        change.reading = self._reader.submit(
            read_adapter, number, name, path, model.spec, root, engine.download_dir
        )
        change.reading.add_done_callback(lambda _: self._wake())

    def _begin_unload(self, change: _Change) -> None:
        model, name = change.model, change.name
        adapter = model.adapter(name)
        if adapter is None:
            loaded = ", ".join(each.name for each in model.launch.adapters) or "none"
            raise AdapterNotFound(
                f"The lora adapter '{name}' cannot be found. Model {model.name} has: {loaded}",
                param="lora_name",
            )
        change.version = self._publish(model, without=adapter)

    def advance(self) -> None:
        """Advance all unfinished orders."""
        for change in list(self._changes):
            try:
                self._advance(change)
            except PenstockError as error:
                self._fail(change, error)
        for retired in list(self._retired):
            self._advance_retired(retired)

    def _advance(self, change: _Change) -> None:
        model = change.model
        if model.is_leaving:
            raise EngineUnavailable(f"model {model.name} was unloaded meanwhile")
        if change.reading is not None:
            if not change.reading.done():
                return
            change.adapter, change.reading = _result(change.reading), None
            change.unsent = list(model.engines)
        if change.version is None:
            self._tell_engines(change)
            if change.unsent or change.waiting:
                return
            change.version = self._publish(model, change.adapter, without=model.adapter(change.name))
        apis, version = self._supervisor.apis, change.version
        if all(not api.serves or api.table_version >= version for api in apis):
            self._changes.remove(change)
            change.answer()

    def _tell_engines(self, change: _Change) -> None:
        """Order engines to load the adapter. A starting engine gets the order once it serves."""
        for engine in list(change.unsent):
            if engine.serves and engine.link is not None and change.adapter is not None:
                change.unsent.remove(engine)
                change.told.append(engine)
                change.waiting.add(engine)
                self._send(engine, "load", change.adapter, change)

    def _send(
        self,
        engine: ManagedEngine,
        action: Literal["load", "unload"],
        adapter: AdapterLaunch,
        change: _Change | None = None,
    ) -> None:
        if engine.link is not None:
            number = next(self._ids)
            self._sent[number] = engine, change
            engine.link.send(AdapterOrder(number, action, adapter))

    def _publish(
        self, model: ManagedModel, added: AdapterLaunch | None = None, *, without: AdapterLaunch | None = None
    ) -> int:
        """Publish the new table to API processes and future engine processes. Returns its version."""
        kept = [each for each in model.launch.adapters if each is not without]
        model.set_adapters((*kept, *(() if added is None else (added,))))
        version = self._supervisor.models.changed()
        self._supervisor.publish_models()
        if without is not None:
            attached = {api for api in self._supervisor.apis if api.link is not None}
            self._retired.append(_Retired(model, without, attached, list(model.engines)))
        return version

    def _fail(self, change: _Change, error: PenstockError) -> None:
        """Answer an order with an error, and have engines that already loaded the adapter unload it."""
        self._changes.remove(change)
        if change.adapter is not None and change.version is None:
            for engine in change.told:
                self._send(engine, "unload", change.adapter)
        log.error("adapter %s of %s: %s", change.name, change.model.name, error.message)
        change.answer(error)

    def _advance_retired(self, retired: _Retired) -> None:
        """Have the engines unload an adapter once no API process uses it for a request."""
        if retired.model.is_leaving:
            self._retired.remove(retired)
        elif not retired.apis:
            for engine in list(retired.engines):
                if engine.serves and engine.link is not None:
                    retired.engines.remove(engine)
                    self._send(engine, "unload", retired.adapter)
            if not retired.engines:
                self._retired.remove(retired)

    # Reports.

    def done(self, link: Link, message: AdapterDone) -> None:
        """Record that an engine has carried out an order."""
        engine, change = self._sent.get(message.id, (None, None))
        if engine is None or engine.link is not link:
            return
        del self._sent[message.id]
        if change is None or change not in self._changes:
            return
        change.waiting.discard(engine)
        if message.error is not None:
            self._fail(change, revive(message.kind, message.error, message.param))

    def released(self, api: ApiProcess, model: int, adapter: int) -> None:
        """Record that an API process has no more requests that use an adapter."""
        for retired in self._retired:
            if retired.model.number == model and retired.adapter.id == adapter:
                retired.apis.discard(api)

    def api_closed(self, api: ApiProcess) -> None:
        for retired in self._retired:
            retired.apis.discard(api)

    def engine_exited(self, model: ManagedModel, engine: ManagedEngine) -> None:
        """Forget an engine process that has exited. The next one starts with the adapters of the table."""
        self._sent = {number: sent for number, sent in self._sent.items() if sent[0] is not engine}
        for retired in self._retired:
            if engine in retired.engines:
                retired.engines.remove(engine)
        for change in list(self._changes):
            if change.model is model and change.version is None and change.reading is None:
                change.told = [each for each in change.told if each is not engine]
                self._fail(change, EngineUnavailable("an engine stopped while it loaded the adapter"))

    def lost(self, model: ManagedModel, message: AdapterLost) -> str | None:
        """Handle an adapter that a starting engine could not load. Returns the reason if the model has never
        been ready. Otherwise removes the adapter from the table and returns None."""
        adapter = next((each for each in model.launch.adapters if each.id == message.adapter), None)
        if adapter is None:
            return None
        if not model.has_been_ready:
            return f"adapter {adapter.name!r}: {message.reason}"
        log.error("adapter %s of %s is unloaded: %s", adapter.name, model.name, message.reason)
        self._publish(model, without=adapter)
        return None


def _result(reading: Future[AdapterLaunch]) -> AdapterLaunch:
    try:
        return reading.result()
    except PenstockError:
        raise
    except Exception as error:
        log.exception("an adapter cannot be read")
        raise EngineError(f"the adapter cannot be read: {type(error).__name__}: {error}") from None

"""LoRA adapters of an engine process: loaded before it serves, and later on the supervisor's orders."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from penstock.checkpoint.adapter_files import adapter_digest, file_marks
from penstock.engine.loop import EngineCore
from penstock.errors import EngineError, ModelLoadError, PenstockError
from penstock.runner.base import AdapterInfo
from penstock.serving.control import AdapterOrder, EngineControl
from penstock.serving.launch import AdapterLaunch
from penstock.wire.server import EngineServer

log = logging.getLogger("penstock.engine")


class EngineAdapters:
    """Carries out adapter orders. Files are read on other threads, never on the engine loop's thread."""

    def __init__(self, server: EngineServer, control: EngineControl | None) -> None:
        self._server = server
        self._control = control
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def load_all(self, core: EngineCore, adapters: Sequence[AdapterLaunch]) -> None:
        """Load the model's current adapters before the engine serves. Adapters that cannot be loaded are
        reported to the supervisor; the model is served with the others."""
        for adapter in adapters:
            try:
                marks = self._check(adapter)
                core.load_adapter(adapter.id, adapter.folder, adapter.name).result()
                self._check_unchanged(adapter, marks)
            except Exception as error:
                core.unload_adapter(adapter.id)
                reason = _in_words(error)
                log.error("adapter %s cannot be loaded: %s", adapter.name, reason.message)
                if self._control is None:
                    raise reason from None
                self._control.adapter_lost(adapter.id, reason.message)

    def follow(self, order: AdapterOrder) -> None:
        """Start to carry out an order. Called on the thread of the control channel."""
        if order.action == "unload":
            self._server.call(partial(self._unload, order))
        else:
            self._reader.submit(self._begin, order)

    def _unload(self, order: AdapterOrder, core: EngineCore) -> None:
        core.unload_adapter(order.adapter.id)
        self._done(order)

    def _begin(self, order: AdapterOrder) -> None:
        try:
            marks = self._check(order.adapter)
        except Exception as error:
            self._done(order, _in_words(error))
            return
        # A model must be awake to load an adapter, because the files are read for its layers.
        self._server.wake_up(partial(self._awake, order, marks))

    def _awake(self, order: AdapterOrder, marks: object, why_not: str | None) -> None:
        if why_not is None:
            self._server.call(partial(self._load, order, marks))
        else:
            self._done(order, EngineError(f"the model sleeps and cannot be woken: {why_not}"))

    def _load(self, order: AdapterOrder, marks: object, core: EngineCore) -> None:
        adapter = order.adapter
        loading = core.load_adapter(adapter.id, adapter.folder, adapter.name)
        loading.add_done_callback(partial(self._loaded, order, marks))

    def _loaded(self, order: AdapterOrder, marks: object, loading: Future[AdapterInfo]) -> None:
        try:
            loading.result()
            self._check_unchanged(order.adapter, marks)
        except Exception as error:  # the supervisor then unloads it from all engines
            self._done(order, _in_words(error))
        else:
            self._done(order)

    def _done(self, order: AdapterOrder, error: PenstockError | None = None) -> None:
        if self._control is not None:
            self._control.adapter_done(order, error)

    @staticmethod
    def _check(adapter: AdapterLaunch) -> object:
        marks = file_marks(adapter.folder)
        if adapter_digest(adapter.folder) != adapter.digest:
            raise _changed(adapter)
        return marks

    @staticmethod
    def _check_unchanged(adapter: AdapterLaunch, marks: object) -> None:
        if file_marks(adapter.folder) != marks:
            raise _changed(adapter)


def _changed(adapter: AdapterLaunch) -> ModelLoadError:
    return ModelLoadError(
        f"the files of adapter {adapter.name!r} are not those that were loaded before; load it again"
    )


def _in_words(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    log.error("an adapter could not be loaded", exc_info=error)
    return EngineError(f"{type(error).__name__}: {error}")

"""The main process of `penstock serve`: starts, watches, restarts and drains engine and API processes.

It holds no model and answers no requests. Every model has its own engine processes, so a crash does not
affect other models. The supervisor writes each engine's state to a small file, which API processes read to
explain a 503.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.checkpoint.spec import ModelSpec
from penstock.config import ModelConfig, ServerConfig
from penstock.errors import ModelLoadError, StartFailed
from penstock.serving import systemd
from penstock.serving.adapter_orders import AdapterOrders
from penstock.serving.child import Child, engine_child, engine_standby
from penstock.serving.control import (
    AdapterDone,
    AdapterLost,
    AdapterReleased,
    ApiAttached,
    ApiCannotServe,
    ApiConnected,
    ApiServes,
    Closed,
    ControlServer,
    EngineAttached,
    EngineFailed,
    FromApi,
    FromEngine,
    Link,
    Order,
    OrderDone,
    RoomWanted,
    TableApplied,
)
from penstock.serving.engines import ManagedEngine
from penstock.serving.launch import EXIT_BAD_MODEL, EXIT_DEVICE_FAILED, ApiLaunch, Parent
from penstock.serving.listeners import Listeners
from penstock.serving.models import ManagedModel, ModelSet, mark_dead
from penstock.serving.orders import Orders
from penstock.serving.placement import Hardware, place
from penstock.serving.runtime_folder import RuntimeFolder
from penstock.serving.signals import waited_for
from penstock.serving.sleepers import Sleepers
from penstock.wire.liveness import MAX_COUNTED_GAP_S, process_is_stopped

log = logging.getLogger("penstock")
_END_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_SIGNALS = _END_SIGNALS | {signal.SIGCHLD, signal.SIGUSR2}
MAX_FAILED_STARTS = 3
MAX_API_RESTART_DELAY_S = 1.0  # starting an API process costs little
DRAIN_GRACE_S = 5.0  # time for API processes to answer unfinished requests
ENGINE_EXIT_S = 5.0
REASON_S = 0.5  # longest wait for the last message of an engine
IDLE_POLL_S, BUSY_POLL_S = 0.5, 0.05
KV_SHARE = 0.8  # share of the memory free at an engine's start, for the KV caches of all models


ApiReport = ApiServes | ApiConnected | ApiCannotServe | TableApplied | AdapterReleased


class ApiProcess:
    """An API process, and what it has reported."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.link: Link | None = None
        self.attached_pid = 0  # pid of the last process that attached
        self.serving_pid = 0  # pid of the last process that reported that it serves
        self.connected: dict[tuple[int, int], int] = {}  # (model number, engine index) → engine's process id
        self.table_version = -1

    @property
    def serves(self) -> bool:
        process = self.child.process
        return process is not None and process.pid == self.serving_pid

    def attach(self, link: Link, pid: int) -> None:
        self.link, self.attached_pid, self.connected, self.table_version = link, pid, {}, -1

    def is_connected_to(self, model: ManagedModel, engine: ManagedEngine) -> bool:
        return self.serves and self.connected.get((model.number, engine.index), 0) == engine.pid != 0


class Supervisor:
    def __init__(
        self,
        models: Sequence[tuple[ModelConfig, ModelSpec]],
        server: ServerConfig,
        spawned: Child | None = None,
        *,
        describe: Callable[[str, Mapping[str, Any]], tuple[ModelConfig, ModelSpec]] | None = None,
    ) -> None:
        """`spawned` is the first engine process, if it already runs and waits for its configuration.
        `describe` reads the files of a model that an operator loads, given its name and settings."""
        self.config = server
        devices = [config.engine.device for config, _ in models]
        has_standby = any(uses_standby(server.standby_engine, device) for device in devices)
        self._standby = engine_standby() if has_standby else None
        self._hardware = Hardware()
        self._started_s = self._checked_s = time.monotonic()
        self._has_been_ready = False
        self._listeners = Listeners(server)
        self.port = self._listeners.port
        with contextlib.ExitStack() as undo:
            undo.callback(self._listeners.close)
            self._runtime = RuntimeFolder()
            undo.callback(self._runtime.remove)
            folder = self._runtime.path
            self._parent, self._control_file = Parent(os.getpid(), str(folder)), folder / "control"
            self._metrics_folder = folder / "metrics"
            self._metrics_folder.mkdir()
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self._metrics_folder)
            self.models = ModelSet()
            for config, spec in models:
                self.add_model(config, spec, spawned)
                spawned = None
            self._control = ControlServer(self._control_file, self._wake)
            undo.callback(self._control.close)
            self._apis = [self._api_process() for _ in range(server.api_server_count)]
            self.sleepers = Sleepers(self.models, server)
            self.orders = Orders(self, describe, self._wake)
            self.adapters = AdapterOrders(self, self._wake)
            undo.pop_all()

    def _wake(self) -> None:
        """Have the main thread handle its messages. Can be called from any thread."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCHLD)

    def _api_process(self) -> ApiProcess:
        return ApiProcess(
            Child(
                "penstock.api.process",
                pass_fds=self._listeners.fds,
                max_restart_delay_s=MAX_API_RESTART_DELAY_S,
            )
        )

    @property
    def apis(self) -> Sequence[ApiProcess]:
        return self._apis

    # The set of models.

    def add_model(self, config: ModelConfig, spec: ModelSpec, spawned: Child | None = None) -> ManagedModel:
        """Add a model. Its engines start at the next check. `spawned` is the process of its first engine."""
        self.models.check_names(config, spec)
        placements = place(config, self._hardware, self._used_gpus())
        config = msgspec.structs.replace(config, data_parallel_size=len(placements), engines_per_gpu=1)
        if len(placements) > 1 and not on_gpu(config) and config.engine.device != "null":
            _log_cores(spec.name, [placement.cpus for placement in placements])
        engines = []
        for placement in placements:
            device = placement.devices[0] if placement.devices else config.engine.device
            child = engine_child(device) if spawned is None else spawned
            spawned, child.standby = None, self._standby
            engines.append((child, placement))
        number = self.models.next_number()
        model = ManagedModel(number, config, spec, self.config, self._runtime.path, engines)
        self.models.add(model)
        return model

    def _used_gpus(self) -> Counter[str]:
        """Count the engines on each GPU."""
        used: Counter[str] = Counter()
        for model, engine in self.models.engines():
            if on_gpu(model.config):
                used.update(_gpus(engine))
        return used

    def remove_model(self, model: ManagedModel) -> None:
        """Stop serving a model. Its engines stop once no API process sends them requests."""
        self.models.remove(model)
        model.is_leaving = True
        self.publish_models()

    def publish_models(self) -> None:
        """Send the model table to every API process."""
        table = self.models.table()
        for index, api in enumerate(self._apis):
            api.child.config = self._api_config(index)  # configuration of the next process
            if api.link is not None:
                api.link.send(table)

    def _api_config(self, index: int) -> bytes:
        listeners = self._listeners
        launch = ApiLaunch(
            server=self.config,
            models=self.models.table().models,
            listen_fd=listeners.public.fileno(),
            admin_fd=None if listeners.admin is None else listeners.admin.fileno(),
            parent=self._parent,
            control=str(self._control_file),
            index=index,
        )
        return msgspec.json.encode(launch)

    def _launch_engines(self) -> None:
        """Start engines by sending them their configuration. Engines on the same GPU start one after another,
        because each takes a share of the memory that it finds free."""
        for model, engine in self.models.engines():
            sharing = self._sharing_gpu(model, engine)
            starts = any(each.is_launched and not each.child.has_ever_served for _, each in sharing)
            if engine.is_launched or starts:
                continue
            engine.configure(
                model.config,
                model.spec,
                self.config,
                metrics_folder=self._metrics_folder,
                parent=self._parent,
                control=self._control_file,
                model=model.number,
                kv_share=self._kv_share([model, *(each for each, _ in sharing)]),
            )
            engine.set_adapters(model.launch.adapters)
            engine.child.start()
            engine.is_launched = True

    def _sharing_gpu(
        self, model: ManagedModel, engine: ManagedEngine
    ) -> list[tuple[ManagedModel, ManagedEngine]]:
        """Find the other engines that use one of this engine's GPUs."""
        if not on_gpu(model.config):
            return []
        gpus = _gpus(engine)
        return [
            (other, each)
            for other, each in self.models.engines()
            if each is not engine and on_gpu(other.config) and not gpus.isdisjoint(_gpus(each))
        ]

    @staticmethod
    def _kv_share(sharing: Sequence[ManagedModel]) -> float | None:
        """The share of free memory for each KV cache; None if a model has its device to itself."""
        if len(sharing) == 1:
            return None
        return KV_SHARE / max(1, sum(each.spec.generates for each in sharing))

    # The main loop.

    def run(self) -> int:
        """Serve until a signal. Returns 0 after the drain; raises if the server cannot start."""
        with waited_for(_SIGNALS):
            return self._run()

    def _run(self) -> int:
        self._control.start()
        try:
            self._launch_engines()
            self.publish_models()
            for api in self._apis:
                api.child.start()
            while True:
                info = signal.sigtimedwait(_SIGNALS, self._poll_s())
                if info is not None and info.si_signo == signal.SIGUSR2:
                    self._request_profile()
                elif info is not None and info.si_signo != signal.SIGCHLD:
                    return self._drain(signal.Signals(info.si_signo).name)
                self._handle_messages()
                self._check_processes()
                self._check_hangs()
                self.orders.advance()
                self.adapters.advance()
                self.sleepers.apply(time.monotonic())
                systemd.notify_alive()
        finally:
            for api in self._apis:
                api.child.stop(1.0)
            self._stop_engines(1.0)
            self._control.close()
            self._listeners.close()
            self._runtime.remove()

    def _poll_s(self) -> float:
        is_quiet = all(each.is_ready for each in self.models) and not (
            self.orders.pending or self.adapters.pending
        )
        return IDLE_POLL_S if is_quiet else BUSY_POLL_S

    def _stop_engines(self, timeout_s: float) -> None:
        if self._standby is not None:
            self._standby.stop()
        engines = [each.child for model in (*self.models, *self.orders.leaving) for each in model.engines]
        for child in engines:
            if child.process is not None:
                child.process.terminate()  # signal all engines first; `stop` then waits for each
        for child in engines:
            child.stop(timeout_s)

    def _handle_messages(self) -> None:
        for link, message in self._control.take():
            self._handle(link, message)

    def _handle(self, link: Link, message: FromApi | FromEngine | Closed) -> None:
        if isinstance(message, ApiAttached):
            for api in self._apis:
                if api.child.process is not None and api.child.process.pid == message.pid:
                    api.attach(link, message.pid)
                    link.send(self.models.table())
        elif isinstance(message, ApiServes | ApiConnected | ApiCannotServe | TableApplied | AdapterReleased):
            for api in self._apis:
                if api.link is link:
                    self._handle_report(api, message)
        elif isinstance(message, Order):
            self.orders.take(link, message)
        elif isinstance(message, EngineAttached | EngineFailed):
            if (model := self.models.get(message.model)) is not None:
                self._handle_engine(model.engines[message.index], link, message)
        elif isinstance(message, AdapterDone):
            self.adapters.done(link, message)
        elif isinstance(message, AdapterLost):
            self._handle_lost_adapter(message)
        elif isinstance(message, OrderDone):
            self.sleepers.order_done(link, message)
        elif isinstance(message, RoomWanted):
            self.sleepers.room_wanted(link, message)
        else:
            self._handle_closed(link)

    def _handle_lost_adapter(self, message: AdapterLost) -> None:
        if (model := self.models.get(message.model)) is not None:
            reason = self.adapters.lost(model, message)
            if reason is not None:
                self._on_unloadable(model, reason)

    def _handle_report(self, api: ApiProcess, message: ApiReport) -> None:
        if isinstance(message, ApiServes):
            api.serving_pid = api.attached_pid
        elif isinstance(message, ApiConnected):
            api.connected[message.model, message.index] = message.engine_pid
        elif isinstance(message, TableApplied):
            api.table_version = message.version
        elif isinstance(message, AdapterReleased):
            self.adapters.released(api, message.model, message.adapter)
        elif (model := self.models.get(message.model)) is None:
            return
        elif _has_ever_served(model) and not self.orders.loads(model):  # the other models are still served
            log.error("an API process cannot serve %s: %s", model.name, message.reason)
        else:
            self._on_unloadable(model, message.reason)

    def _handle_engine(
        self, engine: ManagedEngine, link: Link, message: EngineAttached | EngineFailed
    ) -> None:
        engine.link = link
        if isinstance(message, EngineAttached):
            engine.device = message.device
        else:
            engine.failure = message.reason

    def _handle_closed(self, link: Link) -> None:
        for api in self._apis:
            if api.link is link:
                api.link = None
                self.adapters.api_closed(api)
        if (found := self.models.engine_of(link)) is not None:
            found[1].link = None
        self.sleepers.closed(link)
        self.orders.closed(link)

    def _check_processes(self) -> None:
        """Handle exits, start processes whose restart is due, and handle engines that have become ready."""
        for api in self._apis:
            self._check_child(api.child, api.serves, partial(self._on_api_exit, api))
        for model, engine in self.models.engines():
            self._check_child(engine.child, engine.serves, partial(self._on_engine_exit, model, engine))
        self._launch_engines()
        for model, engine in self.models.engines():
            is_new = not engine.is_ready and engine.serves
            if is_new and all(api.is_connected_to(model, engine) for api in self._apis):
                self._on_engine_ready(model, engine)

    def _check_child(self, child: Child, serves: bool, on_exit: Callable[[int], None]) -> None:
        pid = child.process.pid if child.process else 0
        if serves and not child.has_served:
            child.mark_served()
        if (code := child.poll_exit()) is not None:
            mark_dead(pid)
            on_exit(code)
        elif child.restart_at_s is not None and time.monotonic() >= child.restart_at_s:
            child.start()

    def _on_engine_ready(self, model: ManagedModel, engine: ManagedEngine) -> None:
        engine.is_ready = model.has_been_ready = True
        engine.write_state("running", "the engine is running")
        if self._has_been_ready:
            if engine.child.num_restarts:
                self._log_ready([model.describe_engine(engine)], engine.started_s)
            elif model.is_ready:
                self._log_ready([model.name], model.started_s)
            if self._standby is not None:
                self._standby.prepare()
        elif all(each.is_ready for each in self.models):
            self._on_ready()

    def _on_ready(self) -> None:
        """Announce that all models that the server was started with are ready."""
        from penstock.serving.process_metrics import show_restarts

        self._has_been_ready = True
        names = [each.name for each in self.models]
        self._log_ready(names, self._started_s)
        if (admin_address := self._listeners.admin_address) is not None:
            log.info("operation routes are at %s", admin_address)
        systemd.notify(systemd.READY, f"STATUS=serving {', '.join(names)}")
        show_restarts([(model.name, engine.index) for model, engine in self.models.engines()])
        if self._standby is not None:
            self._standby.prepare()

    def _log_ready(self, names: Sequence[str], since_s: float) -> None:
        log.info(
            "%s %s ready at %s after %.1f s",
            ", ".join(names),
            "is" if len(names) == 1 else "are",
            self._listeners.address,
            time.monotonic() - since_s,
        )

    def _on_api_exit(self, api: ApiProcess, code: int) -> None:
        exited = _exit_in_words(api.child, code)
        _check_start(api.child, "API", code, exited)
        _count_restart("api", api.child, code)
        log.error("an API process %s; restarting it", exited)

    def _on_engine_exit(self, model: ManagedModel, engine: ManagedEngine, code: int) -> None:
        exited = _exit_in_words(engine.child, code)
        if code == EXIT_BAD_MODEL:
            self._await_reason(engine)
        self.sleepers.engine_exited(engine)
        self.adapters.engine_exited(model, engine)
        try:
            _check_start(engine.child, "engine", code, exited)
        except (ModelLoadError, StartFailed) as error:
            self._on_unloadable(model, engine.failure or error.message, error)
            return
        _count_restart("engine", engine.child, code, model.name, str(engine.index))
        engine.is_ready, engine.started_s = False, time.monotonic()
        which = "" if len(self.models) == len(model.engines) == 1 else f" of {model.describe_engine(engine)}"
        detail = f"the engine process{which} {exited}; restart {engine.child.num_restarts} is in progress"
        log.error("%s", detail)
        engine.write_state("restarting", detail)

    def _await_reason(self, engine: ManagedEngine) -> None:
        """Wait for the reason that an engine sent before it exited. The message may still be unread."""
        until_s = time.monotonic() + REASON_S
        while not engine.failure and time.monotonic() < until_s:
            self._handle_messages()
            time.sleep(0.01)

    def _on_unloadable(self, model: ManagedModel, reason: str, error: Exception | None = None) -> None:
        """Fail the operator's order for a model that cannot be served. Without an order, end the server."""
        if not self.orders.load_failed(model, reason):
            raise error or ModelLoadError(reason)

    def _check_hangs(self) -> None:
        """Kill processes that hang. They are restarted like processes that have died."""
        now_s, timeout_s = time.monotonic(), self.config.engine_hang_timeout_s
        gap_s, self._checked_s = min(now_s - self._checked_s, MAX_COUNTED_GAP_S), now_s
        engines = [engine for _, engine in self.models.engines()]
        for child in (*(each.child for each in engines), *(each.child for each in self._apis)):
            is_stopped = child.process is not None and process_is_stopped(child.process.pid)
            child.stopped_s = child.stopped_s + gap_s if is_stopped else 0.0
            if timeout_s and child.stopped_s >= timeout_s:
                self._kill_hung(child, f"a signal has stopped it for {child.stopped_s:.0f} s")
        for engine in engines:
            status = engine.status.read()
            hang = engine.watch.check(status, now_s)
            if hang and status.pid == engine.pid != 0:
                self._kill_hung(engine.child, hang)

    def _kill_hung(self, child: Child, reason: str) -> None:
        if not child.kill_reason and child.process is not None:
            log.error("process %d hangs and is killed: %s", child.process.pid, reason)
            child.kill(reason)

    def _request_profile(self) -> None:
        """Have running engines that were started with --profile write another trace."""
        profiled = [each for each in self.models if each.config.engine.profile is not None]
        if not profiled:
            log.warning("SIGUSR2 is ignored: start the server with --profile DIR to write traces")
        for engine in (each for model in profiled for each in model.engines):
            if engine.is_ready and engine.child.process is not None:
                engine.child.process.send_signal(signal.SIGUSR2)

    def _drain(self, signal_name: str) -> int:
        """Accept no new connections, finish running requests, stop. A second signal ends the server at once.

        The engines run until all API processes have exited. Processes that exit are not restarted.
        """
        log.info("%s: draining for up to %g s", signal_name, self.config.drain_s)
        systemd.notify(systemd.STOPPING)
        self._listeners.close()
        draining = [api.child.process for api in self._apis if api.child.process is not None]
        for process in draining:
            process.terminate()
        deadline_s = time.monotonic() + self.config.drain_s + DRAIN_GRACE_S
        while draining := [process for process in draining if process.poll() is None]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            info = signal.sigtimedwait(_END_SIGNALS | {signal.SIGCHLD}, min(left_s, 0.5))
            if info is not None and info.si_signo in _END_SIGNALS:
                return self._end_at_once(signal.Signals(info.si_signo))
            self._handle_messages()  # an engine may need memory to wake
            self.sleepers.apply(time.monotonic())
            systemd.notify_alive()
        for process in draining:
            log.warning(
                "API process %d is killed: its requests had not finished %g s after %s (--drain)",
                process.pid,
                self.config.drain_s,
                signal_name,
            )
            process.kill()
            process.wait()
        self._stop_engines(ENGINE_EXIT_S)
        log.info("drained")
        return 0

    def _end_at_once(self, second: signal.Signals) -> int:
        log.warning("%s during the drain: ending at once", second.name)
        for api in self._apis:
            api.child.stop(0.0)
        self._stop_engines(0.0)
        return 128 + second


def on_gpu(config: ModelConfig) -> bool:
    device = config.engine.device
    return device.startswith("cuda") or (device == "auto" and has_gpu())


def has_gpu() -> bool:
    return Hardware().has_gpu


def _gpus(engine: ManagedEngine) -> frozenset[str]:
    """The GPUs of an engine. A device name without a number means the first GPU."""
    return frozenset("cuda:0" if each in ("auto", "cuda") else each for each in engine.devices)


def _has_ever_served(model: ManagedModel) -> bool:
    return any(each.child.has_ever_served for each in model.engines)


def _log_cores(model: str, cores: Sequence[tuple[int, ...]]) -> None:
    num_cores = len({core for each in cores for core in each})
    if len(cores) > num_cores:
        log.warning(
            "%s has %d engines on %d cores: several engines share a core and none is faster for it; use a "
            "smaller --data-parallel-size",
            *(model, len(cores), num_cores),
        )
    for index, each in enumerate(cores):
        log.info("engine %d of %s uses the cores %s", index, model, ",".join(map(str, each)))


def uses_standby(asked: bool | None, device: str) -> bool:
    """Whether a standby process should be kept to replace an engine."""
    if device == "null":  # its imports are fast
        return False
    return device.startswith("cuda") or (device == "auto" and has_gpu()) if asked is None else asked


def _check_start(child: Child, kind: str, code: int, exited: str) -> None:
    """Raise if a process could not start and another attempt would not help."""
    if child.has_ever_served:
        return
    if code == EXIT_BAD_MODEL:
        raise ModelLoadError("the model could not be loaded; see the error above")
    if child.num_failed_starts >= MAX_FAILED_STARTS:
        raise StartFailed(
            f"the {kind} process {exited} before it could serve, {MAX_FAILED_STARTS} times in a row; "
            "see the errors above" + (_OUT_OF_MEMORY if code == -signal.SIGKILL else "")
        )


def _count_restart(kind: str, child: Child, code: int, model: str = "", engine: str = "") -> None:
    from penstock.serving.process_metrics import RESTARTS

    reason = "hung" if child.kill_reason else "killed" if code < 0 else "exited"
    RESTARTS.labels(kind, reason, model, engine).inc()


_OUT_OF_MEMORY = ". The system kills processes like this when memory runs out"


def _exit_in_words(child: Child, code: int) -> str:
    if child.kill_reason:
        return f"was killed because it hung ({child.kill_reason})"
    if code == EXIT_DEVICE_FAILED:
        return "exited because its device failed"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

"""The main process of `penstock serve`: starts, watches, restarts and drains engine and API processes.

It holds no model and answers no request. It writes the engine's state to a small file, which API processes
read when they have to explain a 503.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import signal
import socket
import time
from pathlib import Path

import msgspec

from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, ServerConfig
from penstock.errors import ConfigError, ModelLoadError, StartFailed
from penstock.serving.child import STANDBY, Child, engine_child
from penstock.serving.launch import (
    EXIT_BAD_MODEL,
    EXIT_DEVICE_FAILED,
    ApiLaunch,
    EngineLaunch,
    EngineState,
    Parent,
)
from penstock.serving.runtime_folder import RuntimeFolder
from penstock.wire.liveness import MAX_COUNTED_GAP_S, HangLimits, LivenessWatch, process_is_stopped
from penstock.wire.status import StatusReader, create_status_page

log = logging.getLogger("penstock")
_END_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_SIGNALS = _END_SIGNALS | {signal.SIGCHLD, signal.SIGUSR2}
MAX_FAILED_STARTS = 3
MAX_API_RESTART_DELAY_S = 1.0  # a start costs little
DRAIN_GRACE_S = 5.0  # for an API process to answer what it could not finish
ENGINE_EXIT_S = 5.0


class Supervisor:
    def __init__(
        self, engine: EngineConfig, server: ServerConfig, spec: ModelSpec, spawned: Child | None = None
    ) -> None:
        """`spawned` is the engine process, if it has been spawned and waits for its configuration."""
        self.config = server
        self.spec = spec
        self._engine = engine_child(engine.device) if spawned is None else spawned
        if uses_standby(server.standby_engine, engine.device):
            self._engine.standby_arguments = (STANDBY,)
        self._profiling = engine.profile is not None
        self._watch = LivenessWatch(
            HangLimits.for_replacing(server.engine_hang_timeout_s, server.engine_step_timeout_s)
        )
        self._started_s = self._checked_s = time.monotonic()
        self._is_ready = False  # the engine serves, and this was logged
        self._listener = listen(server.host, server.port)
        self.port: int = self._listener.getsockname()[1]
        with contextlib.ExitStack() as undo:
            undo.callback(self._listener.close)
            self._runtime = RuntimeFolder()
            undo.callback(self._runtime.remove)
            self._state_file = self._runtime.path / "engine.json"
            self._prepare_launches(engine, self._runtime.path)
            undo.pop_all()

    def _prepare_launches(self, engine: EngineConfig, folder: Path) -> None:
        server, parent = self.config, Parent(os.getpid(), str(folder))
        address, status_file, metrics = f"ipc://{folder}/engine", folder / "engine.status", folder / "metrics"
        create_status_page(status_file)
        self._status = StatusReader(status_file)
        metrics.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        self._engine.config = msgspec.json.encode(
            EngineLaunch(
                engine=engine,
                spec=self.spec,
                address=address,
                log_level=server.log_level,
                log_format=server.log_format,
                shared_memory_mb=server.shared_memory_mb,
                metrics_folder=str(metrics),
                status_file=str(status_file),
                parent=parent,
            )
        )
        listen_fd = self._listener.fileno()
        self._started_files = [folder / f"api-{index}.started" for index in range(server.api_server_count)]
        launches = [
            ApiLaunch(
                server=server,
                engine=engine,
                spec=self.spec,
                address=address,
                listen_fd=listen_fd,
                state_file=str(self._state_file),
                status_file=str(status_file),
                parent=parent,
                started_file=str(started_file),
            )
            for started_file in self._started_files
        ]
        self._apis = [
            Child(
                "penstock.api.process",
                msgspec.json.encode(launch),
                pass_fds=(listen_fd,),
                max_restart_delay_s=MAX_API_RESTART_DELAY_S,
            )
            for launch in launches
        ]

    @property
    def _children(self) -> tuple[Child, ...]:
        return (self._engine, *self._apis)

    def run(self) -> int:
        """Serve until a signal. Returns 0 after the drain; raises if the server cannot start."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._write_state("starting", "the engine is loading the model")
        try:
            for child in self._children:
                child.start()
            while True:
                info = signal.sigtimedwait(_SIGNALS, 0.5 if self._is_ready else 0.05)
                if info is not None and info.si_signo == signal.SIGUSR2:
                    self._request_profile()
                elif info is not None and info.si_signo != signal.SIGCHLD:
                    return self._drain(signal.Signals(info.si_signo).name)
                self._check_children()
                self._check_hangs()
        finally:
            for child in (*self._apis, self._engine):
                child.stop(1.0)
            self._listener.close()
            self._runtime.remove()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _check_children(self) -> None:
        """Handle exits, start due restarts, and log once that the server is ready."""
        for child in self._children:
            pid = child.process.pid if child.process else 0
            if pid and not child.has_served and self._can_serve(child, pid):
                child.mark_served()
            if (code := child.poll_exit()) is not None:
                self._on_child_exit(child, code, pid)
            elif child.restart_at_s is not None and time.monotonic() >= child.restart_at_s:
                child.start()
        if not self._is_ready and self._answers_ready():
            self._on_ready()

    def _can_serve(self, child: Child, pid: int) -> bool:
        """Whether the process has said that it serves. What it said stays when it exits."""
        if child is self._engine:
            return self._status.read().pid == pid
        return self._reported(child)[0] == str(pid)

    def _reported(self, api: Child) -> tuple[str, str]:
        """What an API process has said last: its process id, and that of the engine it is connected to."""
        with contextlib.suppress(OSError):
            own, engine = self._started_files[self._apis.index(api)].read_text().split()
            return own, engine
        return "", ""

    def _is_connected(self, api: Child) -> bool:
        own, engine = (str(child.process.pid) if child.process else "" for child in (api, self._engine))
        return self._reported(api) == (own, engine)

    def _on_ready(self) -> None:
        from penstock.serving.process_metrics import show_restarts

        self._is_ready = True
        self._write_state("running", "the engine is running")
        log.info(
            "%s is ready at http://%s:%d after %.1f s",
            self.spec.name,
            self.config.host,
            self.port,
            time.monotonic() - self._started_s,
        )
        show_restarts()
        self._engine.prepare_standby()

    def _on_child_exit(self, child: Child, code: int, pid: int) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        from penstock.serving.process_metrics import RESTARTS

        mark_process_dead(pid)
        is_engine = child is self._engine
        exited = _exit_in_words(child, code)
        if code == EXIT_BAD_MODEL and not child.has_ever_served:
            raise ModelLoadError("the model could not be loaded; see the error above")
        if child.num_failed_starts >= MAX_FAILED_STARTS and not child.has_ever_served:
            process = "engine" if is_engine else "API"
            raise StartFailed(
                f"the {process} process {exited} before it could serve, {MAX_FAILED_STARTS} times in a row; "
                "see the errors above" + (_OUT_OF_MEMORY if code == -signal.SIGKILL else "")
            )
        reason = "hung" if child.kill_reason else "killed" if code < 0 else "exited"
        RESTARTS.labels("engine" if is_engine else "api", reason).inc()
        if not is_engine:
            log.error("an API process %s; restarting it", exited)
            return
        self._is_ready = False
        detail = f"the engine process {exited}; restart {child.num_restarts} is in progress"
        log.error("%s", detail)
        self._write_state("restarting", detail)

    def _check_hangs(self) -> None:
        """Kill processes that hang; they are restarted like those that have died."""
        now_s, timeout_s = time.monotonic(), self.config.engine_hang_timeout_s
        gap_s, self._checked_s = min(now_s - self._checked_s, MAX_COUNTED_GAP_S), now_s
        for child in self._children:
            is_stopped = child.process is not None and process_is_stopped(child.process.pid)
            child.stopped_s = child.stopped_s + gap_s if is_stopped else 0.0
            if timeout_s and child.stopped_s >= timeout_s:
                self._kill_hung(child, f"a signal has stopped it for {child.stopped_s:.0f} s")
        status, engine = self._status.read(), self._engine.process
        hang = self._watch.check(status, now_s)
        if hang and engine is not None and status.pid == engine.pid:
            self._kill_hung(self._engine, hang)

    def _kill_hung(self, child: Child, reason: str) -> None:
        if not child.kill_reason and child.process is not None:
            log.error("process %d hangs and is killed: %s", child.process.pid, reason)
            child.kill(reason)

    def _request_profile(self) -> None:
        """Have a running engine write another trace, if the server was started with --profile."""
        if not self._profiling:
            log.warning("SIGUSR2 is ignored: start the server with --profile DIR to write traces")
        elif self._is_ready and self._engine.process is not None:
            self._engine.process.send_signal(signal.SIGUSR2)

    def _drain(self, signal_name: str) -> int:
        """Accept no new connection, finish running requests, stop. A second signal ends the server at once.

        The engine runs until all API processes have exited. Processes that exit are not restarted.
        """
        log.info("%s: draining for up to %g s", signal_name, self.config.drain_s)
        self._listener.close()
        draining = [api.process for api in self._apis if api.process is not None]
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
        for process in draining:
            log.warning(
                "API process %d is killed: its requests had not finished %g s after %s (--drain)",
                process.pid,
                self.config.drain_s,
                signal_name,
            )
            process.kill()
            process.wait()
        self._engine.stop(ENGINE_EXIT_S)
        log.info("drained")
        return 0

    def _end_at_once(self, second: signal.Signals) -> int:
        log.warning("%s during the drain: ending at once", second.name)
        for child in self._children:
            child.stop(0.0)
        return 128 + second

    def _answers_ready(self) -> bool:
        """Whether every API process is connected to the engine, and `GET /ready` succeeds."""
        if not all(map(self._is_connected, self._apis)):
            return False
        host = "127.0.0.1" if self.config.host in ("0.0.0.0", "::", "") else self.config.host
        connection = http.client.HTTPConnection(host, self.port, timeout=1.0)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # also half an answer of a process that was killed
            return False
        finally:
            connection.close()

    def _write_state(self, state: str, detail: str) -> None:
        draft = self._state_file.with_suffix(".part")
        draft.write_bytes(msgspec.json.encode(EngineState(state, detail, self._engine.num_restarts)))
        draft.replace(self._state_file)


def uses_standby(asked: bool | None, device: str) -> bool:
    """Whether a process stands by to replace the engine."""
    if device == "null":  # nothing is slow to import
        return False
    has_gpu = device.startswith("cuda") or (device == "auto" and Path("/dev/nvidiactl").exists())
    return has_gpu if asked is None else asked


_OUT_OF_MEMORY = ". The system kills processes like this when memory runs out"


def _exit_in_words(child: Child, code: int) -> str:
    if child.kill_reason:
        return f"was killed because it hung ({child.kill_reason})"
    if code == EXIT_DEVICE_FAILED:
        return "exited because its device failed"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that API processes inherit; bound before anything slow happens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", param="port") from None
    listener.listen(4096)
    listener.set_inheritable(True)
    return listener

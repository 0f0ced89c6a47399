"""The main process of `penstock serve`: starts, watches, restarts and drains engine and API processes.

It holds no model and answers no request. It writes the engine's state to a small file, which API processes
read when they have to explain a 503.
"""

from __future__ import annotations

import http.client
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec

from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, ServerConfig
from penstock.errors import ConfigError, ModelLoadError
from penstock.serving.child import Child, engine_child
from penstock.serving.launch import EXIT_BAD_MODEL, EXIT_DEVICE_FAILED, ApiLaunch, EngineLaunch, EngineState
from penstock.wire.status import create_status_page

log = logging.getLogger("penstock")
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2}


class Supervisor:
    def __init__(
        self, engine: EngineConfig, server: ServerConfig, spec: ModelSpec, spawned: Child | None = None
    ) -> None:
        """`spawned` is the engine process, if it has been spawned and waits for its configuration."""
        self.config = server
        self.spec = spec
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._state_file = self._folder / "engine.json"
        self._status_file = self._folder / "engine.status"
        create_status_page(self._status_file)
        self._listener = listen(server.host, server.port)
        self.port: int = self._listener.getsockname()[1]
        metrics = self._folder / "metrics"
        metrics.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        address = f"ipc://{self._folder}/engine"
        launch = EngineLaunch(
            engine,
            spec,
            address,
            server.log_level,
            server.shared_memory_mb,
            str(metrics),
            str(self._status_file),
        )
        self._engine = engine_child(engine.device) if spawned is None else spawned
        self._engine.config = msgspec.json.encode(launch)
        listen_fd = self._listener.fileno()
        api_launches = [
            ApiLaunch(
                server,
                engine,
                spec,
                address,
                listen_fd,
                str(self._state_file),
                str(self._status_file),
            )
            for _ in range(server.api_server_count)
        ]
        self._apis = [
            Child("penstock.api.process", msgspec.json.encode(api_launch), pass_fds=(listen_fd,))
            for api_launch in api_launches
        ]
        self._profiling = engine.profile is not None
        self._started_s = time.monotonic()
        self._is_ready = False  # the engine serves, and this was logged

    def run(self) -> int:
        """Serve until a signal. Returns 0 after the drain; raises if the model cannot be loaded."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._write_state("starting", "the engine is loading the model")
        try:
            for child in (self._engine, *self._apis):
                child.start()
            while True:
                info = signal.sigtimedwait(_SIGNALS, 0.5 if self._is_ready else 0.05)
                if info is not None and info.si_signo == signal.SIGUSR2:
                    self._request_profile()
                elif info is not None and info.si_signo != signal.SIGCHLD:
                    return self._drain(signal.Signals(info.si_signo).name)
                self._check_children()
        finally:
            for child in (*self._apis, self._engine):
                child.stop(1.0)
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _check_children(self) -> None:
        """Handle exits, start due restarts, and log once that the server is ready."""
        for child in (self._engine, *self._apis):
            pid = child.process.pid if child.process else 0
            if (code := child.poll_exit()) is not None:
                self._on_child_exit(child, code, pid)
            elif child.restart_at_s is not None and time.monotonic() >= child.restart_at_s:
                child.start()
        if not self._is_ready and self._answers_ready():
            self._is_ready = True
            self._write_state("running", "the engine is running")
            log.info(
                "%s is ready at http://%s:%d after %.1f s",
                self.spec.name,
                self.config.host,
                self.port,
                time.monotonic() - self._started_s,
            )

    def _on_child_exit(self, child: Child, code: int, pid: int) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(pid)
        exited = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if code == EXIT_BAD_MODEL and not self._is_ready:
            raise ModelLoadError("the model could not be loaded; see the error above")
        if child is not self._engine:
            log.error("an API process %s; restarting it", exited)
            return
        self._is_ready = False
        if code == EXIT_DEVICE_FAILED:
            exited = "exited because its device failed"
        detail = f"the engine process {exited}; restart {child.num_restarts} is in progress"
        log.error("%s", detail)
        self._write_state("restarting", detail)

    def _request_profile(self) -> None:
        """Have a running engine write another trace, if the server was started with --profile."""
        if not self._profiling:
            log.warning("SIGUSR2 is ignored: start the server with --profile DIR to write traces")
        elif self._is_ready and self._engine.process is not None:
            self._engine.process.send_signal(signal.SIGUSR2)

    def _drain(self, signal_name: str) -> int:
        """Accept no new connection, finish running requests, stop."""
        log.info("%s: draining for up to %g s", signal_name, self.config.drain_s)
        self._listener.close()
        for api in self._apis:
            if api.process is not None:
                api.process.terminate()
        deadline = time.monotonic() + self.config.drain_s + 2.0
        for api in self._apis:
            if api.process is not None:
                try:
                    api.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    log.warning("an API process did not drain in time")
        self._engine.stop(5.0)
        log.info("drained")
        return 0

    def _answers_ready(self) -> bool:
        """Whether `GET /ready` succeeds."""
        host = "127.0.0.1" if self.config.host in ("0.0.0.0", "::", "") else self.config.host
        connection = http.client.HTTPConnection(host, self.port, timeout=1.0)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _write_state(self, state: str, detail: str) -> None:
        draft = self._state_file.with_suffix(".part")
        draft.write_bytes(msgspec.json.encode(EngineState(state, detail, self._engine.num_restarts)))
        draft.replace(self._state_file)


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

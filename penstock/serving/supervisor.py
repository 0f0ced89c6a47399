"""`penstock serve`'s own process: starts engine and API processes, watches them, restarts, drains.

It holds no model and answers no request. What it knows about the engine's state stands in a small
file that API processes read when they have to explain a 503.
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

log = logging.getLogger("penstock")
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2}


class Supervisor:
    def __init__(
        self, engine: EngineConfig, server: ServerConfig, spec: ModelSpec, begun: Child | None = None
    ) -> None:
        """`begun`: the engine's process, where it has been started and waits for its order."""
        self.config = server
        self.spec = spec
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._state_file = self._folder / "engine.json"
        self._listener = listen(server.host, server.port)
        self.port: int = self._listener.getsockname()[1]
        metrics = self._folder / "metrics"
        metrics.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        address = f"ipc://{self._folder}/engine"
        launch = EngineLaunch(engine, spec, address, server.log_level, server.shared_memory_mb, str(metrics))
        self._engine = engine_child(engine.device) if begun is None else begun
        self._engine.order = msgspec.json.encode(launch)
        self._apis = [
            Child("penstock.api.process", msgspec.json.encode(order), pass_fds=(order.listen_fd,))
            for order in (
                ApiLaunch(
                    server, engine, spec, address, self._listener.fileno(), str(self._state_file), index
                )
                for index in range(server.api_server_count)
            )
        ]
        self._profiles = engine.profile is not None
        self._began_s = time.monotonic()
        self._announced = False

    def run(self) -> int:
        """Serve until a signal ends it; 0 after a drain. Raises if the model cannot be loaded."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._write_state("starting", "the engine is loading the model")
        try:
            for child in (self._engine, *self._apis):
                child.start()
            while True:
                info = signal.sigtimedwait(_SIGNALS, 0.05 if not self._announced else 0.5)
                if info is not None and info.si_signo == signal.SIGUSR2:
                    self._profile()
                elif info is not None and info.si_signo != signal.SIGCHLD:
                    return self._drain(signal.Signals(info.si_signo).name)
                self._tend()
        finally:
            for child in (*self._apis, self._engine):
                child.end(1.0)
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _tend(self) -> None:
        """Notice deaths, start again what is due, say once that the server is ready."""
        for child in (self._engine, *self._apis):
            pid = child.process.pid if child.process else 0
            if (code := child.died()) is not None:
                self._mourn(child, code, pid)
            elif child.restart_at_s is not None and time.monotonic() >= child.restart_at_s:
                child.start()
        if not self._announced and self._is_ready():
            self._announced = True
            self._write_state("running", "the engine is running")
            log.info(
                "%s is ready at http://%s:%d after %.1f s",
                self.spec.name,
                self.config.host,
                self.port,
                time.monotonic() - self._began_s,
            )

    def _mourn(self, child: Child, code: int, pid: int) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(pid)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if code == EXIT_BAD_MODEL and not self._announced:
            raise ModelLoadError("the model could not be loaded; the reason stands above")
        if child is not self._engine:
            log.error("an API process %s; starting it again", how)
            return
        self._announced = False
        if code == EXIT_DEVICE_FAILED:
            how = "ended because its device failed"
        detail = f"the engine process {how}; restart {child.restarts} is under way"
        log.error("%s", detail)
        self._write_state("restarting", detail)

    def _profile(self) -> None:
        """Another trace, where the server was started with --profile and the engine runs."""
        if not self._profiles:
            log.warning("SIGUSR2: there is nothing to write without --profile DIR")
        elif self._announced and self._engine.process is not None:
            self._engine.process.send_signal(signal.SIGUSR2)

    def _drain(self, why: str) -> int:
        """Take no new connection, finish what was begun, leave."""
        log.info("%s: draining for up to %g s", why, self.config.drain_s)
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
        self._engine.end(5.0)
        log.info("drained")
        return 0

    def _is_ready(self) -> bool:
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
        draft.write_bytes(msgspec.json.encode(EngineState(state, detail, self._engine.restarts)))
        draft.replace(self._state_file)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that API processes inherit, bound before anything slow happens."""
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

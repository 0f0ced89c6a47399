"""How the supervisor ends its processes."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.checkpoint.spec import describe
from penstock.config import EngineConfig, ServerConfig
from penstock.errors import ConfigError
from penstock.serving import supervisor as module
from penstock.serving.supervisor import Supervisor
from tests.waiting import PATIENCE_S

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); input()"


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setenv(
        "PROMETHEUS_MULTIPROC_DIR", ""
    )  # the supervisor sets it, and the test's end restores it
    engine = EngineConfig(device="null")
    made = Supervisor(engine, ServerConfig(port=0, drain_s=0.0), describe(engine))
    yield made
    made._listener.close()
    made._runtime.remove()


def test_an_api_process_that_does_not_drain_in_time_is_killed_with_a_reason(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "DRAIN_GRACE_S", 0.1)
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    supervisor._apis[0].process = process
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, module._SIGNALS)
    try:
        with caplog.at_level(logging.INFO, logger="penstock"):
            assert supervisor._drain("SIGTERM") == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    process.communicate()
    assert (
        f"API process {process.pid} is killed: its requests had not finished 0 s after SIGTERM" in caplog.text
    )


def test_a_server_that_cannot_listen_leaves_no_folder(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineConfig(device="null")
    created: list[object] = []
    monkeypatch.setattr(module, "RuntimeFolder", lambda: created.append(1))
    with pytest.raises(ConfigError, match="cannot listen"):
        Supervisor(engine, ServerConfig(port=supervisor.port), describe(engine))
    assert created == []

"""How the supervisor judges and ends its processes."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig, ServerConfig
from penstock.errors import ConfigError, StartFailed
from penstock.serving import supervisor as module
from penstock.serving.child import Child
from penstock.serving.supervisor import Supervisor
from penstock.wire.status import EngineStatus, StatusWriter
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


def fail_to_start(supervisor: Supervisor, child: Child, code: int, times: int) -> None:
    for _ in range(times):
        child.has_served, child.num_failed_starts = False, child.num_failed_starts + 1
        supervisor._on_child_exit(child, code, 0)


@pytest.mark.parametrize(("code", "words"), [(1, "exited with code 1"), (-9, "was killed by SIGKILL")])
@pytest.mark.parametrize("kind", ["engine", "API"])
def test_the_third_failed_start_gives_up_with_the_reason(
    supervisor: Supervisor, kind: str, code: int, words: str
) -> None:
    child = supervisor._engine if kind == "engine" else supervisor._apis[0]
    fail_to_start(supervisor, child, code, 2)
    with pytest.raises(
        StartFailed, match=f"the {kind} process {words} before it could serve, 3 times"
    ) as failed:
        fail_to_start(supervisor, child, code, 1)
    assert ("memory" in failed.value.message) == (code == -9)


def test_a_process_that_has_ever_served_is_restarted_for_as_long_as_it_takes(supervisor: Supervisor) -> None:
    for child in (supervisor._engine, supervisor._apis[0]):
        child.mark_served()
        fail_to_start(supervisor, child, 1, 10)


def test_a_process_has_served_once_it_says_so_itself(supervisor: Supervisor) -> None:
    api, engine = supervisor._apis[0], supervisor._engine
    assert not supervisor._can_serve(api, 7) and not supervisor._can_serve(engine, 7)
    supervisor._started_files[0].write_text("7 0")
    StatusWriter(supervisor._runtime.path / "engine.status").publish(EngineStatus(pid=7))
    for child in (api, engine):
        assert supervisor._can_serve(child, 7) and not supervisor._can_serve(child, 8)


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


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        (None, "cpu", False),
        (None, "cuda:1", True),
        (True, "cpu", True),
        (False, "cuda", False),
        (True, "null", False),
    ],
)
def test_a_process_stands_by_beside_a_gpu_or_where_it_is_asked_for(
    asked: bool | None, device: str, expected: bool
) -> None:
    assert module.uses_standby(asked, device) is expected


def test_an_api_process_is_connected_once_it_names_the_engine_that_runs(supervisor: Supervisor) -> None:
    api, engine = supervisor._apis[0], supervisor._engine
    api.process, engine.process = Mock(pid=7), Mock(pid=8)
    for reported, expected in (("7 0", False), ("7 9", False), ("6 8", False), ("7 8", True)):
        supervisor._started_files[0].write_text(reported)
        assert supervisor._is_connected(api) is expected
    api.process = engine.process = None

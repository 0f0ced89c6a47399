"""How the supervisor monitors its processes and ends them."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from penstock.checkpoint.describe import describe
from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, ModelConfig, ServerConfig
from penstock.errors import ConfigError, StartFailed
from penstock.serving import supervisor as module
from penstock.serving.control import ApiAttached, ApiConnected, ApiServes
from penstock.serving.engines import ManagedEngine
from penstock.serving.models import ManagedModel
from penstock.serving.supervisor import Supervisor
from penstock.wire.status import EngineStatus, StatusWriter
from tests.waiting import PATIENCE_S

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); input()"


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setenv(
        "PROMETHEUS_MULTIPROC_DIR", ""
    )  # set, so that the end of the test undoes the supervisor's change
    made = Supervisor([null_model("a"), null_model("b")], ServerConfig(port=0, drain_s=0.0))
    yield made
    made._listeners.close()
    made._control.close()
    made._runtime.remove()


def null_model(name: str) -> tuple[ModelConfig, ModelSpec]:
    engine = EngineConfig(device="null", served_model_name=name)
    return ModelConfig(engine=engine), describe(engine)


def engine_of(supervisor: Supervisor, name: str = "a") -> ManagedModel:
    model = supervisor.models.find(name)
    assert model is not None
    return model


def first_engine(supervisor: Supervisor, name: str = "a") -> ManagedEngine:
    return engine_of(supervisor, name).engines[0]


def fail_to_start(supervisor: Supervisor, kind: str, code: int, times: int) -> None:
    api, model = supervisor.apis[0], engine_of(supervisor)
    (engine,) = model.engines
    child = engine.child if kind == "engine" else api.child
    for _ in range(times):
        child.has_served, child.num_failed_starts = False, child.num_failed_starts + 1
        if kind == "engine":
            supervisor._on_engine_exit(model, engine, code)
        else:
            supervisor._on_api_exit(api, code)


@pytest.mark.parametrize(("code", "words"), [(1, "exited with code 1"), (-9, "was killed by SIGKILL")])
@pytest.mark.parametrize("kind", ["engine", "API"])
def test_the_third_failed_start_gives_up_with_the_reason(
    supervisor: Supervisor, kind: str, code: int, words: str
) -> None:
    fail_to_start(supervisor, kind, code, 2)
    with pytest.raises(
        StartFailed, match=f"the {kind} process {words} before it could serve, 3 times"
    ) as failed:
        fail_to_start(supervisor, kind, code, 1)
    assert ("memory" in failed.value.message) == (code == -9)


def test_a_process_that_has_ever_served_is_restarted_for_as_long_as_it_takes(supervisor: Supervisor) -> None:
    for kind, child in (("engine", first_engine(supervisor).child), ("API", supervisor.apis[0].child)):
        child.mark_served()
        fail_to_start(supervisor, kind, 1, 10)


def test_a_process_has_served_once_it_says_so_itself(supervisor: Supervisor) -> None:
    api, engine = supervisor.apis[0], first_engine(supervisor)
    api.child.process, engine.child.process = Mock(pid=7), Mock(pid=7)
    assert not api.serves and not engine.serves
    link = Mock()
    supervisor._handle(link, ApiAttached(7))
    assert not api.serves
    supervisor._handle(link, ApiServes())
    StatusWriter(Path(engine.address.status_file or "")).publish(EngineStatus(pid=7))
    assert api.serves and engine.serves
    assert not first_engine(supervisor, "b").serves
    api.child.process, engine.child.process = Mock(pid=8), Mock(pid=8)
    assert not api.serves and not engine.serves
    api.child.process = engine.child.process = None


def test_two_models_need_different_names(supervisor: Supervisor) -> None:
    with pytest.raises(ConfigError, match="two models have the name 'b'"):
        supervisor.add_model(*null_model("b"))
    config, spec = null_model("c")
    with pytest.raises(ConfigError, match="two models have the name 'a'"):
        supervisor.add_model(msgspec.structs.replace(config, aliases=("a",)), spec)
    assert [each.name for each in supervisor.models] == ["a", "b"]


def test_an_api_process_that_does_not_drain_in_time_is_killed_with_a_reason(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "DRAIN_GRACE_S", 0.1)
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    supervisor.apis[0].child.process = process
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
    created: list[object] = []
    monkeypatch.setattr(module, "RuntimeFolder", lambda: created.append(1))
    with pytest.raises(ConfigError, match="cannot listen"):
        Supervisor([null_model("a")], ServerConfig(port=supervisor.port))
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
    api, model, link = supervisor.apis[0], engine_of(supervisor), Mock()
    (engine,) = model.engines
    api.child.process, engine.child.process = Mock(pid=7), Mock(pid=8)
    assert not api.is_connected_to(model, engine)
    supervisor._handle(link, ApiAttached(7))
    supervisor._handle(link, ApiServes())
    for number, engine_pid, expected in (
        (model.number, 9, False),
        (model.number + 1, 8, False),
        (model.number, 8, True),
    ):
        supervisor._handle(link, ApiConnected(number, engine_pid))
        assert api.is_connected_to(model, engine) is expected
    engine.child.process = Mock(pid=10)
    assert not api.is_connected_to(model, engine), "its engine was replaced"
    api.child.process = engine.child.process = None

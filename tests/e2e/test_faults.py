"""Processes that hang, are killed or fail to start; what they import; and how a server stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock.wire.status import StatusReader
from tests.e2e.gates import Gates
from tests.e2e.server import API, ENGINE, Server, serving
from tests.waiting import PATIENCE_S, wait_until

ROUTE = "/v1/embeddings"
RUNNING_ROWS, QUEUED_ROWS, ENGINE_UP = "penstock_running_rows", "penstock_queue_rows", "penstock_engine_up"
NULL = ("--device", "null")


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def assert_unavailable(response: httpx.Response, words: str) -> None:
    assert response.status_code == 503
    assert response.json()["error"]["reason"] == "engine_unavailable"
    assert words in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) > 0


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# Standby.


def test_a_process_that_stands_by_replaces_a_killed_engine() -> None:
    with serving("--device", "cpu", "--standby-engine") as server:
        server.wait_for(lambda: len(server.children(ENGINE)) == 2)
        (engine,) = server.engines()
        (standby,) = {*server.children(ENGINE)} - {engine}
        os.kill(engine, signal.SIGKILL)
        server.wait_for(lambda: server.engines() == [standby])
        server.wait_ready()
        assert server.post(ROUTE, input="a").status_code == 200
        server.wait_for(lambda: len(server.children(ENGINE)) == 2)  # a new standby engine


# Hangs.


def test_a_stopped_engine_answers_503_and_serves_again_when_it_continues(
    gates: Gates, background: ThreadPoolExecutor
) -> None:
    flags = (*NULL, "--max-num-seqs", "1", "--engine-hang-timeout", "0")  # 0: never replaced
    with serving(*flags, environment=gates.environment) as server:
        with gates.no_step_finishes():
            waiting = background.submit(server.post, ROUTE, input=["a", "b"])
            server.wait_for_metric(RUNNING_ROWS, 1)
            with server.stopped(ENGINE) as engine:
                assert_unavailable(waiting.result(PATIENCE_S), "no sign of life")
                for path in ("/ready", "/health"):
                    assert_unavailable(server.http.get(path), "no sign of life")
                assert_unavailable(server.post(ROUTE, input="c"), "no sign of life")
                assert server.http.get("/live").status_code == 200
                assert server.metric(ENGINE_UP) == 0
                assert server.metric(QUEUED_ROWS) == 1
            server.wait_ready()
            server.wait_for_metric(QUEUED_ROWS, 0)  # the engine drops abandoned requests
        assert server.post(ROUTE, input="d").status_code == 200
        assert server.metric(ENGINE_UP) == 1
        server.wait_for_metric(RUNNING_ROWS, 0)
        assert server.children(ENGINE) == [engine]


def test_a_process_that_stays_stopped_is_replaced(gates: Gates, background: ThreadPoolExecutor) -> None:
    with serving(*NULL, "--engine-hang-timeout", "2", environment=gates.environment) as server:
        with gates.no_step_finishes():
            waiting = background.submit(server.post, ROUTE, input="a")
            server.wait_for_metric(RUNNING_ROWS, 1)
            with server.stopped(ENGINE) as engine:
                assert waiting.result(PATIENCE_S).status_code == 503
                server.wait_for(lambda: server.children(ENGINE) not in ([], [engine]))
        server.wait_ready()
        assert server.post(ROUTE, input="b").status_code == 200
        lines = server.http.get("/metrics").text.splitlines()
        counted = [
            line
            for line in lines
            if line.startswith("penstock_restarts_total")
            and all(label in line for label in ('process="engine"', 'reason="hung"', 'engine="0"'))
        ]
        assert len(counted) == 1 and not counted[0].endswith(" 0.0")
        with server.stopped(API) as api:
            server.wait_for(lambda: server.children(API) not in ([], [api]))
        server.wait_ready()
        assert server.post(ROUTE, input="c").status_code == 200


def test_the_loop_beats_during_a_step_and_tells_of_a_launch(
    gated_server: Server, shared_gates: Gates, background: ThreadPoolExecutor
) -> None:
    server = gated_server
    page = StatusReader(server.runtime_folder / "0" / "engine.status")
    with shared_gates.no_step_finishes():
        first = background.submit(server.post, ROUTE, input="a")
        server.wait_for(lambda: page.read().step_began_s > 0)
        step = page.read()
        server.wait_for(lambda: page.read().heartbeat_s > step.heartbeat_s + 1)
        assert page.read().step_began_s == step.step_began_s
        assert page.read().launch_began_s == 0 and not first.done()
        assert server.metric("penstock_oldest_step_seconds") > 0
    assert first.result(PATIENCE_S).status_code == 200
    server.wait_for(lambda: page.read().step_began_s == 0)
    with shared_gates.no_launch_returns():
        second = background.submit(server.post, ROUTE, input="b")
        server.wait_for(lambda: page.read().launch_began_s > 0)
    assert second.result(PATIENCE_S).status_code == 200
    server.wait_for(lambda: page.read().launch_began_s == 0)


def test_an_engine_whose_step_never_ends_is_replaced(gates: Gates, background: ThreadPoolExecutor) -> None:
    with serving(*NULL, "--engine-step-timeout", "1", environment=gates.environment) as server:
        (engine,) = server.children(ENGINE)
        with gates.no_step_finishes():
            waiting = background.submit(server.post, ROUTE, input="a")
            assert waiting.result(PATIENCE_S).status_code == 503
            server.wait_for_log("a step of the engine has not finished")
            server.wait_for(lambda: server.children(ENGINE) not in ([], [engine]))
        server.wait_ready()
        assert server.post(ROUTE, input="b").status_code == 200


# Starts.


def test_an_engine_that_cannot_start_three_times_ends_the_server(gates: Gates) -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", *NULL]
    with gates.engines_crash_at_start():
        ran = subprocess.run(
            command, env=gates.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    assert ran.returncode == 1
    (reason,) = (line for line in ran.stderr.splitlines() if line.startswith("error:"))
    assert "the engine process exited with code 1 before it could serve, 3 times in a row" in reason
    assert ran.stderr.count("RuntimeError: crashed at the start") == 3


# Imports.

POISON = "import os, pathlib; pathlib.Path(os.environ['POISONED']).touch(); raise SystemExit(9)\n"


def test_a_server_runs_no_module_of_its_working_folder(tmp_path: Path, llama_folder: Path) -> None:
    marker = tmp_path / "poisoned"
    model = tmp_path / "model"
    model.mkdir()
    for file in llama_folder.iterdir():
        (model / file.name).symlink_to(file)
    for name in ("zmq", "msgspec", "json", "torch", "uvicorn", "numpy", "prometheus_client"):
        (model / f"{name}.py").write_text(POISON)
    environment = os.environ | {"POISONED": str(marker)}
    with serving(".", *NULL, "--served-model-name", "model", environment=environment, cwd=model) as server:
        assert server.post(ROUTE, input="a").status_code in (200, 422)
        server.kill(API)
        server.wait_ready()
    assert not marker.exists()


# Shutdown.


def test_nothing_is_left_of_a_server_whose_supervisor_is_killed() -> None:
    with serving(*NULL, "--api-server-count", "2") as server:
        folder, children = server.runtime_folder, server.children(ENGINE) + server.children(API)
        assert len(children) == 3 and folder.is_dir()
        server.process.kill()
        server.process.wait(PATIENCE_S)
        wait_until(lambda: all(is_gone(pid) for pid in children))
        wait_until(lambda: not folder.exists())


def test_a_second_signal_ends_a_draining_server_at_once(gates: Gates, background: ThreadPoolExecutor) -> None:
    with serving(*NULL, "--drain", "10000", environment=gates.environment) as server:
        folder, children = server.runtime_folder, server.children(ENGINE) + server.children(API)
        with gates.no_step_finishes():
            waiting = background.submit(server.post, ROUTE, input="a")
            server.wait_for_metric(RUNNING_ROWS, 1)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log("draining")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(PATIENCE_S) == 128 + signal.SIGINT
            if not isinstance(waiting.exception(PATIENCE_S), httpx.TransportError):
                assert waiting.result().status_code == 503  # the engine exited before the API process
        assert all(is_gone(pid) for pid in children) and not folder.exists()


def test_a_server_with_a_key_does_not_show_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("of-alice\nof-bob\n")
    flags = (*NULL, "--api-key", "hunter2", "--api-key-file", str(keys), "--log-level", "debug")
    with serving(*flags) as server:
        pids = [server.process.pid, *server.children(ENGINE), *server.children(API)]
        shown = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        assert b"--api-key\0xxxxxxx\0" in shown and b"hunter2" not in shown
        for key, status in (("hunter2", 200), ("of-alice", 200), ("of-bob", 200), ("of-eve", 401)):
            for headers in ({"Authorization": f"Bearer {key}"}, {"X-Api-Key": key}):
                assert server.http.post(ROUTE, json={"input": "a"}, headers=headers).status_code == status
    assert not any(key in line for line in server.log for key in ("hunter2", "of-alice", "of-bob"))

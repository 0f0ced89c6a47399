"""Child processes that are spawned before their configuration is known."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.isolation import isolated_python
from penstock.serving.child import Child, Standby, engine_child, spawned_engine
from tests.waiting import PATIENCE_S


def test_start_sends_the_configuration_to_a_spawned_process() -> None:
    child = Child("json.tool")
    process = child.spawn()
    assert child.process is process and process.poll() is None
    child.config = b"{}"
    child.start()
    assert child.process is process and process.wait(PATIENCE_S) == 0
    assert child.poll_exit() == 0 and child.num_restarts == 1
    child.config = b"no JSON"
    child.start()  # spawns the next process
    assert child.process is not None and child.process is not process and child.process.wait(PATIENCE_S) == 1


def test_a_process_that_exits_before_its_configuration_is_reported_like_any_other() -> None:
    child = Child("json.tool", config=b"{}" * 100_000)
    process = child.spawn()
    process.kill()
    process.wait()
    child.start()
    assert child.poll_exit() == -9


def exit_once(child: Child, *, has_served: bool) -> None:
    process = child.spawn()
    if has_served:
        child.mark_served()
    process.kill()
    process.wait()


def restart_delays(
    monkeypatch: pytest.MonkeyPatch, child: Child, lives: list[tuple[bool, float]]
) -> list[float]:
    """Restart delays after several lives of a process. A life is (has served, its length in seconds)."""
    now_s, delays_s = 100.0, []
    monkeypatch.setattr("penstock.serving.child.time.monotonic", lambda: now_s)
    for has_served, lifetime_s in lives:
        exit_once(child, has_served=has_served)
        now_s += lifetime_s
        assert child.poll_exit() == -9 and child.restart_at_s is not None
        delays_s.append(round(child.restart_at_s - now_s, 3))
    assert child.num_restarts == len(lives)
    return delays_s


def test_the_delay_of_a_process_that_cannot_start_doubles_up_to_its_maximum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lives = [(False, 0.1)] * 10 + [(True, 61.0), (False, 0.1)]
    child = Child("json.tool")
    delays_s = restart_delays(monkeypatch, child, lives)
    assert delays_s == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0, 0.2, 0.2]
    assert child.num_failed_starts == 1 and child.has_ever_served


def test_the_delay_of_a_process_that_served_stays_short_however_often_it_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise one client that crashes the process would keep all other clients waiting."""
    child = Child("json.tool")
    assert restart_delays(monkeypatch, child, [(True, 0.1)] * 6) == [0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert child.num_failed_starts == 0


def test_the_maximum_delay_can_be_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child("json.tool", max_restart_delay_s=1.0)
    assert restart_delays(monkeypatch, child, [(False, 0.1)] * 5) == [0.2, 0.4, 0.8, 1.0, 1.0]


def test_an_exception_before_the_launch_stops_the_spawned_engine() -> None:
    with pytest.raises(ValueError, match="wrong"), spawned_engine("null") as child:
        process = child.process
        assert process is not None and process.poll() is None
        raise ValueError("wrong")
    assert process.poll() is not None


def test_an_engine_process_without_a_configuration_exits_silently() -> None:
    child = engine_child("null")
    command = isolated_python("-m", child.module, *child.arguments)
    ran = subprocess.run(command, input=b"", capture_output=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


@pytest.mark.parametrize(("device", "imported"), [("null", "False"), ("cpu", "True")])
def test_torch_is_preloaded_only_for_devices_that_need_it(device: str, imported: str) -> None:
    script = f"import sys; from penstock.serving.engine_process import preload; preload({device!r}); "
    script += "print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == imported, ran.stderr


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "auto", "cuda:x"])
def test_preloading_works_without_a_cuda_driver(device: str) -> None:
    script = f"from penstock.serving.engine_process import _create_cuda_context as f; f({device!r})"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_a_process_that_stands_by_takes_over_and_another_is_started_when_asked() -> None:
    standby = Standby("json.tool", ("--no-ensure-ascii",))
    first, second = (Child("json.tool", config=b"{}", standby=standby) for _ in range(2))
    standby.prepare()
    waiting = standby.process
    standby.prepare()
    assert waiting is not None and standby.process is waiting, "one is enough"
    assert first.spawn() is waiting and second.spawn() is not waiting
    for child in (first, second):
        child.start()
        assert child.process is not None and child.process.wait(PATIENCE_S) == 0
    standby.prepare()
    again = standby.process
    assert again is not None and again is not waiting
    standby.stop()
    assert again.poll() is not None


def test_a_standby_that_has_exited_does_not_take_over() -> None:
    standby = Standby("json.tool", ("--no-ensure-ascii",))
    standby.prepare()
    assert standby.process is not None
    standby.process.kill()
    standby.process.wait()
    child = Child("json.tool", standby=standby)
    assert child.spawn().poll() is None
    child.stop(0.0)

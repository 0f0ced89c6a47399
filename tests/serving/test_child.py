"""Processes that are begun before their order is known."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.serving.child import Child, engine_child, spawned_engine


def test_an_order_goes_to_the_process_that_was_begun() -> None:
    child = Child("json.tool")
    child.begin()
    process = child.process
    assert process is not None and process.poll() is None
    child.order = b"{}"
    child.start()
    assert child.process is process and process.wait(20) == 0
    assert child.died() == 0 and child.restarts == 1
    child.order = b"no JSON"
    child.start()  # a new one
    assert child.process is not None and child.process is not process and child.process.wait(20) == 1


def test_a_process_that_ended_before_its_order_is_noticed_as_any_other() -> None:
    child = Child("json.tool", order=b"{}" * 100_000)
    child.begin()
    assert child.process is not None
    child.process.kill()
    child.process.wait()
    child.start()
    assert child.died() == -9


def test_whatever_goes_wrong_meanwhile_ends_the_engine() -> None:
    with pytest.raises(ValueError, match="wrong"), spawned_engine("null") as child:
        process = child.process
        assert process is not None and process.poll() is None
        raise ValueError("wrong")
    assert process.poll() is not None


def test_an_engine_that_gets_no_order_leaves_without_a_word() -> None:
    child = engine_child("null")
    command = [sys.executable, "-m", child.module, *child.arguments]
    ran = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


@pytest.mark.parametrize(("device", "imported"), [("null", "False"), ("cpu", "True")])
def test_what_takes_longest_is_begun_with_where_it_is_needed(device: str, imported: str) -> None:
    script = f"import sys; from penstock.serving.engine_process import begin; begin({device!r}); "
    script += "print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == imported, ran.stderr


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "auto", "cuda:x"])
def test_a_machine_without_a_driver_is_no_hindrance(device: str) -> None:
    script = f"from penstock.serving.engine_process import _wake_driver; _wake_driver({device!r})"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0

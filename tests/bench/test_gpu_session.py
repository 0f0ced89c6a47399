"""`benchmarks/gpu_session.py` runs each part on the right checkout, and leaves no process behind."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.waiting import wait_until

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/gpu_session.py"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_session", SCRIPT)
    assert spec is not None and spec.loader is not None
    loaded = sys.modules["gpu_session"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def run(module: ModuleType, folder: Path, *commands: str) -> tuple[str, list[str]]:
    """Run a part with these commands. Returns how it ended, and the lines of its log."""
    options = argparse.Namespace(models="none", out=str(folder), before=str(folder / "other"), minutes=5.0)
    outcome = module.Session(options).run(module.Part("part", 1.0, commands))
    return outcome, (folder / "part.log").read_text().splitlines()


def test_the_other_checkout_is_what_its_commands_and_their_processes_import(
    module: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "other/penstock").mkdir(parents=True)
    (tmp_path / "other/penstock/__init__.py").touch()
    (tmp_path / "other/penstock/__main__.py").write_text("print('the other checkout')")
    start = "-c \"import subprocess as s, sys; s.run([sys.executable, '-m', 'penstock', '--version'])\""
    outcome, log = run(module, tmp_path, f"{start} {{out}}/before-1.md", f"{start} {{out}}/now-1.md")
    assert outcome.startswith("done")
    said = [line for line in log if not line.startswith("$")]
    assert said[0] == "the other checkout" and said[1].startswith("penstock ")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_no_process_of_a_part_stays_on_the_device(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    script, pid = tmp_path / "start.py", tmp_path / "pid"
    script.write_text(
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path('part').write_text(str(child.pid))\n"
        "pathlib.Path('part').rename(sys.argv[1])\n"
        f"child.wait() if {is_stopped} else None\n"
    )

    class Impatient(subprocess.Popen[bytes]):
        """Reaches the time limit as soon as the child process runs."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or not is_stopped:
                return super().wait(timeout)
            wait_until(pid.exists)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(module, "TREE", tmp_path)
    monkeypatch.setattr(module.subprocess, "Popen", Impatient)
    outcome, _ = run(module, tmp_path, f"{script} {pid}")
    assert outcome.startswith("stopped" if is_stopped else "done")
    child = int(pid.read_text())
    wait_until(lambda: not is_running(child))


def is_running(pid: int) -> bool:
    """Whether a process runs. A zombie, which has ended but was not waited for, does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"

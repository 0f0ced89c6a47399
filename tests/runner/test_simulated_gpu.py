"""Runs code paths for CUDA devices on a simulated device, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# GPU tests that also run here: towers and merged weights, with the torch references of the kernels.
OF_GPU = (
    "tests/gpu/test_pages.py::test_a_step_with_images_never_waits_between_launch_and_collect[colpali2]",
    "tests/gpu/test_pages.py::test_a_step_with_images_never_waits_between_launch_and_collect[colmodernvbert]",
    "tests/gpu/test_pages.py::test_cuda_equals_the_cpu[standardized-float32-0.9999-0.99999]",
    "tests/gpu/test_merged_adapters.py::test_an_adapter_is_merged_on_the_device[dora-float32-0.99999]",
)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton's interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu-test")
@pytest.mark.parametrize(("runs_kernels", "tests"), [("1", ("tests/simulated_gpu",)), ("0", OF_GPU)])
def test_a_simulated_gpu_gives_the_answers_of_the_cpu(runs_kernels: str, tests: tuple[str, ...]) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.simulated_gpu.plugin",
        "-p",
        "no:cacheprovider",
        "-q",
    ]
    ran = subprocess.run(
        [*command, "-W", "ignore", *tests],
        cwd=ROOT,
        env=os.environ | {"PENSTOCK_SIMULATED_KERNELS": runs_kernels},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout

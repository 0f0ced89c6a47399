"""Triton compiles a kernel variant for each class of arguments. No request should wait for a compilation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_natural_steps_launch_no_kernel_that_warm_up_has_not_compiled() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.kernel_variants"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"BERT-base": [], "Qwen3-0.6B": []}

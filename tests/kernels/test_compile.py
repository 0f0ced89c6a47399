"""Kernels are compiled for a GPU, because the compiler rejects some code that the interpreter runs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)}
    environment |= {name: os.environ[name] for name in ("PENSTOCK_ALL_CASES",) if name in os.environ}
    ran = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr[-3000:]

"""These tests need the simulated device. `tests/runner/test_simulated_gpu.py` and `make simulated-gpu-test`
run them in a process that has it."""

from __future__ import annotations

import sys

if "tests.simulated_gpu.cuda" not in sys.modules:
    collect_ignore_glob = ["test_*.py"]

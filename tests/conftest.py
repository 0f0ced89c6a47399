"""Settings that every test shares: no test may reach a network."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

if find_spec("triton") is not None and not Path("/dev/nvidiactl").exists():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read when a kernel is defined; tests/kernels runs them so

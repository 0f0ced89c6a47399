"""Settings that every test shares: no test may reach a network."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

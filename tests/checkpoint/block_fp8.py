"""A block-quantised checkpoint's configuration."""

from __future__ import annotations

from typing import Any

GOOD: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}

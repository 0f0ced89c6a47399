"""Quantised checkpoints: reads quantization_config, of which fp8 in blocks of 128 × 128 is supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ModelLoadError

BLOCK = 128
_SUPPORTED = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
_DEFAULTS = {"activation_scheme": "dynamic", "fmt": "e4m3"}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """fp8 weights with `weight_scale_inv` next to them, except those of `unconverted` modules."""

    unconverted: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        """Whether a module's weight is stored in blocks. An entry of `unconverted` is the module's name, the
        end of its name, or the name of a parent."""
        return not any(
            name == other or name.startswith(other + ".") or name.endswith("." + other)
            for other in self.unconverted
        )


def block_format(config: Mapping[str, Any]) -> BlockFormat | None:
    """None for weights that are not quantised. Other formats are refused."""
    found = config.get("quantization_config")
    if not found:
        return None
    if found.get("quant_method") == "mxfp4":  # experts of gpt-oss, which its layer dequantises
        return None
    given = _DEFAULTS | dict(found)
    wanted = _SUPPORTED | {"fmt": "e4m3"}
    if wrong := [name for name, value in wanted.items() if given.get(name) != value]:
        name = wrong[0]
        raise ModelLoadError(
            f"quantization_config in config.json has {name} = {given.get(name)!r}, which is not supported; "
            f"supported: {', '.join(f'{key} = {value!r}' for key, value in _SUPPORTED.items())}"
        )
    return BlockFormat(tuple(given.get("modules_to_not_convert") or ()))

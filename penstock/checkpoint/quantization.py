"""What config.json says of weights that are stored quantised: fp8 in blocks of 128 × 128 is read, no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ModelLoadError

BLOCK = 128
_WANTED = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
_IMPLIED = {"activation_scheme": "dynamic", "fmt": "e4m3"}  # where nothing is said


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Weights in fp8 with `weight_scale_inv` beside them, but for the modules that are left alone."""

    unconverted: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        """Whether a module's weight is stored in blocks. An exception is its name, the end of it, or of a
        module that holds it."""
        return not any(
            name == other or name.startswith(other + ".") or name.endswith("." + other)
            for other in self.unconverted
        )


def block_format(config: Mapping[str, Any]) -> BlockFormat | None:
    """None: weights are stored as they are. Other forms are refused."""
    found = config.get("quantization_config")
    if not found:
        return None
    given = _IMPLIED | dict(found)
    wanted = _WANTED | {"fmt": "e4m3"}
    if wrong := [name for name, value in wanted.items() if given.get(name) != value]:
        name = wrong[0]
        raise ModelLoadError(
            f"quantization_config in config.json has {name} = {given.get(name)!r}, which is not supported; "
            f"only {', '.join(f'{known} = {value!r}' for known, value in _WANTED.items())} is"
        )
    return BlockFormat(tuple(given.get("modules_to_not_convert") or ()))

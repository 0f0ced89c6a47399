"""The keys of an image processor's file: typed values, and errors that name the key and accepted values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.checkpoint.files import shown
from penstock.checkpoint.image_processor import Channels
from penstock.errors import ModelLoadError

MAX_SIDE = 16_384  # pixels; longest side of a prepared image
# Default patch sizes by model_type.
_PATCH_SIZES = {
    "blip_vision_model": 16,
    "clip": 32,
    "clip_vision_model": 32,
    "idefics3_vision": 32,
    "siglip": 16,
    "siglip_vision_model": 16,
    "smolvlm_vision": 32,
    "vit": 16,
}


@dataclass(slots=True)
class ProcessorKeys:
    """The keys of one processor file. Every key must be taken or be harmless."""

    values: Mapping[str, Any]
    file: Path
    vision: Mapping[str, Any]  # config of the vision tower
    model: Mapping[str, Any]  # config of the model around the tower
    processor: Mapping[str, Any]  # keys of the processor around the image processor
    taken: set[str] = field(default_factory=set)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of `key`; null means the default."""
        self.taken.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def refuse(self, key: str, value: Any, accepted: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.file} has {key} = {shown(value)}, which is not supported; it has to be {accepted}",
            param="model",
        )

    def integer(self, key: str, default: int | None = None, high: int = MAX_SIDE) -> int:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise self.refuse(key, value, f"an integer from 1 to {high:,}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Whether a step is on. Null switches it off, as in transformers."""
        value = self.take(key, default and key not in self.values)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, value, "a number")
        return float(value)

    def channels(self, key: str, default: Channels) -> Channels:
        value = self.take(key, default)
        values = [value] * 3 if isinstance(value, int | float) else value
        if not isinstance(values, list | tuple) or len(values) != 3:
            raise self.refuse(key, value, "three numbers")
        red, green, blue = (float(number) for number in values)
        return red, green, blue

    def off(self, key: str) -> None:
        """Refuse a step that is switched on, but not supported for this kind of processor."""
        if value := self.take(key):
            raise self.refuse(key, value, "false")

    def agrees(self, key: str, value: int, vision_key: str) -> int:
        """Check that the config of the vision tower has the same value under `vision_key`."""
        tower = self.vision.get(vision_key)
        if isinstance(tower, list | tuple) and len(set(tower)) == 1:
            tower = tower[0]
        if tower is not None and tower != value:
            raise self.refuse(
                key, value, f"{shown(tower)}, as {vision_key} of the vision tower in config.json"
            )
        return value

    def size(self, key: str, default: Mapping[str, int], *, is_square: bool) -> dict[str, int]:
        """A size in any of its spellings: an object, height and width, or one number."""
        value = self.take(key, default)
        if isinstance(value, list | tuple) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        elif isinstance(value, int) and not isinstance(value, bool):
            value = {"height": value, "width": value} if is_square else {"shortest_edge": value}
        if not isinstance(value, Mapping):
            raise self.refuse(key, value, "an object with height and width, or shortest_edge")
        sizes = {name: number for name, number in value.items() if number is not None}
        for name, number in sizes.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise self.refuse(f"{key}.{name}", number, "an integer above 0")
        return sizes

    def tower_patch_size(self) -> int:
        """The patch size of the vision tower, which processors of fixed sizes do not repeat."""
        default = _PATCH_SIZES.get(str(self.vision.get("model_type")))
        patch_size = self.vision.get("patch_size", default)
        if isinstance(patch_size, list | tuple) and len(set(patch_size)) == 1:
            patch_size = patch_size[0]
        if not isinstance(patch_size, int) or not 1 <= patch_size <= MAX_SIDE:
            raise ModelLoadError(
                f"config.json beside {self.file} has no patch_size of a vision tower", param="model"
            )
        return patch_size

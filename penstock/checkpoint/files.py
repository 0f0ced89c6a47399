"""JSON files of a model folder, with errors that name the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ModelLoadError


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(file.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{file.parent} is not a model folder: it has no {file.name}") from None
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} should hold a JSON object, not {type(value).__name__}")
    return value


def optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def integer(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ModelLoadError(f"config.json has no integer {' or '.join(names)}")

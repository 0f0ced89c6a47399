"""The JSON files of a model folder, with errors that name the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.errors import ModelLoadError

TRANSFORMER_MODULES = ("Transformer", "MLMTransformer")
MASK_MODULE = "MultiVectorMask"
_KNOWN_MODULES = (
    *TRANSFORMER_MODULES,
    "Pooling",
    "SpladePooling",
    "Dense",
    "Normalize",
    "Dropout",
    "LogitScore",
    MASK_MODULE,
)


class Module(NamedTuple):
    """An entry of modules.json."""

    kind: str  # the class name without its package
    path: str  # of its folder, below the model's


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """What the files of a model folder hold."""

    folder: Path
    config: dict[str, Any]  # config.json under the caller's overrides
    overrides: dict[str, Any]
    modules: tuple[Module, ...]  # of the sentence-transformers layout; none for a plain checkpoint
    transformer: dict[str, Any]  # options of the Transformer module
    sentence_transformers: dict[str, Any]  # config_sentence_transformers.json

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    def integer(self, *keys: str) -> int:
        """The first of these keys of config.json that holds an integer."""
        return integer(self.config, *keys, file=self.config_file)

    def modules_of(self, kind: str) -> Iterator[Module]:
        return (module for module in self.modules if module.kind == kind)

    def has_module(self, kind: str) -> bool:
        return any(self.modules_of(kind))

    def module_config(self, module: Module) -> dict[str, Any]:
        return read_json(self.folder / module.path / "config.json")


def read_files(folder: Path, config: dict[str, Any], overrides: dict[str, Any]) -> CheckpointFiles:
    modules = _read_modules(folder / "modules.json")
    return CheckpointFiles(
        folder=folder,
        config=config,
        overrides=overrides,
        modules=modules,
        transformer=_transformer_options(folder, modules),
        sentence_transformers=optional_json(folder / "config_sentence_transformers.json"),
    )


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(file.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{file.parent} is not a model folder: it has no {file.name}") from None
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} has to hold a JSON object, not {type(value).__name__}")
    return value


def optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def integer(values: Mapping[str, Any], *keys: str, file: Path) -> int:
    for key in keys:
        if isinstance(values.get(key), int):
            return int(values[key])
    raise ModelLoadError(f"{file} has no integer {' or '.join(keys)}")


def optional_integer(values: Mapping[str, Any], *keys: str) -> int | None:
    return next((values[key] for key in keys if isinstance(values.get(key), int)), None)


def _read_modules(file: Path) -> tuple[Module, ...]:
    if not file.is_file():
        return ()
    try:
        rows = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{file} is not a list of modules: {error}") from None
    modules = tuple(
        Module(str(row.get("type", "")).rsplit(".", 1)[-1], str(row.get("path", ""))) for row in rows
    )
    for module in modules:
        if module.kind not in _KNOWN_MODULES:
            raise ModelLoadError(
                f"{file} has a module {module.kind!r}, which is not supported; "
                f"supported: {', '.join(_KNOWN_MODULES)}"
            )
    return modules


def _transformer_options(folder: Path, modules: tuple[Module, ...]) -> dict[str, Any]:
    paths = [module.path for module in modules if module.kind in TRANSFORMER_MODULES] or [""]
    for path in paths:
        for kind in ("bert", "roberta", "xlm-roberta", "distilbert", "camembert"):
            file = folder / path / f"sentence_{kind}_config.json"
            if file.is_file():
                return read_json(file)
    return {}

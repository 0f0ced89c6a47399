"""The JSON files of a model folder, with errors that name the file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from reprlib import Repr
from typing import Any, NamedTuple, TypeGuard

import msgspec

from penstock.errors import ModelLoadError

CHAT_END_MODULE = "ZembedTransformer"  # of zembed-1; its code ends each text as a chat template would
TRANSFORMER_MODULES = ("Transformer", "MLMTransformer", "CLIPModel", CHAT_END_MODULE)
MASK_MODULE = "MultiVectorMask"
QUANTIZER_MODULE = "FlexibleQuantizer"  # used by pplx-embed
MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json in use has some 40 MB
STATIC_MODULE = "StaticEmbedding"
SPARSE_STATIC_MODULE = "SparseStaticEmbedding"
ROUTER_MODULES = ("Router", "Asym")  # two names of one class
# Weight files in order of preference, each as an index of shards or one file.
_WEIGHTS = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
PICKLES = (".bin", ".pt")  # suffixes of files that torch.save wrote
_KNOWN_MODULES = (
    *TRANSFORMER_MODULES,
    STATIC_MODULE,
    "Pooling",
    "SpladePooling",
    "Dense",
    "LayerNorm",
    "Normalize",
    "Dropout",
    "LogitScore",
    QUANTIZER_MODULE,
    MASK_MODULE,
    *ROUTER_MODULES,
)


log = logging.getLogger(__name__)
_UNUSABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class Module(NamedTuple):
    """An entry of modules.json."""

    kind: str  # the class name without its package
    path: str  # path of its folder below the model's


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The content of the files of a model folder."""

    root: Path  # holds modules.json; paths of modules are below it
    folder: Path  # holds the model's config.json, tokenizer and weights: the root, or a module's folder
    config: dict[str, Any]  # config.json with the caller's overrides
    overrides: dict[str, Any]
    modules: tuple[Module, ...]  # of the sentence-transformers layout; empty for a plain checkpoint
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
        return read_json(self.root / module.path / "config.json")


def read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():  # reading a pipe would never end
        raise ModelLoadError(f"{file.parent} is not a model folder: it has no {file.name}", param="model")
    value = _decode(file)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} has to hold a JSON object, not {type(value).__name__}")
    return value


def _decode(file: Path) -> Any:
    try:
        if (size := file.stat().st_size) > MAX_JSON_BYTES:
            raise ModelLoadError(f"{file} has {size:,} bytes; at most {MAX_JSON_BYTES:,} are read")
        return msgspec.json.decode(file.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from None
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from None


def optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def integer(values: Mapping[str, Any], *keys: str, file: Path) -> int:
    found = optional_integer(values, *keys)
    if found is None:
        raise ModelLoadError(f"{file} has no integer {' or '.join(keys)}")
    return found


def optional_integer(values: Mapping[str, Any], *keys: str) -> int | None:
    return next((values[key] for key in keys if _is_integer(values.get(key))), None)


def positive_integer(values: Mapping[str, Any], key: str, *, file: Path, high: int) -> int:
    """The value of `key`, from 1 to `high`."""
    value = values.get(key)
    if not _is_integer(value) or not 1 <= value <= high:
        raise ModelLoadError(
            f"{file} has {key} = {shown(value)}; it has to be an integer from 1 to {high:,}", param="model"
        )
    return int(value)


def mapping(values: Mapping[str, Any], key: str, *, file: Path) -> dict[str, Any]:
    """The object under `key`; empty if there is none."""
    value = values.get(key)
    if value is not None and not isinstance(value, dict):
        raise ModelLoadError(f"{file} has {key} = {shown(value)}; it has to be an object", param="model")
    return value or {}


@contextmanager
def usable_values(folder: Path) -> Iterator[None]:
    """Turn errors from unexpected values into a `ModelLoadError` that names `folder`."""
    try:
        yield
    except _UNUSABLE as error:
        log.debug("%s cannot be used", folder, exc_info=True)
        reason = f"{type(error).__name__}: {error}"
        raise ModelLoadError(f"a file in {folder} has a value that cannot be used: {reason}") from error


def shown(value: Any) -> str:
    """Shorten a value from a file for an error message."""
    return _SHORT.repr(value)


def first_names(names: Sequence[str], most: int = 8) -> str:
    """Join names for a message, at most `most` of them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder; empty if there are none. Shards that an index names may be missing.

    safetensors files are preferred to `pytorch_model.bin`.
    """
    for index, single in _WEIGHTS:
        if (folder / index).is_file():
            return [inside(folder, name, folder / index) for name in sorted(set(_weight_map(folder / index)))]
        if (folder / single).is_file():
            return [folder / single]
    return []


def _weight_map(index: Path) -> list[str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelLoadError(f"{index} is not a weight index: its weight_map has to map names to files")
    return list(names.values())


def inside(folder: Path, name: str, file: Path) -> Path:
    """Resolve `name`, which `file` gives relative to `folder`. Paths that lead out of it are refused."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ModelLoadError(f"{file} names {shown(name)}, which is outside of the model's folder")
    return folder / path


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def read_modules(file: Path) -> tuple[Module, ...]:
    """The entries of modules.json; none if there is no such file."""
    if not file.is_file():
        return ()
    rows = _decode(file)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ModelLoadError(f"{file} is not a list of modules")
    return tuple(named_module(file, str(row.get("type", "")), str(row.get("path", ""))) for row in rows)


def named_module(file: Path, kind: str, path: str, more: tuple[str, ...] = ()) -> Module:
    """The module of class `kind` that `file` names. `more` are classes that only this file supports."""
    module = Module(kind.rsplit(".", 1)[-1], path)
    inside(file.parent, path, file)
    supported = (*_KNOWN_MODULES, *more)
    if module.kind not in supported:
        raise ModelLoadError(
            f"{file} has a module {module.kind!r}, which is not supported; supported: {', '.join(supported)}",
            param="model",
        )
    return module

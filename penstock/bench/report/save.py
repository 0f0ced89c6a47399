"""Writes results. A full disk or a bad folder never loses the figures of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from penstock.bench.console import print_result
from penstock.bench.options import ReportOptions
from penstock.errors import BadValue, EngineError

_SAMPLES = (
    "requests",
    "start_times",
    "send_delays",
    "first_bytes",
    "e2els",
    "statuses",
    "input_lens",
    "errors",
    "output_lens",
    "ttfts",
    "itls",
)


class NotSaved(EngineError):
    """The run finished, but its results could not be written."""


def result_path(options: ReportOptions, name: str) -> Path:
    """The path of the JSON file. Called before the run, to check that it can be written."""
    folder = Path(options.result_dir)
    path = folder / (options.result_filename or f"{_safe(name)}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadValue(
            f"--result-dir {folder} cannot be created: {error.strerror}", param="result_dir"
        ) from None
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise BadValue(f"{path} cannot be written", param="result_dir")
    return path


def save_json(path: Path, result: dict[str, Any]) -> None:
    """Write everything. If that fails, write the figures without samples; if that fails too, print them."""
    try:
        write(path, _encode(result))
        return
    except OSError as error:
        reason = f"{path} could not be written: {error.strerror}"
    figures = {name: value for name, value in result.items() if name not in _SAMPLES}
    small = path.with_name(f"{path.stem}.figures.json")
    try:
        if _is_device(path):
            raise OSError
        write(small, _encode(figures))
        kept = f"the figures, without the samples, are in {small}"
    except OSError:
        print_result(_encode(figures).decode())
        kept = "the figures, without the samples, are printed above"
    raise NotSaved(f"{reason}; {kept}")


def save(path: Path, result: dict[str, Any], page: str) -> None:
    """Write the JSON file, and the page next to it."""
    save_json(path, result)
    page_path = path.with_suffix(".html")
    try:
        if not _is_device(path):
            write(page_path, page.encode())
    except OSError as error:
        raise NotSaved(f"{page_path} could not be written: {error.strerror}; {path} is complete") from None
    print_result(f"Results: {path} and {page_path.name}")


def save_figures(path: str | None, figures: Mapping[str, Any]) -> None:
    """Write figures that have also been printed, if a path is given."""
    if path is None:
        return
    try:
        write(Path(path), orjson.dumps(figures))
    except OSError as error:
        raise NotSaved(f"{path} could not be written: {error.strerror}; the figures are above") from None


def write(path: Path, data: bytes) -> None:
    """Write the whole file or nothing, unless `path` is a pipe or a device."""
    if _is_device(path):
        with path.open("wb") as file:
            file.write(data)
        return
    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _encode(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _safe(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)

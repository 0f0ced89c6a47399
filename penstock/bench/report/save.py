"""Writing results so that a full disk or a bad folder never costs a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from penstock.bench.options import ReportOptions
from penstock.bench.words import say
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
    """The run happened, but its results could not be written as wanted."""


def place_for(options: ReportOptions, name: str) -> Path:
    """The JSON file's path, after making sure, before the run, that it can be written there."""
    folder = Path(options.result_dir)
    path = folder / (options.result_filename or f"{_safe(name)}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadValue(
            f"--result-dir {folder} cannot be made: {error.strerror}", param="result_dir"
        ) from None
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise BadValue(f"{path} cannot be written", param="result_dir")
    return path


def save_json(path: Path, result: dict[str, Any]) -> None:
    """All of it; else the figures without the samples; else the figures on stdout. Never nothing."""
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
        say(_encode(figures).decode())
        kept = "the figures, without the samples, are printed above"
    raise NotSaved(f"{reason}; {kept}")


def save(path: Path, result: dict[str, Any], page: str) -> None:
    """The JSON and, beside it, the page."""
    save_json(path, result)
    beside = path.with_suffix(".html")
    try:
        if not _is_device(path):
            write(beside, page.encode())
    except OSError as error:
        raise NotSaved(f"{beside} could not be written: {error.strerror}; {path} is complete") from None
    say(f"Results: {path} and {beside.name}")


def save_figures(path: str | None, figures: Mapping[str, Any]) -> None:
    """For commands whose figures are printed anyway; no path, no file."""
    if path is None:
        return
    try:
        write(Path(path), orjson.dumps(figures))
    except OSError as error:
        raise NotSaved(f"{path} could not be written: {error.strerror}; the figures are above") from None


def write(path: Path, data: bytes) -> None:
    """Whole or not at all, except where `path` is no regular file (a pipe, a device)."""
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

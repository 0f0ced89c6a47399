"""Conversion of the flags about images and other media."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError


def image_pixels(given: int) -> int:
    from penstock.inputs.images.decode import MAX_IMAGE_PIXELS

    if given > MAX_IMAGE_PIXELS:
        raise ConfigError(
            f"--max-image-pixels is {given:,}; use at most {MAX_IMAGE_PIXELS:,}", param="max_image_pixels"
        )
    return given


def mm_limits(given: str) -> dict[str, int]:
    """The value of --limit-mm-per-prompt: comma-separated kind=N, or a JSON object."""
    flag = "--limit-mm-per-prompt"
    if given.lstrip().startswith("{"):
        pairs = [(kind, _count(value)) for kind, value in _json_object(given).items()]
    else:
        pairs = [(kind, _count(value)) for kind, _, value in (part.partition("=") for part in _names(given))]
    for kind, count in pairs:
        if kind not in ("image", "video", "audio") or count is None:
            raise ConfigError(
                f"""{flag} is {given!r}; use image=N or a JSON object such as {{"image": 8}}""",
                param="limit_mm_per_prompt",
            )
    return {kind: count for kind, count in pairs if count is not None}


def _count(value: Any) -> int | None:
    """A number of images: 8, "8", or {"count": 8}."""
    if isinstance(value, dict):
        value = value.get("count")
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def media_domains(given: str) -> tuple[str, ...]:
    """The value of --allowed-media-domains: comma-separated hosts, or a JSON list."""
    names = _names(given)
    if given.startswith("["):
        try:
            names = msgspec.json.decode(given, type=tuple[str, ...])
        except msgspec.MsgspecError:
            names = (given,)
    for name in names:
        if not re.fullmatch(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*\.?(:\d{1,5})?", name, re.ASCII):
            raise ConfigError(
                f"--allowed-media-domains has {name!r}; use hosts such as images.example.com, *.example.com "
                "or 127.0.0.1:9000",
                param="allowed_media_domains",
            )
    return tuple(name.lower() for name in names)


def media_folder(given: str) -> str:
    if not Path(given).is_dir():
        raise ConfigError(
            f"--allowed-local-media-path is {given!r}, which is not a folder",
            param="allowed_local_media_path",
        )
    return str(Path(given).absolute())


def _names(value: str) -> tuple[str, ...]:
    return tuple(name for part in value.split(",") if (name := part.strip()))


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {text: None}  # refused by the caller

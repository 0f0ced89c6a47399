"""What the fields of request bodies mean, for the OpenAPI schema and the reference pages.

The texts are in `fields.toml`, which is read on first use.
"""

from __future__ import annotations

import re
import tomllib
import typing
from functools import cache
from importlib import resources

import msgspec

from penstock.api.fields import NoEffect, Refused

_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


@cache
def _texts() -> dict[str, dict[str, str]]:
    file = resources.files("penstock.api") / "fields.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def meaning(body: str, field: str) -> str | None:
    """What a field means, with links into the docs. The section of the body overrides the common section."""
    texts = _texts()
    return texts.get(body, {}).get(field) or texts["common"].get(field)


def without_links(text: str) -> str:
    """The text with links replaced by their words, because they lead into the docs."""
    return _LINK.sub(r"\1", text)


@cache
def limits(body: type[msgspec.Struct]) -> dict[str, NoEffect | Refused]:
    """The fields that have no effect or are refused, by their names in JSON."""
    hints = typing.get_type_hints(body, include_extras=True)
    found: dict[str, NoEffect | Refused] = {}
    for each in msgspec.structs.fields(body):
        for note in getattr(hints[each.name], "__metadata__", ()):
            if isinstance(note, NoEffect | Refused):
                found[each.encode_name] = note
    return found

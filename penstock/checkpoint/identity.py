"""The names of a checkpoint, and the tag of its model card.

Many rerankers and embedders are published as plain language models. Only their names and tags identify them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_CARD_CHARS = 1 << 16
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
_CARD_TAG = re.compile(r"^pipeline_tag:\s*[\"']?([\w-]+)", re.MULTILINE)
_HUB_FOLDER = re.compile(r"models--(.+)")  # in the standard cache: models--org--name/snapshots/commit
_RERANKER = re.compile(r"rerank|zerank|(?:^|[-_/])ranker")
_EMBEDDER = re.compile(r"embed|retriev|gritlm|(?:^|[-_/])(?:e5|gme|gte|bge|stella|sfr|linq|sbert)[-_]")
BASE_NAMES = "_adapter_base_names"  # key of config.json in folders of `checkpoint.merged`
_RERANKER_TAG, _EMBEDDER_TAGS = "text-ranking", ("sentence-similarity", "feature-extraction")


@dataclass(frozen=True, slots=True)
class Identity:
    names: tuple[str, ...]  # served name, folder names and hub id, in lower case
    origin: str = ""  # the model it was saved or trained from, in lower case; "" if unknown
    card_tag: str = ""  # pipeline_tag of README.md
    base_names: tuple[str, ...] = ()  # names of the model that an adapter is merged into, in lower case

    def is_named(self, pattern: str, *, with_origin: bool) -> bool:
        names = (*self.names, self.origin) if with_origin else self.names
        return any(re.search(pattern, name) for name in names)

    def has_base_named(self, pattern: str) -> bool:
        return any(re.search(pattern, name) for name in self.base_names)

    @property
    def is_reranker(self) -> bool:
        return self.card_tag == _RERANKER_TAG or any(_RERANKER.search(name) for name in self.names)

    @property
    def is_embedder(self) -> bool:
        return self.card_tag in _EMBEDDER_TAGS or any(_EMBEDDER.search(name) for name in self.names)


def read_identity(folder: Path, served_name: str, config: Mapping[str, Any]) -> Identity:
    origin, base_names = config.get("_name_or_path"), config.get(BASE_NAMES) or ()
    return Identity(
        names_of(folder, served_name),
        origin.lower() if isinstance(origin, str) else "",
        _card_tag(folder / "README.md"),
        tuple(name for name in base_names if isinstance(name, str)),
    )


def names_of(folder: Path, served_name: str) -> tuple[str, ...]:
    """The names of a model in lower case: served name, folder names and hub id."""
    names = [served_name, folder.name, folder.resolve().name]
    names += [found[1].replace("--", "/") for part in folder.parts if (found := _HUB_FOLDER.fullmatch(part))]
    return tuple(dict.fromkeys(name.lower() for name in names))


def _card_tag(file: Path) -> str:
    if not file.is_file():
        return ""
    with file.open(encoding="utf-8", errors="replace") as card:
        front = _FRONT_MATTER.match(card.read(_MAX_CARD_CHARS))
    found = _CARD_TAG.search(front[1]) if front is not None else None
    return "" if found is None else found[1]

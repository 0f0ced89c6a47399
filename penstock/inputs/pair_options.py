"""What is scored, and how pairs become rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import BadValue
from penstock.inputs.truncation import Side

Pair = tuple[str, str]  # query, document


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """How pairs become rows; the names are those of API.md."""

    instruction: str | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side = "right"
    cache_salt: str = ""
    is_symmetric: bool = False  # of embedders: queries and documents are the same kind of text
    prompt_name: str | None = None  # with `is_symmetric`: what goes before both


DEFAULT_PAIR_OPTIONS = PairOptions()


def make_pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[Pair]:
    """One query for all documents, or one for each; anything but texts is refused by its place."""
    firsts, seconds = _texts(queries, "queries"), _texts(documents, "documents")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise BadValue(
            f"{len(firsts)} queries for {len(seconds)} documents; give one query, or one a document",
            param="queries",
        )
    return list(zip(firsts, seconds, strict=True))


def _texts(given: str | Sequence[str], name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    if not texts:
        raise BadValue(f"{name} is empty; give at least one text", param=name)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadValue(f"{name} {index} is {type(text).__name__}, not a text", param=name)
    return texts

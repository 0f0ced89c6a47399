"""Query-document pairs and the options for turning them into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from penstock.errors import BadValue
from penstock.inputs.truncation import Side
from penstock.types import Content, PreparedImage

Pair = tuple[Any, Any]  # query, document: texts, or images if the model reads them


class PairNames(NamedTuple):
    """Names of the two texts of a pair in errors, and the fields that they come from."""

    first: str = "query"
    second: str = "document"
    first_param: str = "query"
    second_param: str = "documents"


_QUERY_AND_DOCUMENT = PairNames()
TWO_TEXTS = PairNames("first text", "second text", "input", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """How pairs become rows. The names are those of the HTTP fields."""

    instruction: str | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side = "right"
    cache_salt: str = ""
    is_symmetric: bool = False  # embedders only: queries and documents are the same kind of text
    max_request_tokens: int | None = None  # limit for all rows together; None: no limit
    prompt_name: str | None = None  # prompt of both texts, if `is_symmetric`
    cuts_first_only: bool = False  # truncate only the first text; otherwise the longer one
    names: PairNames = _QUERY_AND_DOCUMENT


DEFAULT_PAIR_OPTIONS = PairOptions()


def make_pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[Pair]:
    """Pair one query with all documents, or each document with its own query.

    Values that are not texts are rejected with their index.
    """
    query_texts, document_texts = _texts(queries, "queries"), _texts(documents, "documents")
    if len(query_texts) == 1:
        query_texts *= len(document_texts)
    if len(query_texts) != len(document_texts):
        raise BadValue(
            f"{len(query_texts)} queries for {len(document_texts)} documents; give one query, or "
            "one for each document",
            param="queries",
        )
    return list(zip(query_texts, document_texts, strict=True))


def are_pairs(inputs: Any) -> TypeGuard[Sequence[Pair]]:
    """Whether the first input is a pair of texts. `check_are_pairs` checks the others."""
    if not isinstance(inputs, list | tuple) or not inputs or not isinstance(inputs[0], list | tuple):
        return False
    return bool(inputs[0]) and isinstance(inputs[0][0], str)


def check_are_pairs(inputs: Sequence[Any], *, allow_empty_text: bool = True) -> list[Pair]:
    """Convert the inputs to pairs; raise `BadValue` for an input that is not a pair of texts."""
    for index, pair in enumerate(inputs):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(t, str) for t in pair):
            raise BadValue(
                f"input {index} is not a pair of texts, but input 0 is a list of texts; give only pairs, "
                "each with two texts",
                param="input",
            )
        if not allow_empty_text and not (pair[0] and pair[1]):
            raise BadValue(
                f"input {index} has an empty text; give at least one character for each text", param="input"
            )
    return [(first, second) for first, second in inputs]


def _texts(given: str | Sequence[str], name: str) -> list[str]:
    texts = [given] if isinstance(given, str | PreparedImage | Content) else list(given)
    if not texts:
        raise BadValue(f"{name} is empty; give at least one text", param=name)
    for index, text in enumerate(texts):
        if not isinstance(text, str | PreparedImage | Content):
            raise BadValue(f"{name} {index} is {type(text).__name__}, not a text", param=name)
    return texts

"""Types of answers that several routes share. They describe the answers in the OpenAPI schema."""

from __future__ import annotations

from typing import Literal

import msgspec


class Usage(msgspec.Struct, kw_only=True):
    """The tokens that the model saw."""

    prompt_tokens: int
    total_tokens: int


class ListHead(msgspec.Struct, kw_only=True):
    """The fields of every answer with a list, except `data`."""

    object: Literal["list"]
    id: str
    created: int  # seconds since 1970
    model: str


class ListAnswer(ListHead, kw_only=True):
    usage: Usage


class SparseTerm(msgspec.Struct, kw_only=True):
    """A token of the vocabulary, with its weight in the text."""

    token_id: int
    token: str
    weight: float

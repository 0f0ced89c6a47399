"""Queries and documents as a late-interaction model reads them: markers, lengths, expansion, skip list.

All rows of a call are laid out at once. A marker stands behind a row's first token; a row that is too
long loses the end of its text but keeps its special tokens; a short query is filled up with the
expansion token, which takes part in a score whether or not it is attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.checkpoint.late import LateSpec
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import BadValue, ModelLoadError
from penstock.inputs.prompts import choose_prompt
from penstock.inputs.tokenizer import Tokenizer
from penstock.inputs.truncation import Side, truncation_limit
from penstock.types import Ints, cumulative


@dataclass(frozen=True, slots=True, eq=False)
class LateRows:
    rows: list[Ints]
    key_limits: Ints | None = None  # [rows], leading tokens that are attended to; None: all
    token_mask: Ints | None = None  # [tokens], 1 where a token's vector takes part in a score; None: all do

    @property
    def token_ids(self) -> Ints:
        return self.rows[0] if len(self.rows) == 1 else np.concatenate(self.rows)

    @property
    def lengths(self) -> Ints:
        return np.array([len(row) for row in self.rows], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Framing:
    """How rows of token ids came to be: their special tokens, and which end of a long text is dropped."""

    frame: tuple[int, int]  # leading and trailing special tokens
    side: Side = "right"


class LateInputs:
    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        if spec.late is None:
            raise BadValue(f"model {spec.name} does not compare token by token", param="model")
        late = spec.late
        self.spec = spec
        self.late = late
        self.tokenizer = tokenizer
        self._framing = Framing((tokenizer.prefix, tokenizer.suffix))
        self._query_marker = self._marker(late.query_marker)
        self._document_marker = self._marker(late.document_marker)
        self._expansion = _expansion_id(late, tokenizer) if late.expand_to else None
        self._skipped = _skip_ids(late, tokenizer)
        self.query_length = min(late.query_length or spec.max_model_len, spec.max_model_len)
        self.expand_to = min(late.expand_to or 0, self.query_length)

    def queries(self, texts: Sequence[str]) -> LateRows:
        return self.query_rows(self.tokenizer.encode(self.with_prompt(texts, self.prompt("query"))))

    def documents(self, texts: Sequence[str], truncate_prompt_tokens: int | None = None) -> LateRows:
        """Cut at `truncate_prompt_tokens`, with -1 at the model's limit; else at the model's own length."""
        texts = self.with_prompt(texts, self.prompt("document"))
        return self.document_rows(self.tokenizer.encode(texts), truncate_prompt_tokens)

    def prompt(self, kind: Literal["query", "document"]) -> str:
        """What the model's own table puts before a query or a document."""
        return choose_prompt(self.spec, input_type=kind)

    def with_prompt(self, texts: Sequence[str], prompt: str) -> list[str]:
        """Texts as the tokenizer is to see them."""
        if not self.late.strip:
            return [prompt + text for text in texts]
        return [(prompt + text).strip() for text in texts]

    def query_rows(self, rows: list[Ints], framing: Framing | None = None) -> LateRows:
        """Queries whose texts are tokens already."""
        flat, given = _marked(rows, self._query_marker, self.query_length, framing or self._framing)
        lengths = np.maximum(given, self.expand_to)
        if self._expansion is not None:
            place = np.arange(lengths.sum()) - np.repeat(cumulative(lengths)[:-1], lengths)
            full = np.full(len(place), self._expansion, dtype=np.int32)
            full[place < np.repeat(given, lengths)] = flat
            flat = full
        limited = not self.late.attend and bool((given < lengths).any())
        keep = self._kept(flat) if self.late.skip_queries else None
        return LateRows(_split(flat, lengths), given if limited else None, keep)

    def document_rows(
        self, rows: list[Ints], truncate_prompt_tokens: int | None = None, framing: Framing | None = None
    ) -> LateRows:
        """Documents whose texts are tokens already."""
        most = truncation_limit(truncate_prompt_tokens, self.spec.max_model_len)
        if most is None and self.late.document_length is not None:
            most = min(self.late.document_length, self.spec.max_model_len)
        if most is None:
            self._refuse_long(rows)
        flat, lengths = _marked(
            rows, self._document_marker, most or self.spec.max_model_len, framing or self._framing
        )
        return LateRows(_split(flat, lengths), None, self._kept(flat))

    def _kept(self, flat: Ints) -> Ints | None:
        """Which tokens are not of the skip list; None where that is all."""
        if not len(self._skipped):
            return None
        skipped = np.isin(flat, self._skipped)
        return (~skipped).astype(np.int32) if skipped.any() else None

    def _refuse_long(self, rows: list[Ints]) -> None:
        """Where the checkpoint names no length, nothing is cut unasked."""
        room = self.spec.max_model_len - (self._document_marker is not None)
        for index, row in enumerate(rows):
            if len(row) > room:
                tokens = len(row) + self.spec.max_model_len - room
                raise BadValue(
                    f"input {index} has {tokens} tokens, but the model takes at most "
                    f"{self.spec.max_model_len}; shorten it or set truncate_prompt_tokens to -1",
                    param="input",
                )

    def _marker(self, token: str) -> int | None:
        if not token:
            return None
        number = self.tokenizer.token_id(token)
        if number is None or number >= self.spec.vocab_size:
            raise ModelLoadError(
                f"{self.spec.folder}: the marker {token!r} is not a token of the model; its files have to "
                "name one that is",
                param="model",
            )
        return number


def _expansion_id(late: LateSpec, tokenizer: Tokenizer) -> int:
    number = None if late.expansion_token is None else tokenizer.token_id(late.expansion_token)
    if number is None:
        token = late.expansion_token or "a mask token"
        raise ModelLoadError(
            f"queries are expanded with {token}, which the tokenizer does not have", param="model"
        )
    return number


def _skip_ids(late: LateSpec, tokenizer: Tokenizer) -> Ints:
    """A word that is no token stands for the unknown token, as in the reference."""
    unknown = None if late.unknown_token is None else tokenizer.token_id(late.unknown_token)
    numbers = [tokenizer.token_id(word) for word in late.skip_words]
    found = {unknown if number is None else number for number in numbers} - {None}
    return np.array(sorted(number for number in found if number is not None), dtype=np.int32)


def _marked(rows: list[Ints], marker: int | None, most: int, framing: Framing) -> tuple[Ints, Ints]:
    """All rows in one run, cut to `most` tokens with the marker counted, and their lengths."""
    extra = 0 if marker is None else 1
    given = np.array([len(row) for row in rows], dtype=np.int32)
    kept = np.minimum(given, most - extra)
    starts, cu_kept = cumulative(given)[:-1], cumulative(kept)
    place = np.arange(cu_kept[-1], dtype=np.int32) - np.repeat(cu_kept[:-1], kept)  # within the kept row
    dropped, (prefix, suffix) = given - kept, framing.frame
    gap = np.minimum(kept, prefix) if framing.side == "left" else np.maximum(kept - suffix, 0)
    behind = place >= np.repeat(gap, kept)
    source = np.repeat(starts, kept) + place + np.where(behind, np.repeat(dropped, kept), 0)
    text = np.concatenate(rows)[source]
    if marker is None:
        return text, kept
    lengths = kept + 1
    at = cumulative(lengths)[:-1] + np.minimum(kept, 1)
    own = np.ones(len(text) + len(rows), dtype=bool)
    own[at] = False
    flat = np.full(len(own), marker, dtype=np.int32)
    flat[own] = text
    return flat, lengths


def _split(flat: Ints, lengths: Ints) -> list[Ints]:
    return np.split(flat, np.cumsum(lengths)[:-1])

"""Query and document rows of late-interaction models: markers, lengths, query expansion, skip list.

All rows of a call are laid out at once. A marker is inserted after a row's first token. Truncation keeps the
special tokens of a row. A short query is padded with expansion tokens, which count in the score whether or
not they are attended to.
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
from penstock.inputs.truncation import Side, num_longer, truncation_limit
from penstock.types import Ints, cumulative


@dataclass(frozen=True, slots=True, eq=False)
class LateRows:
    """The rows of queries or documents, with the optional arrays of a `Request`."""

    rows: list[Ints]
    key_limits: Ints | None = None  # [rows], number of leading tokens that attention sees; None: all
    token_mask: Ints | None = None  # [tokens], 1 where a token's vector is scored; None: all
    num_truncated: int = 0

    @property
    def token_ids(self) -> Ints:
        return self.rows[0] if len(self.rows) == 1 else np.concatenate(self.rows)

    @property
    def lengths(self) -> Ints:
        return np.array([len(row) for row in self.rows], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Framing:
    """The special tokens of rows, and the side on which long texts are truncated."""

    frame: tuple[int, int]  # leading and trailing special tokens
    side: Side = "right"


@dataclass(frozen=True, slots=True)
class LateLayout:
    """How texts become compared tokens, for callers that label token vectors."""

    query_prompt: str
    document_prompt: str
    query_marker_id: int | None  # inserted after the first token
    document_marker_id: int | None
    query_length: int  # queries are truncated to it
    document_length: int  # documents are truncated to it, or rejected
    expand_to: int  # shorter queries are padded to it; 0: no padding
    expansion_id: int | None
    num_last_tokens: int  # special tokens at the end of a text; truncation keeps them
    skipped_ids: tuple[int, ...]  # tokens whose vectors are left out
    skips_in_queries: bool  # whether queries leave them out too


class LateInputs:
    """Builds the query and document rows of one late-interaction model."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        if spec.late is None:
            raise BadValue(f"model {spec.name} is not a late-interaction model", param="model")
        late = spec.late
        self.spec = spec
        self.late = late
        self.tokenizer = tokenizer
        self._framing = Framing((tokenizer.prefix, tokenizer.suffix))
        # Tokens at the end of a query. Truncation keeps them, like special tokens.
        self.num_end_tokens = len(tokenizer.encode([late.query_end], False)[0]) if late.query_end else 0
        self._query_marker = self._marker(late.query_marker)
        self._document_marker = self._marker(late.document_marker)
        self._expansion = _expansion_id(late, tokenizer) if late.expand_to else None
        self._skip_ids = _skip_ids(late, tokenizer)
        self.query_length = min(late.query_length or spec.max_model_len, spec.max_model_len)
        self.expand_to = min(late.expand_to or 0, self.query_length)

    @property
    def layout(self) -> LateLayout:
        return LateLayout(
            query_prompt=self.prompt("query"),
            document_prompt=self.prompt("document"),
            query_marker_id=self._query_marker,
            document_marker_id=self._document_marker,
            query_length=self.query_length,
            document_length=self.document_limit(None) or self.spec.max_model_len,
            expand_to=self.expand_to,
            expansion_id=self._expansion,
            num_last_tokens=self.tokenizer.suffix,
            skipped_ids=tuple(self._skip_ids.tolist()),
            skips_in_queries=self.late.skip_queries,
        )

    def queries(self, texts: Sequence[str]) -> LateRows:
        texts = self.with_prompt([text + self.late.query_end for text in texts], self.prompt("query"))
        return self.query_rows(self.tokenizer.encode(texts))

    def documents(self, texts: Sequence[str], truncate_prompt_tokens: int | None = None) -> LateRows:
        """Rows truncated to `truncate_prompt_tokens` (-1: the model's limit).

        The default is the model's document length.
        """
        texts = self.with_prompt(texts, self.prompt("document"))
        return self.document_rows(self.tokenizer.encode(texts), truncate_prompt_tokens)

    def prompt(self, kind: Literal["query", "document"]) -> str:
        """The prompt of queries or documents from the model's prompt table."""
        return choose_prompt(self.spec, input_type=kind)

    def with_prompt(self, texts: Sequence[str], prompt: str) -> list[str]:
        """The texts to tokenise."""
        if not self.late.strip:
            return [prompt + text for text in texts]
        return [(prompt + text).strip() for text in texts]

    def query_rows(self, rows: list[Ints], framing: Framing | None = None) -> LateRows:
        """Query rows from tokenised texts."""
        framing = framing or self._framing
        if self.num_end_tokens:
            prefix, suffix = framing.frame
            framing = Framing((prefix, suffix + self.num_end_tokens), framing.side)
        flat, text_lengths = _mark_rows(rows, self._query_marker, self.query_length, framing)
        lengths = np.maximum(text_lengths, self.expand_to)
        if self._expansion is not None:
            position = np.arange(lengths.sum()) - np.repeat(cumulative(lengths)[:-1], lengths)
            expanded = np.full(len(position), self._expansion, dtype=np.int32)
            expanded[position < np.repeat(text_lengths, lengths)] = flat
            flat = expanded
        num_truncated = num_longer(rows, self.query_length - (self._query_marker is not None))
        has_limits = not self.late.attend and bool((text_lengths < lengths).any())
        token_mask = self._token_mask(flat) if self.late.skip_queries else None
        limits = text_lengths if has_limits else None
        return LateRows(_split(flat, lengths), limits, token_mask, num_truncated)

    def document_rows(
        self, rows: list[Ints], truncate_prompt_tokens: int | None = None, framing: Framing | None = None
    ) -> LateRows:
        """Document rows from tokenised texts."""
        max_length = self.document_limit(truncate_prompt_tokens)
        if max_length is None:
            self._reject_long(rows)
        flat, lengths = _mark_rows(
            rows, self._document_marker, max_length or self.spec.max_model_len, framing or self._framing
        )
        room = None if max_length is None else max_length - (self._document_marker is not None)
        return LateRows(_split(flat, lengths), None, self._token_mask(flat), num_longer(rows, room))

    def document_limit(self, truncate_prompt_tokens: int | None) -> int | None:
        """The length that documents are truncated to. None means that longer documents are rejected."""
        max_length = truncation_limit(truncate_prompt_tokens, self.spec.max_model_len)
        if max_length is None and self.late.document_length is not None:
            return min(self.late.document_length, self.spec.max_model_len)
        return max_length

    def _token_mask(self, flat: Ints) -> Ints | None:
        """1 for tokens that are not in the skip list; None if no token is in it."""
        if not len(self._skip_ids):
            return None
        is_skipped = np.isin(flat, self._skip_ids)
        return (~is_skipped).astype(np.int32) if is_skipped.any() else None

    def _reject_long(self, rows: list[Ints]) -> None:
        """Reject long documents: without a document length in the files, truncation must be requested."""
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
        token_id = self.tokenizer.token_id(token)
        if token_id is None or token_id >= self.spec.vocab_size:
            raise ModelLoadError(
                f"{self.spec.folder}: the marker {token!r} is not a token of the model; name one that is in "
                "its files",
                param="model",
            )
        return token_id


def _expansion_id(late: LateSpec, tokenizer: Tokenizer) -> int:
    token_id = None if late.expansion_token is None else tokenizer.token_id(late.expansion_token)
    if token_id is None:
        token = late.expansion_token or "a mask token"
        raise ModelLoadError(
            f"the model expands queries with {token}, but its tokenizer has no such token", param="model"
        )
    return token_id


def _skip_ids(late: LateSpec, tokenizer: Tokenizer) -> Ints:
    """The token ids of the skip list.

    Words that are not tokens become the unknown token, as in the original implementation.
    """
    unknown = None if late.unknown_token is None else tokenizer.token_id(late.unknown_token)
    ids = (tokenizer.token_id(word) for word in late.skip_words)
    known = {unknown if token_id is None else token_id for token_id in ids}
    return np.array(sorted(token_id for token_id in known if token_id is not None), dtype=np.int32)


def _mark_rows(rows: list[Ints], marker: int | None, max_length: int, framing: Framing) -> tuple[Ints, Ints]:
    """Concatenate rows, each with the marker and truncated to `max_length` tokens; also return lengths."""
    num_markers = 0 if marker is None else 1
    old = np.array([len(row) for row in rows], dtype=np.int32)
    new = np.minimum(old, max_length - num_markers)
    starts, cu_new = cumulative(old)[:-1], cumulative(new)
    position = np.arange(cu_new[-1], dtype=np.int32) - np.repeat(cu_new[:-1], new)  # within the truncated row
    num_dropped, (prefix, suffix) = old - new, framing.frame
    cut_at = np.minimum(new, prefix) if framing.side == "left" else np.maximum(new - suffix, 0)
    is_after_cut = position >= np.repeat(cut_at, new)
    source = np.repeat(starts, new) + position + np.where(is_after_cut, np.repeat(num_dropped, new), 0)
    text = np.concatenate(rows)[source]
    if marker is None:
        return text, new
    lengths = new + 1
    marker_at = cumulative(lengths)[:-1] + np.minimum(new, 1)
    is_text = np.ones(len(text) + len(rows), dtype=bool)
    is_text[marker_at] = False
    flat = np.full(len(is_text), marker, dtype=np.int32)
    flat[is_text] = text
    return flat, lengths


def _split(flat: Ints, lengths: Ints) -> list[Ints]:
    return np.split(flat, np.cumsum(lengths)[:-1])

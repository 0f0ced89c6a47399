"""Rows of models that find entities of given labels (GLiNER): labels, a separator, the words of the text.

A mask marks the tokens of labels and of words. The text is split into words in the same way as in GLiNER.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from penstock.checkpoint.gliner import EntitySpec
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import BadValue, ModelLoadError
from penstock.inputs.long_texts import check_expanded, check_request_tokens
from penstock.inputs.tokenizer import EncodedWords, Tokenizer
from penstock.inputs.truncation import truncation_limit
from penstock.types import LABEL_MARK, TEXT_MARK, Ints, PoolingParams, Request, Task

MAX_LABELS = 1024
MAX_WORD_CHARS = 1 << 14
_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")
_FIRST_ADDED = "[FLERT]"  # GLiNER adds this token to the vocabulary before its two markers


@dataclass(frozen=True, slots=True, eq=False)
class TextWords:
    """The words of a request's texts, text by text."""

    texts: list[str]
    counts: Ints  # [texts], number of words
    chars: Ints  # [words, 2], characters within the word's text


@dataclass(frozen=True, slots=True)
class LabelledOptions:
    truncate_prompt_tokens: int | None = None  # -1: truncate to the model's limits
    cache_salt: str = ""
    max_request_tokens: int | None = None  # limit for all rows together; None: no limit


class LabelledInputs:
    def __init__(self, spec: ModelSpec, entities: EntitySpec, tokenizer: Tokenizer) -> None:
        self.entities = entities
        self.tokenizer = tokenizer
        self.max_tokens = spec.max_model_len
        if tokenizer.token_id(entities.label_token) is None:  # it is the encoder's own tokenizer
            tokenizer.add_special_tokens([_FIRST_ADDED, entities.label_token, entities.separator])
        self.label_id = tokenizer.token_id(entities.label_token)
        if (
            entities.label_token_id not in (-1, self.label_id)
            or tokenizer.token_id(entities.separator) is None
        ):
            raise ModelLoadError(
                f"gliner_config.json has class_token_index = {entities.label_token_id}, but the tokenizer "
                f"gives {entities.label_token} the id {self.label_id}; take both from the same model",
                param="model",
            )

    def prepare(
        self, request_id: str, texts: list[str], labels: Sequence[str], options: LabelledOptions
    ) -> tuple[Request, TextWords]:
        """Prepare one row per text. Blocking."""
        prompt = self._prompt(labels)
        check_expanded(sum(map(len, labels)) * len(texts), "labels")
        limit = truncation_limit(options.truncate_prompt_tokens, self.max_tokens)
        found = [self._words(text, index, truncates=limit is not None) for index, text in enumerate(texts)]
        encoded = self.tokenizer.encode_words([[match[0] for match in row] for row in found])
        opening, closing = self.tokenizer.frame
        fixed = len(opening) + len(prompt.ids) + len(closing)
        check_request_tokens(
            fixed * len(texts) + sum(len(row.ids) for row in encoded), options.max_request_tokens, "labels"
        )
        rows, marks, counts, chars, num_truncated = [], [], [], [], 0
        head_marks = self._label_marks(prompt, len(opening), len(labels))
        for index, (matches, row) in enumerate(zip(found, encoded, strict=True)):
            firsts = _first_tokens(row)
            kept = self._num_kept(row, firsts, fixed, limit, index)
            num_tokens = len(row.ids) if kept == len(firsts) else int(firsts[kept])
            has_more_words = bool(matches) and _WORD.search(texts[index], matches[-1].end()) is not None
            num_truncated += kept < len(firsts) or has_more_words
            text_marks = np.zeros(num_tokens + len(closing), dtype=np.int32)
            text_marks[firsts[:kept]] = TEXT_MARK
            rows += [opening, prompt.ids, row.ids[:num_tokens], closing]
            marks += [head_marks, text_marks]
            counts.append(kept)
            # Words without tokens, such as control characters, are left out.
            words = row.words[firsts[:kept]].tolist()
            chars += [matches[word].span() for word in words]
        lengths = np.array([fixed - len(closing) + len(part) for part in marks[1::2]], dtype=np.int32)
        request = Request(
            request_id,
            np.concatenate(rows),
            lengths,
            PoolingParams(Task.ENTITIES, num_labels=len(labels)),
            token_mask=np.concatenate(marks),
            cache_salt=options.cache_salt,
            num_truncated=num_truncated,
        )
        return request, TextWords(
            texts, np.array(counts, dtype=np.int32), np.array(chars, dtype=np.int32).reshape(-1, 2)
        )

    def _prompt(self, labels: Sequence[str]) -> EncodedWords:
        marker = self.entities.label_token
        words = [word for label in labels for word in (marker, label)]
        (prompt,) = self.tokenizer.encode_words([[*words, self.entities.separator]])
        if np.count_nonzero(prompt.ids == self.label_id) != len(labels):
            raise BadValue(f"a label contains {marker}, which marks labels; leave it out", param="labels")
        return prompt

    def _label_marks(self, prompt: EncodedWords, begin: int, num_labels: int) -> Ints:
        """The marks of the tokens before the text."""
        marks = np.zeros(begin + len(prompt.ids), dtype=np.int32)
        at = np.flatnonzero(prompt.ids == self.label_id) + begin
        marks[at if self.entities.reads_label_token else at + 1] = LABEL_MARK
        return marks

    def _words(self, text: str, index: int, *, truncates: bool) -> list[re.Match[str]]:
        limit = self.entities.max_words
        found = list(islice(_WORD.finditer(text), limit + 1))
        if len(found) > limit and not truncates:
            raise BadValue(
                f"input {index} has more than {limit} words, which is the model's limit; shorten it or set "
                "truncate_prompt_tokens to -1",
                param="input",
            )
        if any(match.end() - match.start() > MAX_WORD_CHARS for match in found[:limit]):
            raise BadValue(
                f"input {index} has a word of more than {MAX_WORD_CHARS} characters; divide it", param="input"
            )
        return found[:limit]

    def _num_kept(self, row: EncodedWords, firsts: Ints, fixed: int, limit: int | None, index: int) -> int:
        """Number of words of a row that fit. If some do not and truncation is off, the row is rejected."""
        room = (self.max_tokens if limit is None else limit) - fixed
        if len(row.ids) <= room:
            return len(firsts)
        if limit is None or room <= 0:
            raise BadValue(
                f"input {index} with its labels has {fixed + len(row.ids)} tokens, but the model takes at "
                f"most {room + fixed}; shorten it, give fewer labels, or set truncate_prompt_tokens to -1",
                param="input",
            )
        ends = np.append(firsts[1:], len(row.ids))
        return int(np.searchsorted(ends, room, side="right"))


def _first_tokens(row: EncodedWords) -> Ints:
    """The index of the first token of each word."""
    starts = np.ones(len(row.words), dtype=bool)
    starts[1:] = row.words[1:] != row.words[:-1]
    return np.flatnonzero(starts).astype(np.int32)

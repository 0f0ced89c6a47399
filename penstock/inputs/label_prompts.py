"""Rows of models that classify by given labels (GLiClass): labels and text as one string."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.checkpoint.gliclass import ZeroShotSpec
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import BadValue, ModelLoadError
from penstock.inputs.labelled import LabelledOptions
from penstock.inputs.long_texts import ExpandedTexts, RowLimit, check_expanded, check_request_tokens
from penstock.inputs.tokenizer import Tokenizer
from penstock.inputs.truncation import num_longer, truncation_limit
from penstock.types import LABEL_MARK, TEXT_MARK, Ints, PoolingParams, Request, Task


class LabelPrompts:
    def __init__(self, spec: ModelSpec, zero_shot: ZeroShotSpec, tokenizer: Tokenizer) -> None:
        self.zero_shot = zero_shot
        self.tokenizer = tokenizer
        self.max_tokens = spec.max_model_len
        for token, wanted in (
            (zero_shot.label_token, zero_shot.label_token_id),
            (zero_shot.separator, zero_shot.separator_id),
        ):
            if (found := tokenizer.token_id(token)) != wanted:
                raise ModelLoadError(
                    f"config.json gives {token} the id {wanted}, but the tokenizer has {found}; take both "
                    "from the same model",
                    param="model",
                )

    def prepare(
        self, request_id: str, texts: list[str], labels: Sequence[str], options: LabelledOptions
    ) -> Request:
        """Prepare one row per text. Blocking."""
        zero_shot = self.zero_shot
        for index, label in enumerate(labels):
            if zero_shot.label_token in label or zero_shot.separator in label:
                raise BadValue(f"labels {index} contains a marker of the model; leave it out", param="labels")
        prompt = "".join(f"{zero_shot.label_token}{label}" for label in labels) + zero_shot.separator
        check_expanded(len(prompt) * len(texts), "labels")
        limit = truncation_limit(options.truncate_prompt_tokens, self.max_tokens)
        # A row is tokenised whole, so that it has the same tokens as in the reference.
        row_limit = RowLimit(self.max_tokens if limit is None else limit, truncates=False)
        whole = ExpandedTexts(
            lambda index: self._row_text(prompt, texts[index]), [len(prompt) + len(text) for text in texts]
        )
        rows = self.tokenizer.encode(whole, True, row_limit if limit is None else None)
        num_truncated = num_longer(rows, limit)
        if limit is not None:
            rows = [self._cut(row, limit) for row in rows]
        lengths = np.array([len(row) for row in rows], dtype=np.int32)
        check_request_tokens(int(lengths.sum(dtype=np.int64)), options.max_request_tokens, "labels")
        if limit is None:
            row_limit.reject_long(rows, 0)
        marks = [self._marks(row) for row in rows]
        return Request(
            request_id,
            np.concatenate(rows),
            lengths,
            PoolingParams(Task.ZERO_SHOT, num_labels=len(labels)),
            token_mask=np.concatenate(marks),
            cache_salt=options.cache_salt,
            num_truncated=num_truncated,
        )

    def _row_text(self, prompt: str, text: str) -> str:
        """Join labels and text in the model's order. Markers in the text would be labels: remove them."""
        text = text.replace(self.zero_shot.label_token, "").replace(self.zero_shot.separator, "")
        return prompt + text if self.zero_shot.is_prompt_first else text + prompt

    def _cut(self, row: Ints, limit: int) -> Ints:
        """Remove tokens at the end of the text, so that the row has at most `limit` tokens."""
        if (surplus := len(row) - limit) <= 0:
            return row
        first, end = self.tokenizer.prefix, len(row) - self.tokenizer.suffix
        if self.zero_shot.is_prompt_first:
            first = int(np.argmax(row == self.zero_shot.separator_id)) + 1
        else:
            end = int(np.argmax(row == self.zero_shot.label_token_id))
        if end - surplus <= first:
            raise BadValue(
                f"the labels take {len(row) - (end - first)} of {limit} tokens and leave no room for the "
                "text; give fewer or shorter labels",
                param="labels",
            )
        return np.concatenate([row[: end - surplus], row[end:]])

    def _marks(self, row: Ints) -> Ints:
        zero_shot, marks = self.zero_shot, np.zeros(len(row), dtype=np.int32)
        first = int(np.argmax(row == zero_shot.separator_id)) if zero_shot.reads_text_only else 0
        if zero_shot.pooling == "first":
            marks[first] = TEXT_MARK
        elif zero_shot.pooling == "last":
            marks[-1] = TEXT_MARK
        else:
            marks[first:] = TEXT_MARK
        at = np.flatnonzero(row == zero_shot.label_token_id)
        marks[at if zero_shot.reads_label_token else at + 1] |= LABEL_MARK
        return marks

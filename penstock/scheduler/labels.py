"""Plans rows with labels in their prompt: which tokens represent labels, and which words of the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.scheduler.ragged import tokens_of
from penstock.types import (
    LABEL_MARK,
    TEXT_MARK,
    Ints,
    LabelPlan,
    PoolingParams,
    RowSlice,
    Variant,
    cumulative,
)


def label_variant(
    params: PoolingParams, rows: Ints, slices: Sequence[RowSlice], lengths: Ints, cu_lengths: Ints
) -> Variant:
    """The variant of all rows of a step with these parameters, in the order of the slices. Rows are never
    chunked here: no model with labels in its prompt is causal."""
    tokens = tokens_of(rows, lengths, cu_lengths)
    marks = np.concatenate([_marks(each) for each in slices if params in each.request.all_params])
    row_of = np.repeat(np.arange(len(rows), dtype=np.int32), lengths[rows])
    words = np.flatnonzero(marks & TEXT_MARK).astype(np.int32)
    num_words = np.bincount(row_of[words], minlength=len(rows)).astype(np.int32)
    max_words = max(1, int(num_words.max()))
    within = np.arange(len(words), dtype=np.int32) - np.repeat(cumulative(num_words)[:-1], num_words)
    plan = LabelPlan(
        label_tokens=tokens[(marks & LABEL_MARK) != 0],
        word_tokens=tokens[words],
        word_slots=row_of[words] * np.int32(max_words) + within,
        output_rows=words,
        num_words=num_words,
        num_labels=params.num_labels,
        max_words=max_words,
        num_tokens=len(tokens),
    )
    if len(plan.label_tokens) != len(rows) * params.num_labels:
        raise ValueError(f"the rows have {len(plan.label_tokens)} labels, not {params.num_labels} each")
    return Variant(params, rows, tokens if params.reads_tokens else None, labels=plan)


def _marks(row_slice: RowSlice) -> Ints:
    request = row_slice.request
    if request.token_mask is None:
        raise ValueError("a request with labels needs a token mask")
    return request.token_mask[tokens_of(row_slice.rows, request.lengths, request.starts)]

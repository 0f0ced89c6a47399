"""Classification for every dialect that has it."""

from __future__ import annotations

from typing import Any

from penstock.inputs.long_texts import MAX_REQUEST_TOKENS
from penstock.inputs.pair_options import are_pairs
from penstock.inputs.processor import InputOptions
from penstock.tasks.classify import Classify, ClassifyPairs
from penstock.types import PoolingParams


def classifier_task(inputs: Any, params: PoolingParams, options: InputOptions) -> Classify | ClassifyPairs:
    """Classify texts, token ids, or pairs of texts that the model reads together."""
    if are_pairs(inputs):
        return ClassifyPairs(
            pairs=inputs,
            params=params,
            options=options,
            max_request_tokens=MAX_REQUEST_TOKENS,
        )
    return Classify(inputs=inputs, params=params, options=options)

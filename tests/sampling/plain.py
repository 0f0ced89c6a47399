"""A reference sampler: a second implementation in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.types import SamplerParams

Floats = NDArray[np.float64]


def edited(logits: Floats, params: SamplerParams, prompt: list[int], output: list[int]) -> Floats:
    x = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        x[[token for token in range(len(x)) if token not in params.allowed_token_ids]] = -np.inf
    for word in params.bad_token_ids:
        if len(word) == 1 or tuple(output[-(len(word) - 1) :]) == word[:-1]:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[list({*params.stop_token_ids, *params.eos_token_ids})] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


def distribution(logits: Floats, params: SamplerParams, prompt: list[int], output: list[int]) -> Floats:
    """The distribution of the next token, [vocab]. All logits must differ."""
    x = edited(logits, params, prompt, output)
    if params.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    falling = np.argsort(-p)
    if params.top_k > 0:
        p[falling[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[falling]) - p[falling]
    if params.top_p < 1:
        p[falling[(before >= params.top_p) & (np.arange(len(p)) > 0)]] = 0
    return p / p.sum()

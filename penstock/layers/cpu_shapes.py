"""The few numbers of tokens that products on a CPU are padded to.

The matrix library generates code for every shape of product, which takes 0.3 ms and 0.5 MB, and caches it.
With these sizes all shapes of a model fit in its cache, so memory has a ceiling and steps find their code.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from penstock.types import LengthGroup

MAX_EXACT_TOKENS = 64

_OptionalTensor = TypeVar("_OptionalTensor", Tensor, Tensor | None)


def padded_size(tokens: int) -> int:
    """The size that a number of tokens is padded to: 192 sizes up to 1,024, and 32 more for each doubling.

    A product's time is proportional to its tokens, so sizes are close: padding adds at most 3 %, and up to 64
    tokens nothing.
    """
    if tokens <= MAX_EXACT_TOKENS:
        return tokens
    step = 1 << (tokens - 1).bit_length() - 6
    return -(-tokens // step) * step


def pad_rows(x: _OptionalTensor, size: int) -> _OptionalTensor:
    """`x` [rows, …] padded with zeros to `size` rows."""
    if x is None or len(x) == size:
        return x
    out = x.new_empty((size, *x.shape[1:]))
    out[: len(x)] = x
    out[len(x) :] = 0
    return out


def zero_padding(out: Tensor, groups: tuple[LengthGroup, ...]) -> Tensor:
    """Zero the rows of `out` [tokens, …] behind the last group, in place: padding tokens belong to no group,
    and what they hold must be finite."""
    end = 0
    if groups:
        end = groups[-1].first_token + groups[-1].num_rows * groups[-1].length
    if end < len(out):
        out[end:] = 0
    return out


def pads_steps(device: torch.device) -> bool:
    """Whether the device's products are cached by shape."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available()

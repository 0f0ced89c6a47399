"""Padding of products on a CPU to a few numbers of tokens.

The matrix library generates code for every shape of product, which takes 0.3 ms and 0.5 MB, and caches it.
With few sizes, all shapes of a model fit in its cache, so memory is bounded and steps reuse generated code.
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

    The time of a product is proportional to its tokens, so the sizes are close together. Padding adds at most
    3 %, and nothing up to 64 tokens.
    """
    if tokens <= MAX_EXACT_TOKENS:
        return tokens
    step = 1 << (tokens - 1).bit_length() - 6
    return -(-tokens // step) * step


def pad_rows(x: _OptionalTensor, size: int) -> _OptionalTensor:
    """Pad `x` [rows, …] with zeros to `size` rows."""
    if x is None or len(x) == size:
        return x
    out = x.new_empty((size, *x.shape[1:]))
    out[: len(x)] = x
    out[len(x) :] = 0
    return out


def zero_padding(out: Tensor, groups: tuple[LengthGroup, ...]) -> Tensor:
    """Zero the rows of `out` [tokens, …] after the last group, in place.

    These are padding tokens, whose values must be finite.
    """
    end = 0
    if groups:
        end = groups[-1].first_token + groups[-1].num_rows * groups[-1].length
    if end < len(out):
        out[end:] = 0
    return out


def pads_steps(device: torch.device) -> bool:
    """Whether steps are padded, because the device's products are cached by shape."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available()

"""Rotary position embeddings for a flat run of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.layers.batch import Batch


class Rotary:
    """Turns pairs of components (i, i + half) by an angle that grows with the position.

    `size` components of each head are turned, the rest stay as they are. With `interleaved` the pairs
    are (2i, 2i + 1).
    """

    def __init__(
        self,
        size: int,
        limit: int,
        base: float,
        *,
        device: torch.device,
        dtype: torch.dtype,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
    ) -> None:
        self.size = size
        self.interleaved = interleaved
        frequencies, magnitude = _frequencies(size, base, scaling or {}, limit)
        angles = torch.arange(limit, dtype=torch.float32)[:, None] * frequencies[None, :]  # [limit, size / 2]
        self.cos = (angles.cos() * magnitude).to(device=device, dtype=dtype)
        self.sin = (angles.sin() * magnitude).to(device=device, dtype=dtype)

    def angles(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(cos, sin) of every token, [tokens, 1, size / 2]; shared by all layers of a step."""
        return (
            self.cos.index_select(0, batch.positions)[:, None],
            self.sin.index_select(0, batch.positions)[:, None],
        )

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [tokens, heads, dim], turned."""
        cos, sin = angles
        turned = x[..., : self.size]
        if self.interleaved:
            even, odd = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
        else:
            low, high = turned.chunk(2, dim=-1)
            out = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        return out if self.size == x.shape[-1] else torch.cat((out, x[..., self.size :]), dim=-1)


def _frequencies(size: int, base: float, scaling: Mapping[str, Any], limit: int) -> tuple[Tensor, float]:
    """Angle per position for each pair, and the factor on cos and sin."""
    plain = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", None):
        return plain, 1.0
    if kind == "linear":
        return plain / float(scaling["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "yarn":
        return _yarn(plain, size, base, scaling)
    if kind == "dynamic":
        return plain, 1.0  # differs from plain only beyond the trained length, which is the limit here
    raise ModelLoadError(
        f"rope type {kind!r} is not supported; known: default, linear, llama3, yarn, dynamic"
    )


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Low frequencies are divided by the factor, high ones stay, those between are blended."""
    factor, trained = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = trained * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / factor + blend * plain


def _yarn(plain: Tensor, size: int, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    factor = float(scaling["factor"])
    trained = float(scaling["original_max_position_embeddings"])

    def pair_of(turns: float) -> float:
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(float(scaling.get("beta_fast", 32)))), 0)
    high = min(math.ceil(pair_of(float(scaling.get("beta_slow", 1)))), size - 1)
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    magnitude = scaling.get("attention_factor") or 0.1 * math.log(factor) + 1.0
    return plain / factor * ramp + plain * (1 - ramp), float(magnitude)

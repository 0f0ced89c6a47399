"""Rotary position embeddings for a ragged batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.kernels.language import use_kernel
from penstock.kernels.rotary import (
    HeadNorms,
    KVCacheWrite,
    rotate_qkv_,
    rotate_qkv_reference,
    rotate_reference,
)
from penstock.layers.batch import Batch
from penstock.layers.norm import RMSNorm


class Rope(NamedTuple):
    """The mapping of positions to angles: the base of the wavelengths, and their scaling."""

    base: float
    scaling: Mapping[str, Any]  # config.json's `rope_scaling` or `rope_parameters`


class Angles(NamedTuple):
    """cos and sin for the tokens of a step.

    Either they are gathered to [tokens, 1, size / 2] in the model's dtype, or they are the whole fp32 tables
    [positions, size / 2], which the kernel indexes itself.
    """

    positions: Tensor  # int32 [tokens]
    cos: Tensor
    sin: Tensor
    gathered: bool = True


class Rotary:
    """Rotates pairs of components (i, i + half) by an angle that grows with the position.

    The first `size` components of each head are rotated. With `interleaved`, the pairs are (2i, 2i + 1).
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
        self.dtype = dtype
        frequencies, magnitude = _frequencies(size, base, scaling or {}, limit)
        angles = torch.arange(limit, dtype=torch.float32)[:, None] * frequencies[None, :]  # [limit, size / 2]
        self.cos = (angles.cos() * magnitude).to(device)
        self.sin = (angles.sin() * magnitude).to(device)

    def angles(self, batch: Batch) -> Angles:
        """The angles of every token, which all layers of a step share."""
        return self.angles_at(batch.positions)

    def angles_at(self, positions: Tensor) -> Angles:
        if use_kernel(self.cos):
            return Angles(positions, self.cos, self.sin, gathered=False)
        cos, sin = (x.index_select(0, positions)[:, None].to(self.dtype) for x in (self.cos, self.sin))
        return Angles(positions, cos, sin)

    def rotate_qkv(
        self,
        qkv: Tensor,
        heads: int,
        angles: Angles,
        kv_heads: int | None = None,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
        keep: KVCacheWrite | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated query and key, and the value, each [tokens, heads, dim].

        May overwrite qkv [tokens, all heads · dim]. `norms`, for queries and for keys, are applied first.
        `keep` has an effect only if `can_write_cache` is true.
        """
        sizes = (heads, kv_heads or heads)
        parts = qkv.view(qkv.shape[0], sizes[0] + 2 * sizes[1], -1)
        assert norms is None or norms[0].eps == norms[1].eps  # the kernel takes one
        weights = None if norms is None else HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps)
        if angles.gathered:
            return rotate_qkv_reference(
                parts,
                sizes,
                angles.cos,
                angles.sin,
                size=self.size,
                interleaved=self.interleaved,
                norms=weights,
            )
        return rotate_qkv_(
            parts,
            sizes,
            angles.positions,
            angles.cos,
            angles.sin,
            size=self.size,
            interleaved=self.interleaved,
            norms=weights,
            keep=keep,
        )

    def can_write_cache(self, dim: int) -> bool:
        """Whether the rotation kernel can also write keys and values of this head size to the KV cache."""
        return use_kernel(self.cos) and self.size == dim

    def __call__(self, x: Tensor, angles: Angles) -> Tensor:
        """Rotate x [tokens, heads, dim] by gathered angles."""
        return rotate_reference(x, angles.cos, angles.sin, self.size, self.interleaved)


class NoRotary(Rotary):
    """For layers without positional encoding: the angle of every token is 0."""

    def __init__(self, size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(size, 1, 10_000.0, device=device, dtype=dtype)

    def angles(self, batch: Batch) -> Angles:
        return self.angles_at(torch.zeros_like(batch.positions))


def _frequencies(size: int, base: float, scaling: Mapping[str, Any], limit: int) -> tuple[Tensor, float]:
    """Return the angle per position for each pair, and the factor on cos and sin."""
    plain = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    match _kind(scaling):
        case "default" | "dynamic":  # dynamic differs only beyond the trained length, which is the limit here
            return plain, 1.0
        case "linear":
            return plain / _number(scaling, "factor"), 1.0
        case "llama3":
            return _llama3(plain, scaling, limit), 1.0
        case "ntk":
            return _ntk(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, size, base, scaling, limit)
        case kind:
            raise ModelLoadError(
                f"rope type {kind!r} is not supported; supported: default, dynamic, linear, llama3, ntk, yarn"
            )


def _llama3(plain: Tensor, scaling: Mapping[str, Any], limit: int) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between them."""
    factor, trained = _number(scaling, "factor"), _trained(scaling, limit)
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = trained * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / factor + blend * plain


def _ntk(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Divide the lowest frequency by the factor, and higher ones by gradually less."""
    share = torch.arange(1, len(plain) + 1, dtype=torch.float32) / len(plain)
    return plain / _number(scaling, "factor") ** share ** float(scaling.get("mixed_b") or 1)


def _yarn(
    plain: Tensor, size: int, base: float, scaling: Mapping[str, Any], limit: int
) -> tuple[Tensor, float]:
    """Keep pairs that rotate often within the trained length, and divide pairs that hardly rotate."""
    trained = _trained(scaling, limit)
    factor = float(scaling.get("factor") or limit / trained)

    def pair_of(turns: float) -> float:
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(scaling.get("beta_fast") or 32), pair_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_magnitude(factor, scaling)


def _yarn_magnitude(factor: float, scaling: Mapping[str, Any]) -> float:
    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1.0)


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _trained(scaling: Mapping[str, Any], limit: int) -> float:
    """The length that the model was trained with before its positions were scaled."""
    return float(scaling.get("original_max_position_embeddings") or limit)


def _number(scaling: Mapping[str, Any], name: str) -> float:
    if not isinstance(scaling.get(name), int | float):
        raise ModelLoadError(f"rope type {_kind(scaling)!r} needs a number {name!r} in config.json")
    return float(scaling[name])

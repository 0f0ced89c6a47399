"""Rotary embedding along several axes: M-RoPE of decoders that read images, and the axial form of vision
towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.kernels.language import use_kernel
from penstock.layers.batch import Batch
from penstock.layers.rotary import Angles, Rotary

NUM_AXES = 3  # time, down, across


class SectionedRotary(Rotary):
    """M-RoPE: each pair of components rotates with the position along one of three axes.

    A text token has the same position on all axes, so a step with only text runs as in `Rotary`.
    """

    def __init__(
        self,
        size: int,
        limit: int,
        base: float,
        axes: Sequence[int],  # axis of each pair
        *,
        device: torch.device,
        dtype: torch.dtype,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(size, limit, base, device=device, dtype=dtype, scaling=scaling)
        self.axes = torch.tensor(axes, dtype=torch.int64, device=device)  # [size / 2]
        self.pairs = torch.arange(len(axes), device=device)

    def angles(self, batch: Batch) -> Angles:
        if batch.rope_positions is None:
            return super().angles(batch)
        at = batch.rope_positions.index_select(0, self.axes).t() * len(self.pairs) + self.pairs
        return angles_of_tokens(self.cos.take(at), self.sin.take(at), self.dtype)


class AxialRotary(Rotary):
    """The rotation of a vision tower: half of the pairs rotate with a patch's row, half with its column."""

    def __init__(self, size: int, base: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(size, 1, base, device=device, dtype=dtype)
        exponents = torch.arange(0, size // 2, 2, dtype=torch.float32) / (size // 2)
        self.frequencies = (1.0 / base**exponents).to(device)  # [size / 4]

    def angles_of(self, coordinates: Tensor) -> Angles:
        """Compute the angles of `coordinates`, int [patches, 2], without a table: sides are unlimited."""
        angles = (coordinates[:, :, None] * self.frequencies).flatten(1)  # [patches, size / 2]
        return angles_of_tokens(angles.cos(), angles.sin(), self.dtype)


def angles_of_tokens(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Angles:
    """Make angles from fp32 tables [tokens, size / 2] with one entry for each token of the step."""
    if use_kernel(cos):
        return Angles(torch.arange(len(cos), dtype=torch.int32, device=cos.device), cos, sin, gathered=False)
    return Angles(torch.empty(0), cos[:, None].to(dtype), sin[:, None].to(dtype))


def pair_axes(rope: Mapping[str, Any], num_pairs: int, *, is_interleaved: bool) -> tuple[int, ...]:
    """The axis of each pair.

    Pairs form blocks of `mrope_section` pairs. With `is_interleaved`, each group of three pairs has one pair
    down and one across, as far as their sections reach; all others are in time.
    """
    sections = rope.get("mrope_section")
    if not isinstance(sections, list) or len(sections) != NUM_AXES or not all(map(_is_count, sections)):
        raise ModelLoadError(
            f"mrope_section in config.json is {sections!r}; it has to be {NUM_AXES} numbers of pairs"
        )
    if sum(sections) != num_pairs:
        raise ModelLoadError(
            f"mrope_section in config.json is {sections}; its sum has to be half of the head size, "
            f"{num_pairs}"
        )
    if rope.get("mrope_interleaved", is_interleaved) is not is_interleaved:
        raise ModelLoadError(
            f"config.json has mrope_interleaved = {rope['mrope_interleaved']!r}, which is not supported; "
            f"supported: {is_interleaved}"
        )
    if not is_interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    if 3 * max(sections[1:]) > num_pairs:
        raise ModelLoadError(
            f"mrope_section in config.json is {sections}; interleaved, no axis of space has more than "
            f"a third of the {num_pairs} pairs"
        )
    axes = [0] * num_pairs
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    return tuple(axes)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

"""Buffers and values that the layers of one step share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from penstock.layers.attention import AttentionKind


class QKVViews(NamedTuple):
    """Views of the scratch buffer that each layer writes its queries, keys and values to."""

    qkv: Tensor
    num_heads: int
    query: Tensor
    key: Tensor
    value: Tensor


class AttentionRoute(NamedTuple):
    """Which leading rows of a step each kernel computes; the library computes the others."""

    short: Tensor | None  # cumulative lengths of the rows for `short_attention`
    max_short_length: int
    flash: Tensor | None  # cumulative lengths of the next rows, for `flash_attention`
    max_flash_length: int
    num_rows: int  # rows of both kernels


class RepeatedLaunch(NamedTuple):
    """A launch that the next layer repeats unchanged, because its QKV is in the same buffer."""

    query: Tensor
    kind: AttentionKind
    out: Tensor
    launch: Callable[[], Any]


@dataclass(slots=True, eq=False)
class StepScratch:
    buffers: dict[tuple[int, ...], tuple[Tensor | None, ...]] = field(default_factory=dict)  # key: widths
    qkv_views: QKVViews | None = None
    routes: dict[tuple[bool, int], AttentionRoute] = field(default_factory=dict)
    repeated: RepeatedLaunch | None = None

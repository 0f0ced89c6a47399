"""The geometry of image patches: coordinates, windows and interpolated positions, in NumPy.

Patches are in the order of the tower: the patches of a merged token are consecutive, and tokens follow row by
row. Nothing here loops over images.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.types import Ints, LengthGroup, cumulative, ragged_arange


def coordinates(grids: Ints, merge: int = 1) -> Ints:
    """[patches, 2], the row and column of every patch. `grids` [images, 2] are patches down and across.
    Patches are ordered in blocks of `merge` · `merge` patches."""
    counts = grids[:, 0] * grids[:, 1]
    within = ragged_arange(np.zeros_like(counts), counts, cumulative(counts))
    blocks_across = np.repeat(grids[:, 1] // merge, counts)
    block, inside = within // (merge * merge), within % (merge * merge)
    row = (block // blocks_across) * merge + inside // merge
    column = (block % blocks_across) * merge + inside % merge
    return np.stack((row, column), axis=1)


class Windows(NamedTuple):
    """The order of tokens by window. Windows of an image stay together, the smallest first."""

    order: Ints  # [tokens], the token at each place
    inverse: Ints  # [tokens], the place of each token


def windows(grids: Ints, side: int) -> Windows:
    """Divide images of `grids` [images, 2] tokens into windows of `side` · `side` tokens, cut at edges."""
    counts, (ranked, _, num_windows) = grids[:, 0] * grids[:, 1], _ranked_windows(grids, side)
    place = coordinates(grids) // side
    first_window = np.repeat(cumulative(num_windows)[:-1], counts)
    across = np.repeat(-(-grids[:, 1] // side), counts)
    window = first_window + place[:, 0] * across + place[:, 1]
    order = np.argsort(_inverse(ranked)[window], kind="stable").astype(np.int32)
    return Windows(order, _inverse(order))


def window_lengths(grids: Ints, side: int) -> Ints:
    """[windows], the number of tokens of each window, in the order of `windows`."""
    ranked, sizes, _ = _ranked_windows(grids, side)
    return sizes[ranked]


def _ranked_windows(grids: Ints, side: int) -> tuple[Ints, Ints, Ints]:
    """The windows of each image from the smallest to the largest; the number of tokens of each window; the
    number of windows of each image."""
    across = -(-grids[:, 1] // side)
    num_windows = -(-grids[:, 0] // side) * across
    number = ragged_arange(np.zeros_like(num_windows), num_windows, cumulative(num_windows))
    image = np.repeat(np.arange(len(grids), dtype=np.int32), num_windows)
    place = np.stack((number // across[image], number % across[image]), axis=1)
    sizes = np.minimum(grids[image] - place * side, side).prod(axis=1, dtype=np.int32)
    return np.lexsort((sizes, image)).astype(np.int32), sizes, num_windows


def _inverse(order: Ints) -> Ints:
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order), dtype=np.int32)
    return inverse


def length_groups(lengths: Ints) -> tuple[LengthGroup, ...]:
    """Runs of rows of equal length."""
    if not len(lengths):
        return ()
    firsts = [0, *(np.flatnonzero(lengths[1:] != lengths[:-1]) + 1).tolist(), len(lengths)]
    starts = cumulative(lengths)
    return tuple(
        LengthGroup(first, end - first, int(lengths[first]), int(starts[first]), 0, int(starts[first]))
        for first, end in pairwise(firsts)
    )


class Interpolation(NamedTuple):
    """The entries of a square table that are mixed into each patch's position embedding."""

    entries: Ints  # [patches, 4]
    weights: NDArray[np.float32]  # [patches, 4]


def interpolate(grids: Ints, places: Ints, side: int) -> Interpolation:
    """Interpolate bilinearly, with aligned corners, in a table of `side` · `side` entries. `places` are the
    `coordinates` of the patches."""
    sizes = np.repeat(grids, grids[:, 0] * grids[:, 1], axis=0)
    at = places.astype(np.float32) * np.float32(side - 1) / np.maximum(sizes - 1, 1).astype(np.float32)
    low = np.floor(at)
    high_share = at - low  # [patches, 2]
    taps = np.stack((low, np.minimum(low + 1, side - 1)), axis=2).astype(np.int32)  # [patches, 2, 2]
    shares = np.stack((1 - high_share, high_share), axis=2)
    entries = taps[:, 0, :, None] * side + taps[:, 1, None, :]
    weights = shares[:, 0, :, None] * shares[:, 1, None, :]
    return Interpolation(entries.reshape(-1, 4), weights.reshape(-1, 4).astype(np.float32))

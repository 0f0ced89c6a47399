"""Plans the images of a step: which images the vision tower runs, and which features each token reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.image_cache import ImageCache
from penstock.types import ImagePlan, Ints, LengthGroup, Request, RequestImages, cumulative, runs


class PlacedRows(NamedTuple):
    """Rows of one request that run in a step, whole or in part."""

    request: Request
    rows: Ints  # [n]
    begins: Ints  # [n], first token of each row to run
    ends: Ints  # [n]
    step_tokens: Ints  # [n], index of that token in the step


class _Run(NamedTuple):
    """An image that the tower runs."""

    patches: NDArray[np.uint8]
    grid: Ints
    slots: Ints
    key: bytes


def image_plan(
    placed: Sequence[PlacedRows], cache: ImageCache, num_text_rows: int | None = None
) -> ImagePlan | None:
    """Plan the images with a token in these rows; None if there is none. Each image runs once, even if it is
    in several rows, and not at all if its features are cached."""
    number = cache.begin_step()
    chosen: dict[bytes, _Run] = {}
    used: set[bytes] = set()
    tokens: list[Ints] = []
    read_slots: list[Ints] = []
    for part in placed:
        images = part.request.images
        if images is None:
            continue
        indices, row_indices = images.of_rows(part.rows)
        starts, counts = images.starts[indices], images.num_tokens[indices]
        begins, ends = part.begins[row_indices], part.ends[row_indices]
        first, stop = np.maximum(starts, begins), np.minimum(starts + counts, ends)
        runs_now = np.flatnonzero(first < stop)
        if not len(runs_now):
            continue
        tokens.append(
            runs((part.step_tokens[row_indices] + first - begins)[runs_now], (stop - first)[runs_now])
        )
        for at in runs_now.tolist():
            image, start = int(indices[at]), int(starts[at])
            key = image_key(images, image, part.request.cache_salt)
            slots, is_ready = cache.place(key, int(counts[at]), used)
            used.add(key)
            if not is_ready and key not in chosen:
                patches = images.patches[images.cu_patches[image] : images.cu_patches[image + 1]]
                chosen[key] = _Run(patches, images.grids[image], slots, key)
            read_slots.append(slots[int(first[at]) - start : int(stop[at]) - start])
    if not tokens:
        return None
    flat, slots = np.concatenate(tokens), np.concatenate(read_slots)
    if (flat[1:] < flat[:-1]).any():
        order = np.argsort(flat)
        flat, slots = flat[order], slots[order]
    ordered = sorted(chosen.values(), key=lambda run: len(run.patches))
    counts = np.array([len(run.patches) for run in ordered], dtype=np.int32)
    return ImagePlan(
        patches=tuple(run.patches for run in ordered),
        grids=np.array([run.grid for run in ordered], dtype=np.int32).reshape(-1, 2),
        cu_patches=cumulative(counts),
        groups=patch_groups(counts),
        write_slots=np.concatenate([run.slots for run in ordered]) if ordered else _NONE,
        tokens=flat,
        read_slots=slots,
        keys=tuple(run.key for run in ordered),
        number=number,
        num_text_rows=num_text_rows,
    )


_NONE: Ints = np.zeros(0, dtype=np.int32)


def image_key(images: RequestImages, image: int, salt: str) -> bytes:
    """The cache key of an image: its digest and the cache salt, which separates tenants."""
    digest: bytes = images.digests[image].tobytes()
    return digest + salt.encode()


def patch_groups(counts: Ints) -> tuple[LengthGroup, ...]:
    """Group consecutive images with equal numbers of patches."""
    if not len(counts):
        return ()
    firsts = np.flatnonzero(np.diff(counts, prepend=-1))
    sizes = np.diff(firsts, append=len(counts))
    starts = cumulative(counts)[firsts]
    return tuple(
        LengthGroup(first, size, int(counts[first]), start, first_key=start)
        for first, size, start in zip(firsts.tolist(), sizes.tolist(), starts.tolist(), strict=True)
    )

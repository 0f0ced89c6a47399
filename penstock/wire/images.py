"""Encoding of a request's images: integers, sent beside those of the request, and patches as raw bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.types import Ints, Request, RequestImages

INTS_PER_IMAGE = 9  # grid (2), row, start, number of tokens, digest (4)
DIGEST_BYTES = 16


def image_integers(images: RequestImages) -> list[Ints]:
    digests = np.ascontiguousarray(images.digests).view(np.int32)
    return [images.grids.reshape(-1), images.rows, images.starts, images.num_tokens, digests.reshape(-1)]


def read_images(ints: Ints, patches: Any, values_per_patch: int, *, are_rows: bool) -> RequestImages:
    """Decode images from the integers of `image_integers`. `patches` is a buffer of bytes."""
    count = len(ints) // INTS_PER_IMAGE
    if values_per_patch < 1:
        raise ValueError("patches have no values")
    return RequestImages(
        np.frombuffer(patches, dtype=np.uint8).reshape(-1, values_per_patch),
        ints[: 2 * count].reshape(-1, 2),
        ints[2 * count : 3 * count],
        ints[3 * count : 4 * count],
        ints[4 * count : 5 * count],
        ints[5 * count : INTS_PER_IMAGE * count].view(np.uint8).reshape(-1, DIGEST_BYTES),
        are_rows,
    )


def check_images(request: Request, images: RequestImages) -> None:
    """Raise `ValueError` if the images do not match the rows of the request or their own patches."""
    if not images.num_images:
        raise ValueError("a request with images has none")
    if int(images.grids.min()) < 1 or int(images.grids.max()) >= 1 << 15:
        raise ValueError("an image has no patches, or too many")
    if int(images.num_patches.astype(np.int64).sum()) != len(images.patches):
        raise ValueError("the grids of its images do not add up to their patches")
    rows = images.rows
    if int(rows.min()) < 0 or int(rows.max()) >= request.num_rows or (rows[1:] < rows[:-1]).any():
        raise ValueError("its images are in rows that it does not have, or not in the order of rows")
    ends = images.starts + images.num_tokens
    same_row = rows[1:] == rows[:-1]
    if (
        int(images.starts.min()) < 0
        or int(images.num_tokens.min()) < 1
        or (ends > request.lengths[rows]).any()
        or (images.starts[1:][same_row] < ends[:-1][same_row]).any()
    ):
        raise ValueError("the tokens of its images are not in their rows, or overlap")

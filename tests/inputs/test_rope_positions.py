"""Positions in time, down and across equal those of transformers' Qwen-VL models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from penstock.inputs.images.positions import rope_delta, rope_positions
from penstock.types import Ints, cumulative

IMAGE, TEXT = 7, 3
# For each row: its length, and for each image the first token and the number of tokens down and across.
ROWS: list[tuple[int, list[tuple[int, int, int]]]] = [
    (9, []),
    (14, [(3, 2, 4)]),
    (40, [(0, 3, 2), (7, 1, 5), (13, 4, 4)]),
    (6, [(0, 2, 3)]),
    (5, []),
    (12, [(2, 1, 1), (4, 3, 1), (10, 1, 2)]),
]


@pytest.fixture(scope="module", params=["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def model(request: pytest.FixtureRequest) -> Any:
    config = getattr(transformers, f"{request.param}Config")()
    with torch.device("meta"):
        return getattr(transformers, f"{request.param}Model")(config)


def own_positions(rows: list[tuple[int, list[tuple[int, int, int]]]]) -> Ints:
    images = [(row, *image) for row, (_, each) in enumerate(rows) for image in each]
    table = np.array(images, dtype=np.int32).reshape(-1, 4)
    lengths = np.array([length for length, _ in rows], dtype=np.int32)
    return rope_positions(lengths, table[:, 0], table[:, 1], table[:, 2:])


def reference(model: Any, length: int, images: list[tuple[int, int, int]]) -> tuple[NDArray[np.int64], int]:
    ids = torch.full((1, length), TEXT)
    for start, down, across in images:
        ids[0, start : start + down * across] = IMAGE
    grids = torch.tensor([[1, 2 * down, 2 * across] for _, down, across in images]) if images else None
    kinds = (ids == IMAGE).int()
    positions, deltas = model.get_rope_index(ids, kinds, image_grid_thw=grids)
    return positions[:, 0].T.numpy(), int(deltas)


def test_positions_of_rows_with_and_without_images_are_those_of_transformers(model: Any) -> None:
    own = own_positions(ROWS).reshape(-1, 3)
    starts = cumulative(np.array([length for length, _ in ROWS], dtype=np.int32))
    for row, (length, images) in enumerate(ROWS):
        expected, delta = reference(model, length, images)
        got = own[starts[row] : starts[row + 1]]
        assert got.tolist() == expected.tolist()
        assert rope_delta(got.reshape(-1)) == delta <= 0


def test_rows_of_text_alone_count_their_tokens() -> None:
    got = own_positions([(3, []), (0, []), (2, [])]).reshape(-1, 3)
    assert got.tolist() == [[0] * 3, [1] * 3, [2] * 3, [0] * 3, [1] * 3]
    assert rope_delta(got[:0].reshape(-1)) == 0

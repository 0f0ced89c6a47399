from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.outputs.finish import cast, finish, unit
from penstock.pooling import heads
from penstock.types import OutputDtype, PoolingParams

RANDOM = np.random.default_rng(3)
VECTORS = RANDOM.standard_normal((40, 37)).astype(np.float32)
VECTORS[3] = 0
VECTORS[4, :5] = [1.5, -2.5, 0.0, -0.0, 127.0]


@pytest.mark.parametrize("dtype", OutputDtype)
def test_every_cast_equals_the_poolers(dtype: OutputDtype) -> None:
    wanted = heads.cast(torch.from_numpy(VECTORS), dtype).numpy()
    got = cast(VECTORS, dtype)
    assert got.dtype == wanted.dtype == dtype.numpy
    np.testing.assert_array_equal(got, wanted)


def test_normalised_vectors_equal_the_poolers() -> None:
    np.testing.assert_allclose(unit(VECTORS), heads.unit(torch.from_numpy(VECTORS)).numpy(), atol=1e-7)


@pytest.mark.parametrize(
    ("dimensions", "normalize", "normalizes", "length"),
    [(None, None, True, 1), (None, None, False, None), (8, None, False, 1), (8, False, True, None)],
)
def test_truncated_vectors_are_renormalised_unless_the_caller_declines(
    dimensions: int | None, normalize: bool | None, normalizes: bool, length: int | None
) -> None:
    out = finish(VECTORS[:3], PoolingParams(dimensions=dimensions, normalize=normalize), normalizes)
    cut = VECTORS[:3, :dimensions]
    assert out.shape == cut.shape
    wanted = cut if length is None else cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_allclose(out, wanted, rtol=1e-6)

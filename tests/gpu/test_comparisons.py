"""Comparisons of given vectors on a GPU: parts and divided pairs give the same scores as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.inputs.vectors import make_comparison
from penstock.scoring.external_vectors import PartLimits, compare_in_parts, plan_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_parts_on_a_gpu_have_the_scores_of_the_cpu(dtype: str) -> None:
    draw = np.random.default_rng(1)

    def matrix(length: int) -> Any:
        values = draw.standard_normal((length, 64))
        return np.rint(20 * values).clip(-128, 127) if dtype == "int8" else values

    compared = make_comparison("a", [matrix(40)], [matrix(n) for n in (300, 7, 0, 120)], dtype=dtype)
    limits = PartLimits(max_operations=1 << 22, max_bytes=1 << 17, max_products=6000)
    assert {part.is_divided for part in plan_parts(compared, limits)} == {True, False}
    *_, found = compare_in_parts(compared, torch.device("cuda"), limits)
    *_, expected = compare_in_parts(compared, torch.device("cpu"))
    assert found is not None and expected is not None
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-2)

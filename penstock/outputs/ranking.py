"""Ranking of documents by score."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadValue, shown


def top_indices(scores: NDArray[Any], top_n: int | None = None) -> list[int]:
    """Indices of the highest scores, highest first. Equal scores keep their order."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order[:top_n]


def check_top_n(top_n: int | None) -> None:
    if top_n is not None and top_n < 1:
        raise BadValue(f"top_n is {shown(top_n)}; it must be at least 1", param="top_n")

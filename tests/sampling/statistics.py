"""Statistics of sampled tokens."""

from __future__ import annotations

import numpy as np


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The distance of the chi-square statistic from its mean, in standard deviations. Rare tokens are
    merged."""
    wanted = expected * counts.sum()
    common = wanted >= 8
    got = np.append(counts[common], counts[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    got, wanted = got[wanted > 0.5], wanted[wanted > 0.5]
    freedom = max(len(wanted) - 1, 1)
    return float((((got - wanted) ** 2 / wanted).sum() - freedom) / np.sqrt(2 * freedom))

"""How many cases a run of the tests has: all with PENSTOCK_ALL_CASES=1, else enough for every change."""

from __future__ import annotations

import os

import pytest

ALL_CASES = bool(os.environ.get("PENSTOCK_ALL_CASES"))


def num_examples(in_full: int) -> int:
    """The examples that Hypothesis draws for one test."""
    return in_full if ALL_CASES else max(10, in_full // 3)


# For tests that take long and hold what others hold by other means.
thorough = pytest.mark.skipif(not ALL_CASES, reason="PENSTOCK_ALL_CASES=1 runs it")

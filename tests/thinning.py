"""The number of test cases in a run: all with PENSTOCK_ALL_CASES=1, otherwise a selection that suits every
change."""

from __future__ import annotations

import os

import pytest

ALL_CASES = bool(os.environ.get("PENSTOCK_ALL_CASES"))


def num_examples(in_full: int) -> int:
    """The number of examples that Hypothesis draws for one test."""
    return in_full if ALL_CASES else max(10, in_full // 3)


# For slow tests of behaviour that faster tests also cover.
thorough = pytest.mark.skipif(not ALL_CASES, reason="PENSTOCK_ALL_CASES=1 runs it")

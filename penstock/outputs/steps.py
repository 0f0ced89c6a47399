"""Process rewards: the values of the tokens that end the steps of a text."""

from __future__ import annotations

import numpy as np

from penstock.errors import BadValue
from penstock.types import Array, Request


def check_steps(request: Request, tag: int) -> None:
    """Reject rows without a step tag: they have no reward."""
    counts = np.add.reduceat((request.token_ids == tag).astype(np.int32), request.starts)
    if not counts.all():
        raise BadValue(
            f"input {int(np.argmin(counts))} has no step tag (token {tag}); put one after each step",
            param="input",
        )


def step_rows(request: Request, values: Array, tag: int) -> list[Array]:
    """[tokens, labels] → [steps, labels] for each row, in the order of its steps."""
    steps = np.flatnonzero(request.token_ids == tag)
    cuts = np.searchsorted(steps, request.starts[1:])
    return np.split(values[steps], cuts)

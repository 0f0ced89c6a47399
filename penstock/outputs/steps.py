"""Rewards of a process: the values of the tokens that end its steps."""

from __future__ import annotations

import numpy as np

from penstock.errors import BadValue
from penstock.types import Array, Request


def check_steps(request: Request, tag: int) -> None:
    """Every row must have a step, or there is nothing to answer."""
    found = np.add.reduceat((request.token_ids == tag).astype(np.int32), request.starts)
    if not found.all():
        raise BadValue(
            f"input {int(np.argmin(found))} holds no step tag (token {tag}); put it after each step",
            param="input",
        )


def step_rows(request: Request, values: Array, tag: int) -> list[Array]:
    """[tokens, labels] → for each row [steps, labels], in the order of its steps."""
    steps = np.flatnonzero(request.token_ids == tag)
    cuts = np.searchsorted(steps, request.starts[1:])
    return np.split(values[steps], cuts)

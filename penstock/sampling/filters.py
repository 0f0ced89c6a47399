"""Top-k, top-p and min-p as the least logit that a row keeps.

min-p comes first, then top-k, then top-p of what they leave, all of the distribution at the row's
temperature. Logits that are equal are kept or left out together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.logit_thresholds import logit_thresholds_reference
from penstock.sampling.plan import FLOATS, Column


def floats(table: Tensor) -> Tensor:
    """The float columns of slots' rows: int32 [rows, …] → fp32 [rows, FLOATS]."""
    return table[:, :FLOATS].contiguous().view(torch.float32)


def least_kept(logits: Tensor, table: Tensor) -> Tensor:
    """[rows]; `table` [rows, …] are the settings of these rows, which all ask for a filter."""
    values = floats(table)
    return logit_thresholds_reference(
        logits,
        values[:, Column.TEMPERATURE],
        table[:, Column.TOP_K],
        values[:, Column.TOP_P],
        values[:, Column.MIN_P],
    )

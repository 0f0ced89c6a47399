"""Top-k, top-p and min-p as the smallest logit that a row keeps.

min-p applies first, then top-k, then top-p of what remains, all on the distribution at the row's temperature.
Equal logits are kept or dropped together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.logit_thresholds import logit_thresholds_reference
from penstock.sampling.plan import FLOATS, Column


def floats(table: Tensor) -> Tensor:
    """The float columns of slot settings: int32 [rows, …] → fp32 [rows, FLOATS]."""
    return table[:, :FLOATS].contiguous().view(torch.float32)


def min_kept_logits(logits: Tensor, table: Tensor) -> Tensor:
    """[rows]; `table` [rows, …] holds the settings of these rows, all of which use a filter."""
    values = floats(table)
    return logit_thresholds_reference(
        logits,
        values[:, Column.TEMPERATURE],
        table[:, Column.TOP_K],
        values[:, Column.TOP_P],
        values[:, Column.MIN_P],
    )

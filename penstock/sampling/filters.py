"""Top-k, top-p and min-p as one threshold for each row: the smallest logit to keep.

min-p applies first, then top-k, then top-p to what remains, all on the distribution at the row's temperature.
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
    """The thresholds, [rows]. `table` [rows, …] has the settings of these rows, which all use a filter."""
    values = floats(table)
    return logit_thresholds_reference(
        logits,
        values[:, Column.TEMPERATURE],
        table[:, Column.TOP_K],
        values[:, Column.TOP_P],
        values[:, Column.MIN_P],
    )

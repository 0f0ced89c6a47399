"""Ragged batches for tests that need only hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.layers.batch import Batch
from penstock.types import cumulative


def batch_of(lengths: Sequence[int], skip: Sequence[int] | None = None) -> Batch:
    sizes = np.array(lengths, dtype=np.int32)
    return Batch(
        token_ids=torch.zeros(int(sizes.sum()), dtype=torch.int32),
        positions=torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
        type_ids=None,
        cu_lengths=torch.from_numpy(cumulative(sizes)),
        lengths=torch.from_numpy(sizes),
        skip=None if skip is None else torch.tensor(skip, dtype=torch.int32),
        groups=(),
        max_length=int(sizes.max()),
        num_tokens=int(sizes.sum()),
        num_rows=len(sizes),
    )

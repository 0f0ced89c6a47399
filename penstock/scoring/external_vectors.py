"""Late interaction of vectors that the caller brings: they go to the device, and only scores come back."""

from __future__ import annotations

import numpy as np
import torch

from penstock.kernels.maxsim import maxsim
from penstock.types import Array, Comparison, Ints, cumulative


@torch.inference_mode()
def compare(comparison: Comparison, device: torch.device) -> Array:
    """fp32 [documents, 1]. It waits for the device, so it must not run on the engine loop's thread."""

    def sent(array: Array) -> torch.Tensor:
        writable = array if array.flags.writeable else array.copy()
        return torch.from_numpy(writable).to(device, non_blocking=True)

    def scales(array: Array | None) -> torch.Tensor | None:
        return None if array is None else sent(array)

    queries, documents = comparison.query_lengths, comparison.document_lengths
    scores = maxsim(
        sent(comparison.queries),
        sent(comparison.documents),
        sent(_starts(queries)),
        sent(queries),
        sent(_starts(documents)),
        sent(documents),
        sent(comparison.pairs),
        query_scales=scales(comparison.query_scales),
        document_scales=scales(comparison.document_scales),
        max_query_length=int(queries.max()),
        max_document_length=int(documents.max()),
    )
    return np.asarray(scores.cpu().numpy())[:, None]


def _starts(lengths: Ints) -> Ints:
    return cumulative(lengths)[:-1]

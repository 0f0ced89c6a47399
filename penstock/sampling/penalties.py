"""Token counts for penalties, with one row for each slot that has penalties."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.sampling import IN_PROMPT
from penstock.types import Ints

Send = Callable[[NDArray[np.int64]], Tensor]


def count_tokens(prompt_ids: Ints, output_ids: Ints, vocab_size: int) -> tuple[Ints, Ints]:
    """Return the tokens of a sequence and their counts, in the format of the table."""
    prompt = np.unique(prompt_ids[prompt_ids < vocab_size])
    output, times = np.unique(output_ids, return_counts=True)
    ids = np.union1d(prompt, output).astype(np.int32)
    counts = np.where(np.isin(ids, prompt), IN_PROMPT, 0).astype(np.int32)
    counts[np.searchsorted(ids, output)] += times.astype(np.int32)
    return ids, counts


class TokenCounts:
    """Counts, int32 [rows, vocab]. The table grows by doubling, and is empty while no slot has penalties."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.table = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._pending: dict[int, tuple[Ints, Ints]] = {}

    def put(self, row: int, prompt_ids: Ints, output_ids: Ints) -> None:
        self._pending[row] = count_tokens(prompt_ids, output_ids, self.table.shape[1])

    def flush(self, rows: int, send: Send) -> None:
        """Send the new rows in one copy."""
        if not self._pending:
            return
        self.table = with_rows(self.table, rows)
        vocab = self.table.shape[1]
        for row in self._pending:
            self.table[row].zero_()
        at = np.concatenate([row * vocab + ids.astype(np.int64) for row, (ids, _) in self._pending.items()])
        counts = np.concatenate([counts for _, counts in self._pending.values()])
        self._pending.clear()
        if len(at):
            sent = send(np.stack((at, counts.astype(np.int64))))
            self.table.view(-1).index_copy_(0, sent[0], sent[1].int())

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Count sampled tokens by torch, as the sampling kernel does; tokens of row -1 are not counted."""
        at = rows.clamp_min(0).long() * self.table.shape[1] + tokens.long()
        self.table.view(-1).index_add_(0, at, (rows >= 0).int())


def with_rows(table: Tensor, rows: int) -> Tensor:
    """Return the table with at least `rows` rows. It grows to a power of two."""
    if rows <= len(table):
        return table
    size = 1 << (rows - 1).bit_length()
    out = table.new_zeros((size, *table.shape[1:]))
    out[: len(table)] = table
    return out

"""Convolution along each row of a ragged run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.layers.activation import activation
from penstock.layers.batch import Batch


class RowConv:
    """Beyond a row's ends there are zeros; `kernel` is odd, so that rows keep their length."""

    def __init__(self, weight: Tensor, bias: Tensor, act: str, groups: int = 1) -> None:
        self.weight = weight  # [out, in / groups, kernel]
        self.bias = bias
        self.act = activation(act)
        self.groups = groups

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        out = torch.empty((len(x), len(self.weight)), dtype=x.dtype, device=x.device)
        for group in batch.groups:
            stop = group.first_token + group.num_rows * group.length
            rows = x[group.first_token : stop].view(group.num_rows, group.length, -1).transpose(1, 2)
            seen = F.conv1d(
                rows, self.weight, self.bias, padding=self.weight.shape[2] // 2, groups=self.groups
            )
            out[group.first_token : stop].view(group.num_rows, group.length, -1).copy_(seen.transpose(1, 2))
        return self.act(out)

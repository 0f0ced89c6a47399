"""Convolution along each row of a ragged batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.layers.activation import activation
from penstock.layers.batch import Batch
from penstock.layers.cpu_shapes import zero_padding


class RaggedConv1d:
    """A convolution that pads each row with zeros at both ends. An odd kernel size keeps row lengths."""

    def __init__(self, weight: Tensor, bias: Tensor, act: str, groups: int = 1) -> None:
        self.weight = weight  # [out, in / groups, kernel]
        self.bias = bias
        self.act = activation(act)
        self.groups = groups

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        out = torch.empty((len(x), len(self.weight)), dtype=x.dtype, device=x.device)
        padding = self.weight.shape[2] // 2
        for group in batch.groups:
            stop = group.first_token + group.num_rows * group.length
            rows = x[group.first_token : stop].view(group.num_rows, group.length, -1).transpose(1, 2)
            convolved = F.conv1d(rows, self.weight, self.bias, padding=padding, groups=self.groups)
            into = out[group.first_token : stop].view(group.num_rows, group.length, -1)
            into.copy_(convolved.transpose(1, 2))
        return self.act(zero_padding(out, batch.groups))

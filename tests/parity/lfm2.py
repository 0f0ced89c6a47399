"""A bidirectional LFM2 built from transformers' modules, as its embedding checkpoints run it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CentredConv(nn.Module):
    """A layer's convolution, centred: as many tokens after as before. Padding and expansion tokens take
    part."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.conv, self.in_proj, self.out_proj = causal.conv, causal.in_proj, causal.out_proj

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        gate_in, gate_out, x = self.in_proj(hidden_states).transpose(1, 2).chunk(3, dim=1)
        size = self.conv.weight.shape[2]
        mixed = F.conv1d(
            gate_in * x, self.conv.weight, self.conv.bias, padding=size // 2, groups=gate_in.shape[1]
        )
        out: Tensor = self.out_proj((gate_out * mixed).transpose(1, 2))
        return out


def look_both_ways(model: Any) -> None:
    """Make attention bidirectional, except for masked tokens, and centre the convolutions."""
    for layer in model.layers:
        if hasattr(layer, "conv"):
            layer.conv = CentredConv(layer.conv)
    causal = model.forward

    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = (seen == 0)[:, None, None].expand(-1, 1, input_ids.shape[1], -1)
        mask = torch.zeros(hidden.shape, dtype=model.dtype).masked_fill(hidden, torch.finfo(model.dtype).min)
        return causal(input_ids=input_ids, attention_mask=mask, **options)

    model.forward = forward

"""Bidirectional LSTM over rows of different lengths. The host reads no lengths from the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.weights.stream import WeightSource


class BiLSTM:
    """A bidirectional LSTM in fp32.

    Both directions run forwards, the second over reversed rows. So padding comes after the last step of
    either direction and has no effect.
    """

    def __init__(self, weights: WeightSource, prefix: str, inputs: int, hidden: int, num_layers: int) -> None:
        if weights.device.type == "cuda":
            options: Any = torch.backends.cudnn.rnn
            options.fp32_precision = "ieee"  # the library's default rounds fp32 to 10 bits
        self.hidden = hidden
        self.layers = [
            [
                _direction(weights, f"{prefix}{{}}_l{layer}{suffix}", 2 * hidden if layer else inputs, hidden)
                for suffix in ("", "_reverse")
            ]
            for layer in range(num_layers)
        ]

    def __call__(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x [rows, steps, inputs], lengths [rows] → [rows, steps, 2 · hidden]."""
        steps = torch.arange(x.shape[1], device=x.device)
        behind = lengths.long()[:, None] - 1 - steps  # index in the reversed row; negative for padding
        order = torch.where(behind >= 0, behind, steps)[:, :, None]
        for forwards, backwards in self.layers:
            reversed_x = x.gather(1, order.expand(-1, -1, x.shape[2]))
            ahead, back = self._run(x, forwards), self._run(reversed_x, backwards)
            x = torch.cat([ahead, back.gather(1, order.expand(-1, -1, self.hidden))], dim=-1)
        return x

    def _run(self, x: Tensor, parameters: list[Tensor]) -> Tensor:
        start = x.new_zeros((1, len(x), self.hidden))
        out: Tensor = torch.lstm(x, (start, start), parameters, True, 1, 0.0, False, False, True)[0]
        return out


def _direction(weights: WeightSource, name: str, inputs: int, hidden: int) -> list[Tensor]:
    return [
        weights.take(name.format("weight_ih"), 4 * hidden, inputs).float(),
        weights.take(name.format("weight_hh"), 4 * hidden, hidden).float(),
        weights.take(name.format("bias_ih"), 4 * hidden).float(),
        weights.take(name.format("bias_hh"), 4 * hidden).float(),
    ]

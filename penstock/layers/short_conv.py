"""Short depthwise convolution along each row of a ragged batch, as shifted sums: no loop over rows."""

from __future__ import annotations

from torch import Tensor

from penstock.layers.batch import Batch


class ShortConv:
    """A convolution that pads rows with zeros: before the first token if causal, otherwise at both ends.

    Rows start at position 0, so a token's position is the number of earlier tokens in its row.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_causal: bool) -> None:
        size = weight.shape[1]  # weight is [channels, size]
        self.bias = bias
        taps = weight.t().contiguous()
        before = size - 1 if is_causal else size // 2
        # (number of tokens that a tap looks back, its weight [channels]); negative: ahead
        self.taps = [(before - tap, taps[tap]) for tap in range(size)]

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [tokens, channels] → [tokens, channels]"""
        positions = batch.positions[: len(x), None]
        out = x.new_zeros(x.shape) if self.bias is None else self.bias.expand_as(x).clone()
        for back, weight in self.taps:
            distance = abs(back)
            if distance >= len(x):
                continue
            if not distance:
                out.addcmul_(x, weight)
                continue
            # A token is in the same row as the one `distance` tokens before it if its position is at least
            # `distance`.
            is_same_row = positions[distance:] >= distance
            earlier, later = slice(None, -distance), slice(distance, None)
            source, target = (earlier, later) if back > 0 else (later, earlier)
            out[target].addcmul_(x[source] * is_same_row, weight)
        return out

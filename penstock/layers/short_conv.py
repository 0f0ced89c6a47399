"""Short depthwise convolution along each row of a ragged batch, as shifted sums: no loop over rows."""

from __future__ import annotations

from torch import Tensor

from penstock.layers.batch import Batch


class ShortConv:
    """Rows are padded with zeros: before their first token if causal, else at both ends.

    Rows start at position 0, so a token's position says how many tokens of its row come before it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_causal: bool) -> None:
        size = weight.shape[1]  # of weight [channels, size]
        self.bias = bias
        taps = weight.t().contiguous()
        before = size - 1 if is_causal else size // 2
        # (how many tokens back a tap looks, its weight [channels]); negative: ahead
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
            # The token that comes `distance` after another in the run is in the same row if its position is
            # at least `distance`.
            is_same_row = positions[distance:] >= distance
            earlier, later = slice(None, -distance), slice(distance, None)
            source, target = (earlier, later) if back > 0 else (later, earlier)
            out[target].addcmul_(x[source] * is_same_row, weight)
        return out

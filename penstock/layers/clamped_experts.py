"""The experts of gpt-oss, with biases in all products and a gated activation whose inputs are clamped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.build import LayerBuilder

# Magnitudes of a 4-bit float's codes: one sign bit, two exponent bits, one mantissa bit.
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class ClampedExpertShape:
    num_experts: int
    num_chosen: int  # experts of each token
    intermediate: int  # width of each expert
    alpha: float  # factor inside the sigmoid
    limit: float  # clamp of gate and up
    interleaved: bool  # outputs of gate and up alternate in the checkpoint; otherwise gate comes first


class ClampedExperts:
    """The experts of a layer.

    They compute the sum of weight · down((up(x) + 1) · gate(x) · sigmoid(alpha · gate(x))) over each token's
    experts. Tokens are sorted by expert, so that each expert is one product over its own tokens. On CUDA in
    bf16, nothing is read back from the device.
    """

    def __init__(self, build: LayerBuilder, prefix: str, hidden: int, shape: ClampedExpertShape) -> None:
        weights, count, width = build.weights, shape.num_experts, shape.intermediate
        self.shape = shape
        # In fp32, because rounding could change which experts are chosen.
        self.router = weights.take(prefix + "router.weight", count, hidden).float()
        self.router_bias = weights.take(prefix + "router.bias", count).float()
        gate_up = _read_experts(build, prefix + "experts.gate_up_proj", count, 2 * width, hidden)
        bias = weights.take(prefix + "experts.gate_up_proj_bias", count, 2 * width)
        if shape.interleaved:
            gate_up, bias = (torch.cat([x[:, ::2], x[:, 1::2]], dim=1) for x in (gate_up, bias))
        self.gate_up, self.gate_up_bias = gate_up.contiguous(), bias.contiguous()  # the gate first
        self.down = _read_experts(build, prefix + "experts.down_proj", count, hidden, width)
        self.down_bias = weights.take(prefix + "experts.down_proj_bias", count, hidden)

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]; `residual` of the same shape is added last. `out` is
        ignored."""
        x = dequantize(x, self.down.dtype)
        logits = F.linear(x.float(), self.router, self.router_bias)
        best, experts = logits.topk(self.shape.num_chosen, dim=-1)
        weights = best.softmax(dim=-1)  # [tokens, chosen]
        order = experts.flatten().argsort(stable=True)  # [tokens · chosen]
        chosen = experts.flatten().index_select(0, order)
        outputs = self._experts(x.index_select(0, order // self.shape.num_chosen), chosen)
        unsorted = torch.empty_like(outputs).index_copy_(0, order, outputs)
        parts = unsorted.view(len(x), self.shape.num_chosen, -1)
        total = torch.einsum("tch,tc->th", parts.float(), weights).to(x.dtype)
        return total if residual is None else total.add_(residual)

    def _experts(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Run x [tokens · chosen, hidden], sorted by expert; `chosen` is the expert of each row."""
        counts = torch.zeros(self.shape.num_experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
        if x.is_cuda and x.dtype == torch.bfloat16:
            ends = counts.cumsum(0, dtype=torch.int32)
            both = torch._grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends)
            both += self.gate_up_bias.index_select(0, chosen)
            out: Tensor = torch._grouped_mm(self._gated(both), self.down.transpose(1, 2), offs=ends)
            return out.add_(self.down_bias.index_select(0, chosen))
        outputs = torch.empty_like(x)
        parts = counts.tolist()
        for expert, (rows, into) in enumerate(zip(x.split(parts), outputs.split(parts), strict=True)):
            if len(rows):
                both = F.linear(rows, self.gate_up[expert], self.gate_up_bias[expert])
                into.copy_(F.linear(self._gated(both), self.down[expert], self.down_bias[expert]))
        return outputs

    def _gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.shape.limit), up.clamp(-self.shape.limit, self.shape.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.shape.alpha))


def _read_experts(build: LayerBuilder, name: str, count: int, outputs: int, inputs: int) -> Tensor:
    """Read the weights of all experts, [experts, outputs, inputs].

    Unquantised tensors are stored with inputs before outputs. In MXFP4, blocks of 32 inputs share an
    exponent, and a byte holds two inputs, the first in its low bits.
    """
    weights = build.weights
    if weights.has(name) or not weights.has(name + "_blocks"):
        return weights.take(name, count, inputs, outputs).transpose(1, 2).contiguous()
    blocks = weights.read(name + "_blocks", (count, outputs, inputs // 32, 16))
    scales = weights.read(name + "_scales", (count, outputs, inputs // 32))
    values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    out = torch.empty((count, outputs, inputs), dtype=weights.dtype, device=weights.device)
    for expert in range(count):
        codes = blocks[expert].to(torch.int32)
        pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)  # [outputs, blocks, 32]
        exponents = scales[expert].to(torch.int32) - _EXPONENT_BIAS
        out[expert] = torch.ldexp(values[pairs], exponents[..., None]).flatten(-2).to(weights.dtype)
    return out

"""Feed-forward blocks of which each token takes a few: a router chooses experts and weighs what they say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.quantize import Rows, plain
from penstock.layers.activation import activation


@dataclass(frozen=True, slots=True)
class ExpertShape:
    experts: int
    chosen: int  # experts of each token
    intermediate: int  # width of each
    normalize: bool  # the weights of the chosen ones sum to one


class SparseMLP:
    """sum of weight · down(act(gate(x)) · up(x)) over each token's experts.

    Tokens are put in the order of their experts, so that each expert is one product over its own. On CUDA
    one grouped product serves all experts and no count is asked of the device.
    """

    def __init__(
        self,
        router: Tensor,  # [experts, hidden]
        gate_up: Tensor,  # [experts, 2 · intermediate, hidden], the gate first
        down: Tensor,  # [experts, hidden, intermediate]
        shape: ExpertShape,
        act: str,
    ) -> None:
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.shape = shape
        self.act = activation(act)

    def __call__(self, x: Rows, residual: Tensor | None = None) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]; `residual` of the same shape is added last."""
        x = plain(x)
        weights, experts = self._route(x)
        order = experts.flatten().argsort(stable=True)  # [tokens · chosen]
        token = order // self.shape.chosen
        counts = torch.zeros(self.shape.experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
        said = self._experts(x.index_select(0, token), counts)
        said = said * weights.flatten().index_select(0, order)[:, None]
        out = torch.zeros_like(x) if residual is None else residual.clone()
        return out.index_add_(0, token, said)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each token's experts, [tokens, chosen]."""
        odds = F.linear(x, self.router).softmax(dim=-1, dtype=torch.float32)
        weights, experts = odds.topk(self.shape.chosen, dim=-1)
        if self.shape.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts

    def _experts(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [tokens · chosen, hidden], expert after expert."""
        if x.is_cuda and x.dtype == torch.bfloat16:
            ends = counts.cumsum(0, dtype=torch.int32)
            both = torch._grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends)
            return torch._grouped_mm(self._gated(both), self.down.transpose(1, 2), offs=ends)
        out = torch.empty_like(x)
        parts = counts.tolist()
        for number, (own, into) in enumerate(zip(x.split(parts), out.split(parts), strict=True)):
            if len(own):
                inner = self._gated(F.linear(own, self.gate_up[number]))
                into.copy_(F.linear(inner, self.down[number]))
        return out

    def _gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return self.act(gate) * up

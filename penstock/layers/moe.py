"""Feed-forward blocks of which each token takes a few: a router chooses experts and weighs what they say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES
from penstock.kernels.blockwise import (
    BlockQuantized,
    dequantize_blocks,
    dequantize_groups,
    quantize_groups_reference,
)
from penstock.kernels.experts import (
    FP8_TILINGS,
    HALF_TILINGS,
    MAX_CHOSEN_EXPERTS,
    MAX_EXPERTS,
    ExpertTiling,
    route_reference,
    run_experts,
)
from penstock.kernels.language import use_kernel
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.activation import activation
from penstock.layers.build import LayerBuilder
from penstock.layers.stored import ExpertStack, multiplies_blocks, plain_weight, read_blocks

ROUTED = (1, 17, 33, 65, 129)  # tokens: each takes another form of the routing


@dataclass(frozen=True, slots=True)
class ExpertShape:
    experts: int
    chosen: int  # experts of each token
    intermediate: int  # width of each
    normalize: bool  # the weights of the chosen ones sum to one


class SparseMLP:
    """sum of weight · down(act(gate(x)) · up(x)) over each token's experts.

    Tokens are put in the order of their experts, so that each expert is one product over its own. Where
    kernels run, no count is asked of the device. In blocks of fp8, gate and up share no scales.
    """

    def __init__(
        self,
        router: Tensor,  # [experts, hidden]
        gate_up: Tensor | BlockQuantized,  # [experts, 2 · intermediate, hidden], the gate first
        down: Tensor | BlockQuantized,  # [experts, hidden, intermediate]
        shape: ExpertShape,
        act: str,
    ) -> None:
        assert isinstance(gate_up, BlockQuantized) is isinstance(down, BlockQuantized)
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.shape = shape
        self.act = activation(act)
        few = shape.experts <= MAX_EXPERTS and shape.chosen <= MAX_CHOSEN_EXPERTS
        self.kernel = act if act in ACTIVATION_CODES and few else None

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]; `residual` of the same shape is added last. `out` is left
        alone."""
        x = dequantize(x, self.router.dtype)
        if self._fused(x):
            return self._run(x.contiguous(), residual)
        logits = F.linear(x, self.router)
        weights, experts = route_reference(logits, self.shape.chosen, self.shape.normalize)
        order = experts.flatten().argsort(stable=True)  # [tokens · chosen]
        token = order // self.shape.chosen
        counts = torch.zeros(self.shape.experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
        said = self._experts(x.index_select(0, token), counts)
        said = said * weights.to(x.dtype).flatten().index_select(0, order)[:, None]
        out = torch.zeros_like(x) if residual is None else residual.clone()
        return out.index_add_(0, token, said)

    def compile(self) -> None:
        """Every form of the kernels that a step may take, so that none is compiled while requests wait."""
        x = self.router[:1]  # any row will do
        if not x.is_cuda or not self._fused(x):
            return
        fp8 = isinstance(self.gate_up, BlockQuantized)
        for _, plan in FP8_TILINGS if fp8 else HALF_TILINGS:
            self._run(x, None, plan)
        for tokens in ROUTED:
            self._run(x.expand(tokens, -1).contiguous(), None, None)

    def _fused(self, x: Tensor) -> bool:
        """On CUDA fp32 stays with the library: tiles of it are too large for the kernels."""
        return self.kernel is not None and use_kernel(x) and not (x.is_cuda and x.dtype == torch.float32)

    def _run(self, x: Tensor, residual: Tensor | None, plan: ExpertTiling | None = None) -> Tensor:
        assert self.kernel is not None
        return run_experts(
            x,
            F.linear(x, self.router),
            self.gate_up,
            self.down,
            chosen=self.shape.chosen,
            normalize=self.shape.normalize,
            act=self.kernel,
            residual=residual,
            plan=plan,
        )

    def _experts(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [tokens · chosen, hidden], expert after expert."""
        gate_up, down = self.gate_up, self.down
        if (
            isinstance(gate_up, Tensor)
            and isinstance(down, Tensor)
            and x.is_cuda
            and x.dtype == torch.bfloat16
        ):
            ends = counts.cumsum(0, dtype=torch.int32)
            both = torch._grouped_mm(x, gate_up.transpose(1, 2), offs=ends)
            return torch._grouped_mm(self._gated(both), down.transpose(1, 2), offs=ends)
        out = torch.empty_like(x)
        parts = counts.tolist()
        for number, (own, into) in enumerate(zip(x.split(parts), out.split(parts), strict=True)):
            if len(own):
                inner = self._gated(_product(own, gate_up, number, halves=2))
                into.copy_(_product(inner, down, number))
        return out

    def _gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return self.act(gate) * up


def _product(x: Tensor, weight: Tensor | BlockQuantized, number: int, halves: int = 1) -> Tensor:
    """By one expert's weight, in fp8 by what it and the quantised rows stand for."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight[number])
    wide = dequantize_groups(quantize_groups_reference(x))
    parts = (part.chunk(halves) for part in (weight.values[number], weight.scales[number]))
    products = [F.linear(wide, dequantize_blocks(BlockQuantized(*half))) for half in zip(*parts, strict=True)]
    return torch.cat(products, dim=1).to(x.dtype)


def read_experts(
    build: LayerBuilder, prefix: str, shape: ExpertShape, hidden: int, act: str
) -> tuple[Tensor | BlockQuantized, Tensor | BlockQuantized]:
    """(gate and up, down) of all experts. Each has its own tensors in most files, and all share one in some.

    They are kept in blocks of fp8 where the checkpoint has them so or `--quantization` wants it, and where
    something multiplies them; a CPU does so for comparison, with weights that were quantised here.
    """
    weights, width = build.weights, shape.intermediate
    stored, wanted = build.in_blocks(prefix + "0.gate_proj"), build.precision(prefix) == "fp8"
    blocks = (stored or wanted) and act in ACTIVATION_CODES and multiplies_blocks(weights.device)
    blocks |= wanted and weights.device.type == "cpu"
    sizes = {"gate_up": (2, width, hidden), "down": (1, hidden, width)}
    stacks = {name: ExpertStack(shape.experts, *size, weights, blocks=blocks) for name, size in sizes.items()}
    if not weights.has(prefix + "0.gate_proj.weight"):
        for name, (halves, outputs, inputs) in sizes.items():
            joined = weights.plain(f"{prefix}{name}_proj", (shape.experts, halves * outputs, inputs))
            for expert, both in enumerate(joined):
                for half, part in enumerate(both.chunk(halves)):
                    stacks[name].put(expert, half, part)
        return stacks["gate_up"].all, stacks["down"].all
    for expert in range(shape.experts):
        for part, name, half in (("gate", "gate_up", 0), ("up", "gate_up", 1), ("down", "down", 0)):
            _, outputs, inputs = sizes[name]
            module = f"{prefix}{expert}.{part}_proj"
            read = read_blocks if build.in_blocks(module) else plain_weight
            stacks[name].put(expert, half, read(weights, f"{module}.weight", outputs, inputs))
    return stacks["gate_up"].all, stacks["down"].all

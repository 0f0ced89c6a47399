"""Mixture of experts: a router chooses feed-forward blocks for each token and weights their outputs."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
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
from penstock.kernels.language import MAX_COMPILER_THREADS, cdiv, precompile, use_kernel
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.activation import activation
from penstock.layers.build import LayerBuilder
from penstock.layers.fp8_blocks import ExpertStack, supports_fp8_blocks
from penstock.layers.parallel import Group
from penstock.weights.stream import Wanted

# Numbers of slots (chosen experts of all tokens) that each compile another variant of the routing kernels.
ROUTED_SLOTS = (1, 1025, 2049, 4097)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    num_experts: int
    num_chosen: int  # experts of each token
    intermediate: int  # width of each expert
    normalize: bool  # whether the weights of a token's experts sum to one
    gated: bool = True  # experts compute down(act(gate(x)) · up(x)); otherwise down(act(up(x)))


class SparseMLP:
    """Computes the sum of weight · down(act(gate(x)) · up(x)) over each token's experts.

    Experts without a gate compute down(act(up(x))). Tokens are sorted by expert, so that each expert is one
    product over its own tokens. With kernels, the host reads no count from the device. In fp8 blocks, gate
    and up share no scales.
    """

    def __init__(
        self,
        router: Tensor,  # [experts, hidden]
        gate_up: Tensor | BlockQuantized,  # [experts, 2 · intermediate, hidden], the gate first; or only up
        down: Tensor | BlockQuantized,  # [experts, hidden, intermediate]
        shape: ExpertShape,
        act: str,
        bias: Tensor | None = None,  # [hidden], added once to each sum
    ) -> None:
        assert isinstance(gate_up, BlockQuantized) is isinstance(down, BlockQuantized)
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.bias = bias
        self.shape = shape
        self.act = activation(act)
        fits = shape.num_experts <= MAX_EXPERTS and shape.num_chosen <= MAX_CHOSEN_EXPERTS
        self.kernel = act if act in ACTIVATION_CODES and fits else None

    first_expert: int | None = None  # first expert with weights on this rank; None: all are here

    @property
    def input_layer(self) -> None:
        """None: both the router and the experts read the input."""

    def __call__(
        self,
        x: Activations,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        scratch: Tensor | None = None,
    ) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]; `residual` of the same shape is added last.

        `out` and `scratch` are ignored.
        """
        x = dequantize(x, self.router.dtype)
        if (kernel := self._kernel_for(x)) is not None:
            return self._run(kernel, x.contiguous(), residual)
        logits = F.linear(x, self.router)
        weights, experts = route_reference(logits, self.shape.num_chosen, self.shape.normalize)
        order = experts.flatten().argsort(stable=True)  # [tokens · chosen]
        token = order // self.shape.num_chosen
        counts = torch.zeros(self.shape.num_experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
        outputs = self._experts(x.index_select(0, token), counts)
        outputs = outputs * weights.to(x.dtype).flatten().index_select(0, order)[:, None]
        out = torch.zeros_like(x) if residual is None else residual.clone()
        out.index_add_(0, token, outputs)
        return out if self.bias is None else out.add_(self.bias)

    def compile(self) -> None:
        """Compile all variants of the kernels that a step may use, so that no request waits for them."""
        x = self.router[:1]  # any row will do
        kernel = self._kernel_for(x)
        if not x.is_cuda or kernel is None:
            return
        fp8 = isinstance(self.gate_up, BlockQuantized)
        for _, plan in FP8_TILINGS if fp8 else HALF_TILINGS:
            self._run(kernel, x, None, plan)
        for slots in ROUTED_SLOTS:
            tokens = cdiv(slots, self.shape.num_chosen)
            self._run(kernel, x.expand(tokens, -1).contiguous(), None)

    def _kernel_for(self, x: Tensor) -> str | None:
        """The activation that the kernels apply; None if the library runs the experts.

        On CUDA the library runs them in fp32, because fp32 tiles are too large for the kernels.
        """
        return self.kernel if use_kernel(x) and not (x.is_cuda and x.dtype == torch.float32) else None

    def _run(
        self, kernel: str, x: Tensor, residual: Tensor | None, plan: ExpertTiling | None = None
    ) -> Tensor:
        return run_experts(
            x,
            F.linear(x, self.router),
            self.gate_up,
            self.down,
            chosen=self.shape.num_chosen,
            normalize=self.shape.normalize,
            act=kernel,
            gated=self.shape.gated,
            residual=residual,
            bias=self.bias,
            plan=plan,
            first_expert=self.first_expert,
        )

    def _experts(self, x: Tensor, counts: Tensor) -> Tensor:
        """Run x [tokens · chosen, hidden], sorted by expert; `counts` are the rows of each expert."""
        gate_up, down = self.gate_up, self.down
        if (
            isinstance(gate_up, Tensor)
            and isinstance(down, Tensor)
            and x.is_cuda
            and x.dtype == torch.bfloat16
        ):
            ends = counts.cumsum(0, dtype=torch.int32)
            both = torch._grouped_mm(x, gate_up.transpose(1, 2), offs=ends)
            return torch._grouped_mm(self._activated(both), down.transpose(1, 2), offs=ends)
        out = torch.empty_like(x)
        parts = counts.tolist()
        for expert, (rows, into) in enumerate(zip(x.split(parts), out.split(parts), strict=True)):
            if len(rows):
                inner = self._activated(_product(rows, gate_up, expert, halves=2 if self.shape.gated else 1))
                into.copy_(_product(inner, down, expert))
        return out

    def _activated(self, both: Tensor) -> Tensor:
        if not self.shape.gated:
            return self.act(both)
        gate, up = both.chunk(2, dim=-1)
        return self.act(gate) * up


class ShardedExperts(SparseMLP):
    """One rank's share of the experts. Every rank has the whole router, and sums are added over ranks."""

    def __init__(
        self,
        router: Tensor,
        gate_up: Tensor | BlockQuantized,  # weights of the experts in `held`
        down: Tensor | BlockQuantized,
        shape: ExpertShape,
        act: str,
        bias: Tensor | None,
        held: range,
        group: Group,
    ) -> None:
        super().__init__(router, gate_up, down, shape, act, bias if group.rank == 0 else None)
        self.held = held
        self.first_expert = held.start
        self.group = group

    def __call__(
        self,
        x: Activations,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        scratch: Tensor | None = None,
    ) -> Tensor:
        x = dequantize(x, self.router.dtype)
        kernel = self._kernel_for(x)
        total = self._own_sum(x) if kernel is None else self._run(kernel, x.contiguous(), None)
        self.group.all_reduce(total)
        return total if residual is None else total.add_(residual)

    def _own_sum(self, x: Tensor) -> Tensor:
        """The sum over the experts of this rank, [tokens, hidden]."""
        weights, experts = route_reference(
            F.linear(x, self.router), self.shape.num_chosen, self.shape.normalize
        )
        number = experts - self.held.start
        token, choice = ((number >= 0) & (number < len(self.held))).nonzero(as_tuple=True)
        number = number[token, choice]
        order = number.argsort(stable=True)
        token, choice = token[order], choice[order]
        counts = torch.bincount(number, minlength=len(self.held)).int()
        outputs = self._experts(x.index_select(0, token), counts) * weights[token, choice, None].to(x.dtype)
        total = torch.zeros_like(x).index_add_(0, token, outputs)
        return total if self.bias is None else total.add_(self.bias)


def make_sparse_mlp(
    build: LayerBuilder,
    router: Tensor,
    gate_up: Tensor | BlockQuantized,
    down: Tensor | BlockQuantized,
    shape: ExpertShape,
    act: str,
    bias: Tensor | None = None,
) -> SparseMLP:
    """Build a mixture of experts from the weights of the experts that are computed here."""
    if (shard := build.shard) is None:
        return SparseMLP(router, gate_up, down, shape, act, bias)
    held = build.experts(shape.num_experts)
    return ShardedExperts(router, gate_up, down, shape, act, bias, held, shard.group)


def _product(x: Tensor, weight: Tensor | BlockQuantized, expert: int, halves: int = 1) -> Tensor:
    """Multiply x by one expert's weight; in fp8, multiply the dequantised values."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight[expert])
    wide = dequantize_groups(quantize_groups_reference(x))
    parts = (part.chunk(halves) for part in (weight.values[expert], weight.scales[expert]))
    products = [F.linear(wide, dequantize_blocks(BlockQuantized(*half))) for half in zip(*parts, strict=True)]
    return torch.cat(products, dim=1).to(x.dtype)


class CompilingBeside:
    """Compiles the kernels of the first sparse layer on threads, while the weights of other layers are
    read."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._compiled: Future[None] | None = None

    def __enter__(self) -> CompilingBeside:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)
        if self._compiled is not None:
            self._compiled.result()  # raises an error of the thread

    def start(self, mlp: object) -> None:
        """Start compiling if this is the first sparse layer."""
        if self._compiled is None and isinstance(mlp, SparseMLP):
            self._compiled = self._pool.submit(self._compile, mlp)

    @staticmethod
    def _compile(mlp: SparseMLP) -> None:
        if not mlp.router.is_cuda:
            return
        with (
            torch.inference_mode(),  # not inherited by threads
            torch.cuda.device_of(mlp.router),
            precompile(min(os.cpu_count() or 1, MAX_COMPILER_THREADS)) or nullcontext(),
        ):
            mlp.compile()


def read_experts(
    build: LayerBuilder, prefix: str, shape: ExpertShape, hidden: int, act: str
) -> tuple[Tensor | BlockQuantized, Tensor | BlockQuantized]:
    """Read (gate and up, down) of the experts that are computed here.

    Most checkpoints have tensors per expert; in some, all experts share a tensor. Weights are kept in fp8
    blocks if the checkpoint or `--quantization` has that format and the device supports it. A CPU keeps them
    only for `--quantization`, for comparison. Other quantised formats are dequantised.
    """
    weights, width = build.weights, shape.intermediate
    blocks = _keeps_blocks(build, prefix, act, stored=build.is_stored_in_blocks(prefix + "0.gate_proj"))
    sizes = {"gate_up": (2, width, hidden), "down": (1, hidden, width)}
    held = build.experts(shape.num_experts)
    stacks = {name: ExpertStack(len(held), *size, weights, blocks=blocks) for name, size in sizes.items()}
    if not build.has_weight(prefix + "0.gate_proj"):
        for name, (halves, outputs, inputs) in sizes.items():
            joined = (shape.num_experts, halves * outputs, inputs)
            stacks[name].fill_joined(Wanted(f"{prefix}{name}_proj", joined, ((held.start, held.stop),)))
        return stacks["gate_up"].all, stacks["down"].all
    for name, projections in (("gate_up", ("gate", "up")), ("down", ("down",))):
        halves, outputs, inputs = sizes[name]
        modules = []
        for expert in range(shape.num_experts):
            named = [f"{prefix}{expert}.{part}_proj" for part in projections]
            if expert in held:
                modules += named
                continue
            for module in named:
                weights.skip(f"{module}.weight", (outputs, inputs))
        if blocks:
            is_uniform = all(build.is_stored_in_blocks(module) for module in modules)
        else:
            is_uniform = not any(build.is_quantized(module) for module in modules)
        if is_uniform:
            stacks[name].fill(modules)
            continue
        for number, module in enumerate(modules):
            stacks[name].put(*divmod(number, halves), build.expert_weight(module, outputs, inputs))
    return stacks["gate_up"].all, stacks["down"].all


def read_joined_experts(
    build: LayerBuilder, prefix: str, names: tuple[str, str], shape: ExpertShape, hidden: int, act: str
) -> tuple[Tensor | BlockQuantized, Tensor | BlockQuantized]:
    """Read (up, down) of the experts that are computed here and have no gate.

    The checkpoint has two tensors [experts · intermediate, hidden], in which `down` is transposed.
    """
    weights, count, width = build.weights, shape.num_experts, shape.intermediate
    blocks, held = _keeps_blocks(build, prefix, act, stored=False), build.experts(count)
    up = ExpertStack(len(held), 1, width, hidden, weights, blocks=blocks)
    down = ExpertStack(len(held), 1, hidden, width, weights, blocks=blocks)
    for stack, name, transposed in ((up, names[0], False), (down, names[1], True)):
        joined = weights.read_plain(prefix + name, (count * width, hidden)).view(count, width, hidden)
        for expert, part in enumerate(joined[held.start : held.stop]):
            stack.put(expert, 0, part.t() if transposed else part)
    return up.all, down.all


def _keeps_blocks(build: LayerBuilder, prefix: str, act: str, *, stored: bool) -> bool:
    wanted, device = build.precision(prefix) == "fp8", build.weights.device
    if (stored or wanted) and act in ACTIVATION_CODES and supports_fp8_blocks(device):
        return True
    return wanted and device.type == "cpu"

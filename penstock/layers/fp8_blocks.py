"""Weights that a checkpoint stores in fp8, with a scale per block or per output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.blockwise import GROUP, BlockQuantized, dequantize_blocks, quantize_blocks
from penstock.kernels.language import cdiv, use_kernel
from penstock.kernels.quantize import FP8, Quantized
from penstock.weights.quantized import ScaledFp8
from penstock.weights.stream import Wanted, WeightSource


def supports_fp8_blocks(device: torch.device) -> bool:
    """Whether kernels can multiply fp8 blocks on this device; if not, blocks are dequantised at load."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return False
    return use_kernel(torch.empty(0, device=device))


def read_blocks(weights: WeightSource, name: str, outputs: int, inputs: int) -> BlockQuantized:
    """Read the tensor `name` and its scales to the model's device."""
    values = weights.read_fp8(name, (outputs, inputs)).to(weights.device)
    scale = f"{name}_scale_inv" if weights.has(f"{name}_scale_inv") else f"{name}_scale"
    scales = weights.read(scale, (cdiv(outputs, GROUP), cdiv(inputs, GROUP)))
    return BlockQuantized(values, scales.to(dtype=torch.float32, device=weights.device))


def join_blocks(parts: Sequence[BlockQuantized]) -> BlockQuantized:
    """Concatenate along the outputs. If blocks would not align, each output row gets its own scales."""
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(FP8)
    if all(len(part.values) % GROUP == 0 for part in parts[:-1]):
        return BlockQuantized(values, torch.cat([part.scales for part in parts]))
    rows = [part.scales.repeat_interleave(GROUP, dim=0)[: len(part.values)] for part in parts]
    return BlockQuantized(values, torch.cat(rows))


def join_rows(parts: Sequence[ScaledFp8]) -> Quantized:
    """Concatenate weights that have a scale per output."""
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(FP8)
    return Quantized(values, torch.cat([part.scales for part in parts]))


class ExpertStack:
    """The weights of all experts in one tensor. It is filled in place, so no layer is in memory twice."""

    def __init__(
        self, experts: int, halves: int, outputs: int, inputs: int, weights: WeightSource, *, blocks: bool
    ) -> None:
        """Each expert has `halves` weights [outputs, inputs], stacked along the outputs."""
        shape, device = (experts, halves * outputs, inputs), weights.device
        self.weights = weights
        self.halves, self.outputs, self.inputs = halves, outputs, inputs
        self.scale_shape = (cdiv(outputs, GROUP), cdiv(inputs, GROUP))  # scales of one weight
        self.all: Tensor | BlockQuantized
        if blocks:
            scales = (experts, halves * self.scale_shape[0], self.scale_shape[1])
            self.all = BlockQuantized(
                torch.empty(shape, dtype=FP8, device=device),
                torch.empty(scales, dtype=torch.float32, device=device),
            )
        else:
            self.all = torch.empty(shape, dtype=weights.dtype, device=device)

    def fill(self, modules: Sequence[str]) -> None:
        """Read the weights of all experts together, in the order of experts and halves.

        The checkpoint must store all of them in this stack's format: in fp8 blocks, or not quantised.
        """
        names = [f"{module}.weight" for module in modules]
        wanted = [Wanted(name, (self.outputs, self.inputs)) for name in names]
        if isinstance(self.all, Tensor):
            self.weights.fill(self.all, wanted)
            return
        end = "_scale_inv" if self.weights.has(f"{names[0]}_scale_inv") else "_scale"
        self.weights.fill(self.all.values, wanted)
        self.weights.fill(self.all.scales, [Wanted(name + end, self.scale_shape) for name in names])

    def fill_joined(self, wanted: Wanted) -> None:
        """Read one tensor that holds the weights of all experts."""
        if isinstance(self.all, Tensor):
            self.weights.fill(self.all, [wanted])
            return
        stored = self.weights.read_plain(wanted.name, wanted.shape)
        for expert, both in enumerate(wanted.part_of(stored)):
            for half, part in enumerate(both.chunk(self.halves)):
                self.put(expert, half, part)

    def put(self, expert: int, half: int, part: Tensor | BlockQuantized) -> None:
        rows = slice(half * self.outputs, (half + 1) * self.outputs)
        if isinstance(self.all, Tensor):
            self.all[expert, rows] = (
                dequantize_blocks(part, self.weights.dtype) if isinstance(part, BlockQuantized) else part
            )
            return
        if not isinstance(part, BlockQuantized):
            part = quantize_blocks(part.to(dtype=self.weights.dtype, device=self.weights.device))
        scale_rows = self.scale_shape[0]
        self.all.values[expert, rows] = part.values
        self.all.scales[expert, half * scale_rows : (half + 1) * scale_rows] = part.scales

"""Reads the weights of quantised checkpoints, in the layouts that `checkpoint/quantization.py` describes.

Packed integers of all formats become `IntGroups`. Formats without a kernel are dequantised while they are
read. Values are unpacked on the model's device, one module at a time.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.checkpoint.quantization import ALL_MARKS, BLOCK, MARKS, Layout, StoredFormat, StoredWeight
from penstock.errors import ModelLoadError
from penstock.weights.stream import DummySource, WeightSource

_FP8 = torch.float8_e4m3fn
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # positions in a word of eight consecutive outputs
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MAX_BLOCK_VALUES = 4096  # largest block size that bitsandbytes writes
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers?\.\d+\.")  # in the name of a module


@dataclass(frozen=True, slots=True)
class ScaledFp8:
    """A weight that is values · scales, with one scale per output."""

    values: Tensor  # fp8 [outputs, inputs]
    scales: Tensor  # fp32 [outputs, 1]
    has_quantized_inputs: bool  # the checkpoint was made to run with fp8 activations

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.values.float() * self.scales).to(dtype)


@dataclass(frozen=True, slots=True)
class IntGroups:
    """A weight that is (codes − zeros) · scales. For each output, the inputs of a group share a zero point
    and a scale."""

    codes: Tensor  # uint8 [outputs, inputs]
    scales: Tensor  # [groups, outputs], in the checkpoint's precision
    zeros: Tensor | None  # uint8 [groups, outputs], zero points; None: half the range
    group_of: Tensor | None  # int64 [inputs]; None: groups are consecutive inputs
    bits: int

    @property
    def half_range(self) -> int:
        return 1 << (self.bits - 1)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [outputs, inputs], rounded only once, to `dtype`."""
        inputs = self.codes.shape[1]
        group_of = self.group_of
        if group_of is None:
            size = -(-inputs // len(self.scales))
            group_of = torch.arange(inputs, device=self.codes.device) // size
        wide = self.codes.float()
        if self.zeros is None:
            wide -= self.half_range
        else:
            wide -= self.zeros.float().index_select(0, group_of).t()
        return wide.mul_(self.scales.float().index_select(0, group_of).t()).to(dtype)


StoredPart: TypeAlias = Tensor | ScaledFp8 | IntGroups  # the weight of one module


class QuantizedReader:
    """Reads the weights of modules in a quantised checkpoint."""

    def __init__(self, weights: WeightSource, stored: StoredFormat) -> None:
        self.weights = weights
        self.stored = stored

    def find(self, module: str) -> StoredWeight | None:
        """How a module's weight is stored; None if it is not quantised. The tensors decide: a module that the
        format covers may be stored unquantised, but a module that it does not cover must not be quantised."""
        weight = self.stored.weight_of(module)
        if isinstance(self.weights, DummySource):
            return weight if _LAYER_NUMBER.search(module) else None
        if weight is not None and any(self.weights.has(f"{module}.{mark}") for mark in MARKS[weight.layout]):
            return weight
        if found := [mark for mark in ALL_MARKS if self.weights.has(f"{module}.{mark}")]:
            raise ModelLoadError(
                f"{module} has the tensor {found[0]!r} of a quantised module, but quantization_config says "
                f"{'that it is stored otherwise' if weight else 'that it is not quantised'}",
                param="model",
            )
        return None

    def is_in_blocks(self, module: str) -> bool:
        found = self.find(module)
        return found is not None and found.layout is Layout.FP8_BLOCKS

    def read(self, module: str, outputs: int, inputs: int, stored: StoredWeight) -> StoredPart:
        match stored.layout:
            case Layout.FP8_BLOCKS:
                return self._fp8_blocks(module, outputs, inputs)
            case Layout.FP8:
                return self._fp8(module, outputs, inputs, stored)
            case Layout.INT8:
                return self._int8(module, outputs, inputs, stored)
            case Layout.PACKED:
                return self._packed(module, outputs, inputs, stored)
            case Layout.GPTQ:
                return self._gptq(module, outputs, inputs, stored)
            case Layout.AWQ:
                return self._awq(module, outputs, inputs, stored)
            case Layout.BNB_4BIT:
                return self._bnb_4bit(module, outputs, inputs)
            case Layout.BNB_INT8:
                return self._bnb_int8(module, outputs, inputs)

    def read_plain(self, module: str, outputs: int, inputs: int) -> Tensor:
        """The weight of a module in the model's dtype, dequantised if needed."""
        stored = self.find(module)
        part: StoredPart
        if stored is None:
            part = self.weights.read_plain(f"{module}.weight", (outputs, inputs))
        else:
            part = self.read(module, outputs, inputs, stored)
        return dequantize_part(part, self.weights.dtype).to(self.weights.device)

    def _fp8_blocks(self, module: str, outputs: int, inputs: int) -> Tensor:
        """Dequantise a head's weight. Layers keep their blocks and do not use this method."""
        values = self._take(f"{module}.weight", _FP8, (outputs, inputs))
        shape = (-(-outputs // BLOCK), -(-inputs // BLOCK))
        scales = self._floats(self._scale_name(module), shape).float()
        scales = scales.repeat_interleave(BLOCK, dim=0)[:outputs]
        scales = scales.repeat_interleave(BLOCK, dim=1)[:, :inputs]
        return (values.float() * scales).to(self.weights.dtype)

    def _fp8(self, module: str, outputs: int, inputs: int, stored: StoredWeight) -> ScaledFp8:
        values = self._take(f"{module}.weight", _FP8, (outputs, inputs))
        shapes = [(), (1,), (1, 1)] if stored.scope == "tensor" else [(outputs, 1), (outputs,)]
        scales = self._floats(self._scale_name(module), *shapes).float()
        return ScaledFp8(
            values, scales.reshape(-1, 1).expand(outputs, 1).contiguous(), stored.has_quantized_inputs
        )

    def _int8(self, module: str, outputs: int, inputs: int, stored: StoredWeight) -> IntGroups:
        values = self._take(f"{module}.weight", torch.int8, (outputs, inputs))
        groups = _num_groups(module, inputs, stored)
        shapes: list[tuple[int, ...]] = (
            [(1,), (), (1, 1)] if stored.scope == "tensor" else [(outputs, groups)]
        )
        if stored.scope == "channel":
            shapes.append((outputs,))
        scales = self._floats(f"{module}.weight_scale", *shapes)
        zeros = None
        if not stored.is_symmetric:
            found = self._take(f"{module}.weight_zero_point", torch.int8, *shapes)
            zeros = _raised(found).reshape(-1, groups).expand(outputs, groups).t().contiguous()
        scales = scales.reshape(-1, groups).expand(outputs, groups).t().contiguous()
        return IntGroups(
            _raised(values), scales, zeros, self._order(module, "weight_g_idx", inputs, groups), 8
        )

    def _packed(self, module: str, outputs: int, inputs: int, stored: StoredWeight) -> IntGroups:
        bits, groups = stored.bits, _num_groups(module, inputs, stored)
        words = self._take(f"{module}.weight_packed", torch.int32, (outputs, -(-inputs * bits // 32)))
        if self._has(f"{module}.weight_shape"):
            given = self._take(f"{module}.weight_shape", (torch.int64, torch.int32), (2,), keep=True)
            if given.tolist() != [outputs, inputs]:
                raise ModelLoadError(
                    f"tensor '{module}.weight_shape' is {given.tolist()}, but config.json asks for "
                    f"{[outputs, inputs]}",
                    param="model",
                )
        shapes = [(outputs, groups), *([(outputs,)] if groups == 1 else [])]
        scales = self._floats(f"{module}.weight_scale", *shapes).reshape(outputs, groups).t().contiguous()
        zeros = None
        if not stored.is_symmetric:
            shape = (-(-outputs * bits // 32), groups)
            packed = self._take(f"{module}.weight_zero_point", torch.int32, shape)
            zeros = unpack(packed.t().contiguous(), bits)[:, :outputs].contiguous()
        order = self._order(module, "weight_g_idx", inputs, groups)
        return IntGroups(unpack(words, bits)[:, :inputs].contiguous(), scales, zeros, order, bits)

    def _gptq(self, module: str, outputs: int, inputs: int, stored: StoredWeight) -> IntGroups:
        bits, groups = stored.bits, _num_groups(module, inputs, stored)
        in_word = 32 // bits
        _check_multiple(module, outputs, inputs, in_word)
        words = self._take(f"{module}.qweight", torch.int32, (inputs // in_word, outputs))
        scales = self._floats(f"{module}.scales", (groups, outputs))
        packed = self._take(f"{module}.qzeros", torch.int32, (groups, outputs // in_word))
        if stored.has_lowered_zeros:  # add to the whole word at once, as the writer subtracted
            packed = packed + sum(1 << (bits * i) for i in range(in_word))
        codes = unpack(words.t().contiguous(), bits)
        order = self._order(module, "g_idx", inputs, groups)
        return IntGroups(codes, scales, unpack(packed, bits), order, bits)

    def _awq(self, module: str, outputs: int, inputs: int, stored: StoredWeight) -> IntGroups:
        groups = _num_groups(module, inputs, stored)
        _check_multiple(module, outputs, inputs, 8)
        words = self._take(f"{module}.qweight", torch.int32, (inputs, outputs // 8))
        scales = self._floats(f"{module}.scales", (groups, outputs))
        zeros = _awq_outputs(self._take(f"{module}.qzeros", torch.int32, (groups, outputs // 8)))
        return IntGroups(_awq_outputs(words).t().contiguous(), scales, zeros, None, 4)

    def _bnb_4bit(self, module: str, outputs: int, inputs: int) -> Tensor:
        """Codes into a table of 16 values, times the largest magnitude of each block. These magnitudes may be
        quantised too."""
        name, count = f"{module}.weight", outputs * inputs
        kind = next(
            (kind for kind in ("nf4", "fp4") if self._has(f"{name}.quant_state.bitsandbytes__{kind}")), None
        )
        if kind is None:
            raise ModelLoadError(
                f"{module} has no tensor quant_state.bitsandbytes__nf4 or __fp4", param="model"
            )
        state = self._json(f"{name}.quant_state.bitsandbytes__{kind}")
        size = state.get("blocksize")
        if not isinstance(size, int) or not 1 <= size <= _MAX_BLOCK_VALUES:
            raise ModelLoadError(f"{module} has blocksize = {size!r} in its quant_state", param="model")
        if state.get("shape") != [outputs, inputs]:
            raise ModelLoadError(
                f"{module} has shape = {state.get('shape')!r} in its quant_state, but config.json asks for "
                f"{[outputs, inputs]}",
                param="model",
            )
        half = -(-count // 2)
        packed = self._take(name, torch.uint8, (half, 1), (1, half)).flatten()
        table = self._floats(f"{name}.quant_map", (16,)).float()
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[:count]
        scales = self._bnb_scales(name, state, -(-count // size))
        values = table.index_select(0, codes.int()).mul_(scales.repeat_interleave(size)[:count])
        return values.view(outputs, inputs).to(self.weights.dtype)

    def _bnb_scales(self, name: str, state: dict[str, object], blocks: int) -> Tensor:
        if not self._has(f"{name}.nested_absmax"):
            return self._floats(f"{name}.absmax", (blocks,)).float()
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if not isinstance(size, int) or size < 1 or not isinstance(offset, int | float):
            raise ModelLoadError(
                f"{name} has nested_blocksize = {size!r} and nested_offset = {offset!r} in its quant_state",
                param="model",
            )
        codes = self._take(f"{name}.absmax", torch.uint8, (blocks,))
        table = self._floats(f"{name}.nested_quant_map", (256,)).float()
        largest = self._floats(f"{name}.nested_absmax", (-(-blocks // size),)).float()
        return table.index_select(0, codes.int()) * largest.repeat_interleave(size)[:blocks] + offset

    def _bnb_int8(self, module: str, outputs: int, inputs: int) -> Tensor:
        values = self._take(f"{module}.weight", torch.int8, (outputs, inputs))
        largest = self._floats(f"{module}.SCB", (outputs,)).float()
        if self._has(f"{module}.weight_format"):
            layout = int(self._take(f"{module}.weight_format", torch.uint8, (), (1,), keep=True))
            if layout != 0:
                raise ModelLoadError(
                    f"tensor '{module}.weight_format' is {layout}; supported: 0, rows in order", param="model"
                )
        return (values.float() * (largest / 127)[:, None]).to(self.weights.dtype)

    def _order(self, module: str, name: str, inputs: int, groups: int) -> Tensor | None:
        """The group of each input; None if groups are consecutive inputs."""
        if not self._has(f"{module}.{name}"):
            return None
        found = self._take(f"{module}.{name}", torch.int32, (inputs,), keep=True)
        if (found == -1).all() or groups == 1:  # never set, or only one group
            return None
        if found.min() < 0 or found.max() >= groups:
            raise ModelLoadError(
                f"tensor '{module}.{name}' names groups outside 0 to {groups - 1}", param="model"
            )
        plain = torch.arange(inputs, dtype=torch.int32) // -(-inputs // groups)
        return None if torch.equal(found, plain) else found.long().to(self.weights.device)

    def _scale_name(self, module: str) -> str:
        name = f"{module}.weight_scale"
        return name if self._has(name) else f"{name}_inv"

    def _has(self, name: str) -> bool:
        return not isinstance(self.weights, DummySource) and self.weights.has(name)

    def _floats(self, name: str, *shapes: Sequence[int]) -> Tensor:
        return self._take(name, _FLOATS, *shapes)

    def _take(
        self,
        name: str,
        dtypes: torch.dtype | Sequence[torch.dtype],
        *shapes: Sequence[int],
        keep: bool = False,
    ) -> Tensor:
        """Read a tensor of one of these dtypes and shapes to the model's device or, with `keep`, the CPU."""
        accepted = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        if isinstance(self.weights, DummySource):
            return _dummy(name, tuple(shapes[0]), accepted[0], self.weights.device)
        shape = next((each for each in shapes if tuple(each) == self.weights.shape_of(name)), shapes[0])
        tensor = self.weights.read(name, shape)
        if tensor.dtype not in accepted:
            raise ModelLoadError(
                f"tensor {name!r} is stored as {tensor.dtype}; quantization_config asks for "
                f"{' or '.join(map(str, accepted))}",
                param="model",
            )
        return tensor.cpu() if keep else tensor.to(self.weights.device)

    def _json(self, name: str) -> dict[str, object]:
        length = self.weights.shape_of(name) or (0,)
        found = self.weights.read(name, length)
        try:
            state = json.loads(bytes(found.tolist()))
        except ValueError:
            state = None
        if not isinstance(state, dict):
            raise ModelLoadError(f"tensor {name!r} is not a JSON object", param="model")
        return state


def dequantize_part(part: StoredPart, dtype: torch.dtype) -> Tensor:
    return part.to(dtype) if isinstance(part, Tensor) else part.dequantize(dtype)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] → uint8 [rows, words · 32 / bits]. The first value is in the lowest bits."""
    octets = words.contiguous().view(torch.uint8)  # little-endian
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _awq_outputs(words: Tensor) -> Tensor:
    """int32 [rows, outputs / 8] → uint8 [rows, outputs], in the order of outputs."""
    values = unpack(words, 4).view(len(words), -1, 8)
    return values[:, :, list(_AWQ_ORDER)].flatten(1)


def _raised(values: Tensor) -> Tensor:
    """int8 values plus 128, as uint8."""
    return values.view(torch.uint8) ^ 128


def _num_groups(module: str, inputs: int, stored: StoredWeight) -> int:
    if stored.group_size is None:
        return 1
    if inputs % stored.group_size:
        raise ModelLoadError(
            f"{module} has {inputs} inputs, which is no multiple of group_size = {stored.group_size}",
            param="model",
        )
    return inputs // stored.group_size


def _check_multiple(module: str, outputs: int, inputs: int, multiple: int) -> None:
    if outputs % multiple or inputs % multiple:
        raise ModelLoadError(
            f"{module} has {inputs} inputs and {outputs} outputs; both have to be multiples of {multiple}",
            param="model",
        )


def _dummy(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Dummy values that give weights of plausible magnitude, always the same for a name."""
    if dtype in _FLOATS:
        return torch.full(shape, 0.005, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
    if dtype == _FP8:
        return torch.randn(shape, device=device, generator=generator).to(_FP8)
    bounds = torch.iinfo(dtype)
    return torch.randint(bounds.min, bounds.max, shape, dtype=dtype, device=device, generator=generator)

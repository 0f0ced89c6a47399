"""Linear layers: `activation(x Wᵀ + b) + residual`, in the form that is fastest on the weight's device.

`Linear` is the plain form and the reference for the others. On a CPU `PackedLinear` keeps the weight in the
matrix kernel's blocked layout. The kernel applies bias, activation and residual while a tile is in registers.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES, bias_act_
from penstock.kernels.language import use_kernel
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.activation import activation
from penstock.layers.cpu_shapes import pad_rows, padded_size
from penstock.layers.fp8 import Fp8Linear
from penstock.layers.yield_points import yield_point

_PACK_ROWS = 512  # the batch size that the packed layout is tuned for; any size works


class LinearLayer(Protocol):
    in_features: int
    out_features: int

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [tokens, in] → [tokens, out]; `residual` [tokens, out] is added last.

        A layer may write to `out`, which nothing else reads, or ignore it.
        """
        ...


class Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None, act: str = "identity") -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.transposed = weight.t()  # transposing for each product costs measurable host time
        self.bias = bias
        self.act = None if act == "identity" else activation(act)
        self.kernel = act if act in ACTIVATION_CODES else None
        # The library's epilogue has the tanh form. In half precision it differs by less than rounding.
        self.gelu = act.startswith("gelu") and weight.dtype in (torch.bfloat16, torch.float16)

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if not isinstance(x, Tensor):
            x = dequantize(x, self.weight.dtype)
        if self.kernel is not None and use_kernel(x):
            if self.gelu and x.is_cuda and self.bias is not None:  # in the product's epilogue
                out = torch._addmm_activation(self.bias, x, self.transposed, use_gelu=True, out=out)
            else:  # the activation kernel adds the bias
                out = bias_act_(self._product(x, None, out), self.bias, self.kernel)
        else:
            out = self._product(x, self.bias, out)
            out = out if self.act is None else self.act(out)
        return out if residual is None else out + residual

    def _product(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if not x.is_cuda or x.dim() != 2:
            return F.linear(x, self.weight, bias)
        if bias is None:
            return torch.mm(x, self.transposed, out=out)
        return torch.addmm(bias, x, self.transposed, out=out)


def scratch_width(layer: LinearLayer) -> int:
    """The width of the `out` tensor that a layer writes to; 0 if it ignores `out`."""
    return layer.out_features if isinstance(getattr(layer, "base", layer), Linear) else 0


class PackedLinear:
    """A CPU linear layer that uses the matrix library's weight layout and fused epilogues.

    The runner pads whole steps. Other numbers of rows, such as the rows of a head, are padded here.
    """

    FUSED: ClassVar[dict[str, tuple[str, str]]] = {
        "identity": ("none", ""),
        "gelu": ("gelu", "none"),
        "relu": ("relu", ""),
        "tanh": ("tanh", ""),
    }

    def __init__(self, weight: Tensor, bias: Tensor | None, act: str = "identity") -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight: Tensor = _mkldnn()._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self.fuses_activation = act in self.FUSED
        self.op, self.algorithm = self.FUSED.get(act, ("none", ""))
        self.act = activation(act)

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        yield_point()
        x = dequantize(x, self.weight.dtype)
        rows = len(x)
        if (size := padded_size(rows)) == rows:
            return self._product(x, residual)
        return self._product(pad_rows(x, size), pad_rows(residual, size))[:rows]

    def _product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        product: Tensor
        if residual is not None and self.op == "none" and self.fuses_activation:
            product = _mkldnn()._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
            return product
        product = _mkldnn()._linear_pointwise(x, self.weight, self.bias, self.op, [], self.algorithm)
        if not self.fuses_activation:
            product = self.act(product)
        return product if residual is None else product + residual


def make_linear(weight: Tensor, bias: Tensor | None, act: str, quantization: str | None) -> LinearLayer:
    """Choose the form of a layer by the weight's device and `quantization`."""
    if quantization == "fp8" and Fp8Linear.fits(weight):
        return Fp8Linear(weight, bias, act)
    if weight.device.type != "cpu":
        return Linear(weight, bias, act)
    if quantization == "int8":
        from penstock.layers.int8 import Int8Linear

        return Int8Linear(weight, bias, act)
    return PackedLinear(weight, bias, act) if _can_pack(weight.dtype) else Linear(weight, bias, act)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(_mkldnn()._is_mkldnn_bf16_supported()))


def _mkldnn() -> Any:
    return torch.ops.mkldnn

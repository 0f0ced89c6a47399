"""Embeds patches of pixels: rescaling, normalisation and the projection in one product."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.image_processor import ImageProcessorSpec
from penstock.layers.build import LayerBuilder
from penstock.layers.linear import make_linear

_MIDDLE = 128  # subtracted from each byte: the centred values are exact in bf16
_ALIGNMENT = 16  # inputs are padded to a multiple of this, because other widths run slow kernels


class PatchEmbedding:
    """weight · ((value · rescale − mean) / std) + bias for patches uint8 [patches, values].

    The affine transform of each channel is folded into weight and bias in fp32. So the product reads bytes
    minus `_MIDDLE`, and normalised pixels are never rounded.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, pixels: ImageProcessorSpec, dtype: torch.dtype
    ) -> None:
        """`weight` [hidden, values] and `bias` [hidden] in fp32, with values in the order of the patches."""
        hidden, values = weight.shape
        channel = torch.arange(values, device=weight.device)
        channel = channel % 3 if pixels.channels_last else channel // (values // 3)
        mean, std = (weight.new_tensor(each, dtype=torch.float64) for each in (pixels.mean, pixels.std))
        scale = (pixels.rescale_factor / std)[channel]
        constant = weight.double() @ ((-mean / std)[channel] + _MIDDLE * scale)
        if bias is not None:
            constant += bias
        padded = weight.new_zeros((hidden, -(-values // _ALIGNMENT) * _ALIGNMENT))
        padded[:, :values] = weight * scale
        self.num_values, self.dtype = values, dtype
        self.linear = make_linear(padded.to(dtype), constant.to(dtype), "identity", None)

    @classmethod
    def read(
        cls, build: LayerBuilder, name: str, hidden: int, pixels: ImageProcessorSpec, *, bias: bool = True
    ) -> PatchEmbedding:
        """Read the weights of a convolution, or of a linear layer if the channels of patches come last."""
        size, weights = pixels.patch_size, build.weights
        shape = (hidden, 3 * size * size) if pixels.channels_last else (hidden, 3, size, size)
        weight = weights.read(f"{name}.weight", shape).float().reshape(hidden, -1).to(weights.device)
        added = weights.read(f"{name}.bias", (hidden,)).float().to(weights.device) if bias else None
        return cls(weight, added, pixels, weights.dtype)

    def __call__(self, patches: Tensor) -> Tensor:
        """[patches, hidden]"""
        centred = patches.new_zeros((len(patches), self.linear.in_features), dtype=self.dtype)
        centred[:, : self.num_values] = patches
        return self.linear(centred.sub_(_MIDDLE))

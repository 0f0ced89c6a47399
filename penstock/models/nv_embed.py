"""NV-Embed: a bidirectional Mistral whose states attend to a trained set of latent vectors.

Keys and values are constants, so they are multiplied into the query and output projections when the model is
built. This reduces the attention to two products and a softmax over the latent vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.files import positive_integer
from penstock.errors import ModelLoadError
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.linear import make_linear
from penstock.layers.mlp import GatedMLP
from penstock.models.decoder import mistral_shape
from penstock.models.decoder_layers import Decoder, DecoderShape
from penstock.models.options import require
from penstock.types import Task

_PREFIX = "latent_attention_model."
_EPS = 1e-5  # default of torch's LayerNorm
_WIDENING = 4  # width of the feed-forward block, relative to the hidden size
_FILE = Path("config.json")
_KEY = "latent_attention_config"


@dataclass(frozen=True, slots=True)
class LatentShape:
    hidden: int
    latents: int
    heads: int
    head_dim: int


class LatentAttention:
    """states [tokens, hidden] → [tokens, hidden]: cross-attention to the latent vectors, then a gated
    feed-forward block, both pre-norm with a residual."""

    def __init__(self, build: LayerBuilder, shape: LatentShape) -> None:
        attention, block = (f"{_PREFIX}cross_attend_blocks.{i}." for i in range(2))
        self.shape = shape
        self.attention_norm = build.norm(attention + "norm", shape.hidden, _EPS)
        to_scores, to_context = _folded(build, attention, shape)
        self.to_scores = make_linear(to_scores, None, "identity", None)
        self.to_context = make_linear(to_context, None, "identity", None)
        self.mlp_norm = build.norm(block + "norm", shape.hidden, _EPS)
        inner = _WIDENING * shape.hidden
        gate_up = build.linear(block + "fn.net.0", shape.hidden, 2 * inner)
        down = build.linear(block + "fn.net.2", inner, shape.hidden)
        self.mlp = GatedMLP(gate_up, down, "gelu", gate_first=False)

    def __call__(self, states: Tensor) -> Tensor:
        scores = self.to_scores(self.attention_norm(states))
        split = scores.view(-1, self.shape.heads, self.shape.latents)
        weights = F.softmax(split, dim=-1, dtype=torch.float32).to(states.dtype)
        states = self.to_context(weights.flatten(1), states)
        return self.mlp(self.mlp_norm(states), states)


class NVEmbed(Decoder):
    def __init__(self, build: LayerBuilder, shape: DecoderShape, latent: LatentShape) -> None:
        super().__init__(build, shape)
        self.latent_attention = LatentAttention(build, latent)

    def __call__(self, batch: Batch) -> Tensor:
        return self.latent_attention(super().__call__(batch))


def nv_embed(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    """Build NV-Embed without a sliding window: its published code ignores the window in config.json."""
    require(config, mask_type="b", add_eos=True, is_mask_instruction=True)
    shape = mistral_shape(config)
    shape = replace(shape, sliding=(False,) * shape.layers, reach=None)
    return NVEmbed(build, shape, _latent_shape(config, shape.hidden))


def _latent_shape(config: Mapping[str, Any], hidden: int) -> LatentShape:
    given = config.get(_KEY)
    if not isinstance(given, dict):
        raise ModelLoadError(f"config.json has no {_KEY}, the sizes of the latent attention")
    require(given, hidden_dim=hidden, latent_dim=hidden, output_normalize=True)
    names = ("num_latents_value", "num_cross_heads", "cross_dim_head")
    return LatentShape(hidden, *(positive_integer(given, name, file=_FILE, high=1 << 16) for name in names))


def _folded(build: LayerBuilder, prefix: str, shape: LatentShape) -> tuple[Tensor, Tensor]:
    """The weights from states to scores, [heads · latents, hidden], and from the softmax to the context,
    [hidden, heads · latents]. They are multiplied in fp32."""
    weights = build.weights
    device, inner = weights.device, shape.heads * shape.head_dim

    def read(name: str, *size: int) -> Tensor:
        return weights.read_plain(name, size).to(device=device, dtype=torch.float32)

    latents = read(_PREFIX + "latents", shape.latents, shape.hidden)
    scale, shift = (read(f"{prefix}norm_context.{part}", shape.hidden) for part in ("weight", "bias"))
    context = F.layer_norm(latents, (shape.hidden,), scale, shift, _EPS)
    both = F.linear(context, read(prefix + "fn.to_kv.weight", 2 * inner, shape.hidden))
    key, value = (part.view(shape.latents, shape.heads, -1) for part in both.chunk(2, dim=-1))
    query = read(prefix + "fn.to_q.weight", inner, shape.hidden).view(shape.heads, shape.head_dim, -1)
    out = read(prefix + "fn.to_out.weight", shape.hidden, inner).view(shape.hidden, shape.heads, -1)
    to_scores = torch.einsum("lhd,hdi->hli", key, query).mul_(shape.head_dim**-0.5).flatten(0, 1)
    to_context = torch.einsum("ohd,lhd->ohl", out, value).flatten(1)
    return to_scores.to(weights.dtype), to_context.to(weights.dtype).contiguous()

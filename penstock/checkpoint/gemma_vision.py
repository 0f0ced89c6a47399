"""Reads `vision_config` of config.json for Gemma 4's vision tower, which EmbeddingGemma 2 uses.

A folder without a vision tower, or without an image processor, is a text model. Every key is read, listed as
harmless, or refused. Defaults are those of transformers. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoint.files import shown
from penstock.checkpoint.image_processor import ImageProcessorSpec, SoftTokens
from penstock.checkpoint.image_processor_files import read_image_processor
from penstock.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class GemmaVisionShape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    act: str
    eps: float
    rope_base: float
    num_positions: int  # entries of each of the two position tables
    pool: int  # a token is the mean of pool × pool patches
    is_clipped: bool  # inputs and outputs of linear layers are clamped to stored bounds
    is_standardized: bool  # pooled features have a stored bias and scale


@dataclass(frozen=True, slots=True)
class GemmaVision:
    shape: GemmaVisionShape
    pixels: ImageProcessorSpec


def read_gemma_vision(folder: Path | None, config: Mapping[str, Any]) -> GemmaVision | None:
    """Read tower and image processor; None for a text model. `config` is the content of config.json."""
    values = config.get("vision_config")
    pixels = None if folder is None or values is None else read_image_processor(folder, config)
    if pixels is None:
        return None
    if not isinstance(values, Mapping):
        raise ModelLoadError(f"config.json has vision_config = {shown(values)}; it has to be an object")
    shape = _read_shape(values)
    geometry = pixels.geometry
    if not isinstance(geometry, SoftTokens):
        raise ModelLoadError(f"the image processor in {folder} is not that of a Gemma 4 model", param="model")
    if geometry.pooling_kernel_size != shape.pool:
        raise _wrong("pooling_kernel_size", shape.pool, f"{geometry.pooling_kernel_size}, as the processor's")
    if geometry.max_soft_tokens * shape.pool > shape.num_positions:
        raise _wrong(
            "position_embedding_size",
            shape.num_positions,
            f"at least {geometry.max_soft_tokens * shape.pool}, the patches of the longest image",
        )
    return GemmaVision(shape, pixels)


def _read_shape(values: Mapping[str, Any]) -> GemmaVisionShape:
    keys = _Keys(values)
    heads = keys.integer("num_attention_heads", 12, 1024)
    rope = values.get("rope_parameters") or {}
    shape = GemmaVisionShape(
        hidden=keys.integer("hidden_size", 768, 1 << 16),
        layers=keys.integer("num_hidden_layers", 16, 1024),
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", 12, 1024),
        head_dim=keys.integer("head_dim", 64, 1024),
        intermediate=keys.integer("intermediate_size", 3072, 1 << 20),
        act=str(keys.take("hidden_activation", "gelu_pytorch_tanh")),
        eps=float(keys.take("rms_norm_eps", 1e-6)),
        rope_base=float(rope.get("rope_theta", 100.0)),
        num_positions=keys.integer("position_embedding_size", 10_240, 1 << 20),
        pool=keys.integer("pooling_kernel_size", 3, 64),
        is_clipped=keys.flag("use_clipped_linears"),
        is_standardized=keys.flag("standardize"),
    )
    keys.integer("patch_size", 16, 256)  # read_image_processor compares it with the processor's
    if rope.get("rope_type", "axial") not in _ROPE_TYPES or set(rope) - {"rope_type", "rope_theta"}:
        raise _wrong("rope_parameters", rope, f"an object with rope_theta and rope_type {_ROPE_TYPES[0]!r}")
    if values.get("global_head_dim") not in (None, shape.head_dim):
        raise _wrong("global_head_dim", values["global_head_dim"], f"{shape.head_dim}, as head_dim")
    if shape.head_dim % 4 or shape.heads % shape.kv_heads:
        raise _wrong("head_dim", shape.head_dim, "a multiple of 4, with key heads that divide the heads")
    keys.check_all_read()
    return shape


_ROPE_TYPES = ("axial", "default")  # two names of the same type
# Keys for training and for libraries. attention_bias has no effect: projections never have a bias.
# max_position_embeddings is not used.
_HARMLESS = """
architectures attention_bias attention_dropout attn_implementation chunk_size_feed_forward
default_output_length dtype global_head_dim id2label initializer_range is_encoder_decoder label2id
max_position_embeddings model_type output_attentions output_hidden_states problem_type return_dict
rope_parameters torch_dtype transformers_version
"""


class _Keys:
    """Reads keys, records them, and refuses all others."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.read: set[str] = set()

    def take(self, name: str, default: Any) -> Any:
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int, high: int) -> int:
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise _wrong(name, value, f"an integer from 1 to {high:,}")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def check_all_read(self) -> None:
        if self.values.get("model_type") not in (None, "gemma4_vision"):
            raise _wrong("model_type", self.values["model_type"], "'gemma4_vision'")
        known = self.read | set(_HARMLESS.split())
        for name, value in self.values.items():
            if value and name not in known and not name.startswith("_"):
                raise ModelLoadError(
                    f"config.json has vision_config.{name} = {shown(value)}, which is not known; known: "
                    + ", ".join(sorted(self.read)),
                    param="model",
                )


def _wrong(name: str, value: Any, accepted: str) -> ModelLoadError:
    return ModelLoadError(
        f"config.json has vision_config.{name} = {shown(value)}; it has to be {accepted}", param="model"
    )

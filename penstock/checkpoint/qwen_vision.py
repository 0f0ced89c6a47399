"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: what `vision_config` of config.json says.

Every key is read, listed as harmless, or refused. Defaults are those of transformers. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from penstock.checkpoint.families import Family
from penstock.checkpoint.files import shown
from penstock.errors import ModelLoadError

MAX_WINDOW = 64  # patches; a window of this size is still a short row for attention


@dataclass(frozen=True, slots=True)
class QwenVisionShape:
    """The properties in which the three towers differ."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    out: int  # width of a token's vector
    patch_size: int
    frames: int  # frames per patch
    merge: int  # patches per token, down and across
    act: str
    has_rms_norms: bool = False  # with RMS norms and a gated MLP
    has_patch_bias: bool = False
    full_layers: frozenset[int] | None = None  # attend to the whole image, others to windows; None: all
    window: int = 0  # tokens along each side of a window
    position_side: int = 0  # entries along each side of the position table; 0: none
    deep_layers: tuple[int, ...] = ()  # layers whose outputs give DeepStack features for the language model
    mlp_names: tuple[str, str] = ("fc1", "fc2")
    merger_names: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")  # norm, up, down

    @property
    def feature_width(self) -> int:
        """Width of a token's vector together with its DeepStack features."""
        return self.out * (1 + len(self.deep_layers))


def read_qwen_vision(kind: str, config: Mapping[str, Any]) -> QwenVisionShape:
    """Read the tower of a model of `kind` "qwen2_vl", "qwen2_5_vl" or "qwen3_vl".

    `config` is the content of config.json, with the text model's sizes at its top level.
    """
    values = config.get("vision_config")
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ModelLoadError(f"config.json has vision_config = {shown(values)}; it has to be an object")
    shape = _READERS[kind](_Keys(values))
    if shape.out != config.get("hidden_size"):
        raise ModelLoadError(
            f"vision_config in config.json gives vectors of {shape.out} numbers, but the text model has "
            f"hidden_size = {config.get('hidden_size')}"
        )
    if len(shape.deep_layers) >= int(config.get("num_hidden_layers") or 0):
        raise ModelLoadError(
            f"deepstack_visual_indexes in config.json has {len(shape.deep_layers)} layers; it has to have "
            "fewer than the text model's num_hidden_layers"
        )
    if shape.hidden % (4 * shape.heads):
        raise ModelLoadError(
            f"vision_config in config.json has {shape.heads} heads of {shape.hidden} numbers together; "
            "rotary positions need a multiple of 4 for each"
        )
    return shape


def check_qwen_vision(family: Family, config: Mapping[str, Any]) -> None:
    """Refuse a tower whose configuration is not supported."""
    if family.qwen_vision is not None:
        read_qwen_vision(tower_kind(family.qwen_vision, config), config)


def tower_kind(default: str, config: Mapping[str, Any]) -> str:
    """The kind of a model's tower: that of the model in vlm_config, otherwise its family's."""
    kind = config.get("vlm_model_type") or default
    if kind not in _READERS:
        raise ModelLoadError(
            f"config.json has a vlm_config of model_type {shown(kind)}, which is not supported; supported: "
            + ", ".join(_READERS),
            param="model",
        )
    return str(kind)


class _Keys:
    """Reads keys, records them, and refuses all others."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.read: set[str] = set()

    def integer(self, *names: str, default: int, high: int = 1 << 16) -> int:
        """The value of the first key that is set. All keys that are set must agree."""
        self.read.update(names)
        given = {name: self.values[name] for name in names if self.values.get(name) is not None}
        for name, value in given.items():
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
                raise _wrong(name, value, f"an integer from 1 to {high:,}")
        if len(set(given.values())) > 1:
            raise _wrong(names[-1], given[names[-1]], f"equal to {names[0]} = {given[names[0]]}")
        return int(next(iter(given.values()), default))

    def layers(self, name: str, count: int, default: Sequence[int]) -> tuple[int, ...]:
        """A list of layer numbers, in ascending order."""
        self.read.add(name)
        value = self.values.get(name, default)
        is_list = isinstance(value, list | tuple) and all(
            isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < count for layer in value
        )
        if not is_list or list(value) != sorted(set(value)):
            raise _wrong(name, value, f"a rising list of layers below {count}")
        return tuple(value)

    def text(self, name: str, default: str) -> str:
        self.read.add(name)
        value = self.values.get(name) or default
        if not isinstance(value, str):
            raise _wrong(name, value, "a string")
        return value

    def check_all_read(self) -> None:
        """Refuse unknown keys, and values that this tower does not compute."""
        for name, accepted in _FIXED.items():
            if self.values.get(name) not in (None, accepted):
                raise _wrong(name, self.values[name], repr(accepted))
        rope = self.values.get("rope_parameters")
        if rope is not None and any(rope.get(key) not in (None, value) for key, value in _ROPE.items()):
            raise _wrong("rope_parameters", rope, repr(_ROPE))
        known = self.read | set(_FIXED) | set(_HARMLESS.split())
        for name, value in self.values.items():
            if value and name not in known and not name.startswith("_"):
                raise ModelLoadError(
                    f"config.json has vision_config.{name} = {shown(value)}, which is not known; known: "
                    + ", ".join(sorted(self.read))
                )


_FIXED = {"in_channels": 3, "in_chans": 3}
_ROPE = {"rope_type": "axial", "rope_theta": 10_000.0}
# Keys for training, for libraries, and for video, which is refused.
_HARMLESS = """
architectures attn_implementation chunk_size_feed_forward dtype id2label initializer_range
is_encoder_decoder label2id model_type output_attentions output_hidden_states problem_type return_dict
rope_parameters tokens_per_second torch_dtype transformers_version
"""


def _qwen2(keys: _Keys) -> QwenVisionShape:
    hidden = keys.integer("embed_dim", default=1280)
    shape = QwenVisionShape(
        hidden=hidden,
        intermediate=int(hidden * keys.integer("mlp_ratio", default=4, high=64)),
        out=keys.integer("hidden_size", default=3584),
        act=keys.text("hidden_act", "quick_gelu"),
        **_shared(keys, depth=32, patch_size=14),
    )
    keys.check_all_read()
    return shape


def _qwen2_5(keys: _Keys) -> QwenVisionShape:
    shape = QwenVisionShape(
        hidden=keys.integer("hidden_size", default=3584),
        intermediate=keys.integer("intermediate_size", default=3420, high=1 << 20),
        out=keys.integer("out_hidden_size", default=3584),
        act=keys.text("hidden_act", "silu"),
        has_rms_norms=True,
        **_shared(keys, depth=32, patch_size=14),
    )
    size = keys.integer("window_size", default=112)
    full = keys.layers("fullatt_block_indexes", shape.layers, (7, 15, 23, 31))
    keys.check_all_read()
    window = size // shape.merge // shape.patch_size
    if not 1 <= (window * shape.merge) ** 2 <= MAX_WINDOW:
        raise _wrong("window_size", size, f"so large that a window has 1 token to {MAX_WINDOW} patches")
    return replace(shape, full_layers=frozenset(full), window=window)


def _qwen3(keys: _Keys) -> QwenVisionShape:
    shape = QwenVisionShape(
        hidden=keys.integer("hidden_size", default=1152),
        intermediate=keys.integer("intermediate_size", default=4304, high=1 << 20),
        out=keys.integer("out_hidden_size", default=3584),
        act=keys.text("hidden_act", "gelu_pytorch_tanh"),
        has_patch_bias=True,
        mlp_names=("linear_fc1", "linear_fc2"),
        merger_names=("norm", "linear_fc1", "linear_fc2"),
        **_shared(keys, depth=27, patch_size=16),
    )
    entries = keys.integer("num_position_embeddings", default=2304, high=1 << 20)
    deep = keys.layers("deepstack_visual_indexes", shape.layers, (8, 16, 24))
    keys.check_all_read()
    if isqrt(entries) ** 2 != entries:
        raise _wrong("num_position_embeddings", entries, "a square number")
    return replace(shape, position_side=isqrt(entries), deep_layers=deep)


_READERS = {"qwen2_vl": _qwen2, "qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3}


def _shared(keys: _Keys, *, depth: int, patch_size: int) -> dict[str, Any]:
    return {
        "layers": keys.integer("depth", default=depth, high=1024),
        "heads": keys.integer("num_heads", "num_attention_heads", default=16, high=1024),
        "patch_size": keys.integer("patch_size", "spatial_patch_size", default=patch_size, high=256),
        "frames": keys.integer("temporal_patch_size", default=2, high=64),
        "merge": keys.integer("spatial_merge_size", default=2, high=16),
    }


def _wrong(name: str, value: Any, accepted: str) -> ModelLoadError:
    return ModelLoadError(
        f"config.json has vision_config.{name} = {shown(value)}; it has to be {accepted}", param="model"
    )

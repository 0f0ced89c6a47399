"""How an image stands in a prompt: which token is its placeholder, what is around it, and which text a
retriever of pages puts beside an image alone.

Read from the files of the processor and the tokenizer. Defaults are those of the processor classes in
transformers and colpali-engine. Free of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.files import optional_json
from penstock.checkpoint.identity import Identity
from penstock.checkpoint.image_processor import FixedSize, ImageProcessorSpec, PixelRange, SoftTokens, Tiles
from penstock.checkpoint.tokenizer_settings import special_tokens, token_text
from penstock.errors import ModelLoadError

QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_PAGE = f"<|im_start|>user\n{QWEN_IMAGE}Describe the image.<|im_end|><|endoftext|>"
_VBERT_PAGE = "<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:"
_PAGE_CLASS = re.compile(r"(Col|Bi)(Qwen|Pali|Idefics|Smol|ModernVBert|ModernVBERT)", re.ASCII)


class ImagePromptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The text of an image. Each placeholder in it is one run of tokens that the vision tower fills."""

    placeholder: str  # a token of the tokenizer
    token_id: int | None = None  # its id, as config.json has it
    inline: str  # an image among texts; it has the placeholder once
    page: str | None = None  # an image alone, where it has a text of its own; it has the placeholder once
    before: str = ""  # stands around the run of placeholders, wherever one is
    after: str = ""
    is_tiled: bool = False  # tiles are named by their row and column
    adds_special_tokens: bool = True  # the tokenizer's own tokens stand around a page


def read_image_prompt(
    folder: Path, config: Mapping[str, Any], processor: ImageProcessorSpec
) -> ImagePromptSpec | None:
    """None for models that read images apart from texts."""
    geometry, names = processor.geometry, _Names(folder, config)
    if isinstance(geometry, PixelRange):
        page = names.page(_QWEN_PAGE)
        return ImagePromptSpec(
            placeholder="<|image_pad|>", token_id=names.token_id, inline=QWEN_IMAGE, page=page
        )
    if isinstance(geometry, SoftTokens):
        image, begin, end = (names.token(key) for key in ("image_token", "boi_token", "eoi_token"))
        return ImagePromptSpec(
            placeholder=image, token_id=names.token_id, inline=image, page=image, before=begin, after=end
        )
    if isinstance(geometry, Tiles):
        return ImagePromptSpec(
            placeholder="<image>",
            token_id=names.token_id,
            inline="<image>",
            page=names.page(_VBERT_PAGE),
            is_tiled=True,
        )
    if isinstance(geometry, FixedSize) and processor.tokens_per_tile:
        return _paligemma(names)
    return None


def _paligemma(names: _Names) -> ImagePromptSpec:
    """PaliGemma: all images of a prompt come first, then the sequence begins."""
    words = str(names.processor.get("visual_prompt_prefix") or "Describe the image.")
    begin = special_tokens(names.tokenizer).get("bos_token", "<bos>")
    return ImagePromptSpec(
        placeholder="<image>",
        token_id=names.token_id,
        inline="<image>",
        page=f"<image>{begin}{words.removeprefix('<image>').removeprefix(begin)}\n",
        adds_special_tokens=False,
    )


class _Names:
    """What the files of one model call things."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder, self.config = folder, config
        self.processor = optional_json(folder / "processor_config.json")
        self.tokenizer = optional_json(folder / "tokenizer_config.json")

    @property
    def token_id(self) -> int | None:
        outer = self.config.get("vlm_config")
        for values in (self.config, outer if isinstance(outer, dict) else {}):
            for key in ("image_token_id", "image_token_index"):
                if isinstance(values.get(key), int):
                    return int(values[key])
        return None

    def page(self, default: str) -> str | None:
        """The text beside an image alone, for retrievers of pages."""
        if (given := self.processor.get("visual_prompt_prefix")) is not None:
            return str(given)
        return default if self._is_retriever else None

    @property
    def _is_retriever(self) -> bool:
        names = [*(self.config.get("architectures") or ()), self.processor.get("processor_class")]
        return any(_PAGE_CLASS.match(str(name)) for name in names)

    def token(self, key: str) -> str:
        """A token that only models with images have; files keep it in one of several places."""
        extra = self.tokenizer.get("extra_special_tokens")
        for values in (self.tokenizer, extra if isinstance(extra, dict) else {}):
            if (text := token_text(values.get(key))) is not None:
                return text
        raise ModelLoadError(
            f"{self.folder / 'tokenizer_config.json'} has no {key}, which stands around an image",
            param="model",
        )


class _PixelLimits(msgspec.Struct, frozen=True):
    """The pixels that the published code of a model uses, whatever its processor's file says."""

    names: str  # a pattern that the model's published names match, lower case
    min_pixels: int
    max_pixels: int


_LIMITS = (
    _PixelLimits(r"gme-?qwen2-?vl", 256 * 28 * 28, 1280 * 28 * 28),
    _PixelLimits(r"qwen3-vl-(embedding|reranker)", 4 * 32 * 32, 1800 * 32 * 32),
)


def with_published_pixels(spec: ImageProcessorSpec, identity: Identity) -> ImageProcessorSpec:
    """The processor with the limits that the model's published code sets, for models known by name."""
    if not isinstance(spec.geometry, PixelRange):
        return spec
    for limits in _LIMITS:
        if identity.is_named(limits.names, with_origin=True):
            geometry = msgspec.structs.replace(
                spec.geometry, min_pixels=limits.min_pixels, max_pixels=limits.max_pixels
            )
            return msgspec.structs.replace(spec, geometry=geometry)
    return spec

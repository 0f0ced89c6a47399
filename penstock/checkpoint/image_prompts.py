"""How an image is written in a prompt: its placeholder token, the text around it, and the text that a page
retriever adds to an image alone.

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
from penstock.checkpoint.pages import page_has_one_begin
from penstock.checkpoint.tokenizer_settings import special_tokens, token_text
from penstock.errors import ModelLoadError

QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_PAGE = f"<|im_start|>user\n{QWEN_IMAGE}Describe the image.<|im_end|><|endoftext|>"
_JINA_PAGE = f"<|im_start|>user\n{QWEN_IMAGE}Describe the image.<|im_end|>\n"
_VBERT_PAGE = "<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:"
_PAGE_CLASS = re.compile(r"(Col|Bi)(Qwen|Pali|Idefics|Smol|ModernVBert|ModernVBERT)", re.ASCII)


class ImagePromptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The text of an image. Each placeholder expands to a run of tokens, which the vision tower fills."""

    placeholder: str  # a token of the tokenizer
    token_id: int | None = None  # its id in config.json
    inline: str  # an image among texts, with one placeholder
    page: str | None = None  # an image alone, with one placeholder; None: as `inline`
    before: str = ""  # put before every run of placeholders
    after: str = ""  # put after every run of placeholders
    is_tiled: bool = False  # tiles are labelled by row and column
    adds_special_tokens: bool = True  # add the tokenizer's special tokens to a page
    is_alone: bool = False  # an image is a whole input, never combined with text
    has_plain_positions: bool = False  # image tokens have the positions of text tokens: 0, 1, 2 …
    pools_image: bool = False  # pool only the tokens of the image, its start and its end


def read_image_prompt(
    folder: Path, config: Mapping[str, Any], processor: ImageProcessorSpec, identity: Identity
) -> ImagePromptSpec | None:
    """Read the prompt of images; None for models that read images separately from texts."""
    geometry, names = processor.geometry, _Names(folder, config)
    if isinstance(geometry, PixelRange):
        return ImagePromptSpec(
            placeholder="<|image_pad|>",
            token_id=names.token_id,
            inline=QWEN_IMAGE,
            page=_JINA_PAGE if names.is_jina else names.page(_QWEN_PAGE),
            is_alone=names.is_jina,
            pools_image=names.is_jina,
            has_plain_positions=_published(identity).has_plain_positions,
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
        return _paligemma(names, identity)
    return None


def _paligemma(names: _Names, identity: Identity) -> ImagePromptSpec:
    """PaliGemma's prompt: all images come first, then the begin token.

    colpali-engine's prompt has a begin token since 0.3.4, and PaliGemma's processor adds a second one.
    transformers' own class has one, and so had the engine when it trained ColPali to v1.3."""
    words = str(names.processor.get("visual_prompt_prefix") or "Describe the image.")
    begin = special_tokens(names.tokenizer).get("bos_token", "<bos>")
    begins = begin if page_has_one_begin(names.config, identity) else begin + begin
    return ImagePromptSpec(
        placeholder="<image>",
        token_id=names.token_id,
        inline="<image>",
        page=f"<image>{begins}{words.removeprefix('<image>').removeprefix(begin)}\n",
        adds_special_tokens=False,
        is_alone=True,
    )


class _Names:
    """Names and tokens in the files of one model."""

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
        """The text of an image alone, for page retrievers."""
        if (given := self.processor.get("visual_prompt_prefix")) is not None:
            return str(given)
        return default if self._is_retriever else None

    @property
    def is_jina(self) -> bool:
        return any(
            str(name).startswith("JinaEmbeddingsV4") for name in self.config.get("architectures") or ()
        )

    @property
    def _is_retriever(self) -> bool:
        names = [*(self.config.get("architectures") or ()), self.processor.get("processor_class")]
        return any(_PAGE_CLASS.match(str(name)) for name in names)

    def token(self, key: str) -> str:
        """A special token for images, from whichever file has it."""
        extra = self.tokenizer.get("extra_special_tokens")
        for values in (self.tokenizer, extra if isinstance(extra, dict) else {}):
            if (text := token_text(values.get(key))) is not None:
                return text
        number = self.config.get(f"{key}_id")
        for token in optional_json(self.folder / "tokenizer.json").get("added_tokens") or ():
            if number is not None and token.get("id") == number:
                return str(token["content"])
        raise ModelLoadError(
            f"{self.folder / 'tokenizer_config.json'} has no {key}, which surrounds an image in the prompt",
            param="model",
        )


class _PublishedCode(msgspec.Struct, frozen=True):
    """How the published code of a model treats images. It overrides the processor's file."""

    names: str = ""  # pattern of the published names, in lower case
    min_pixels: int | None = None  # None: from the processor's file
    max_pixels: int = 0
    uses_qwen_vl_utils: bool = True  # qwen-vl-utils resizes images, not transformers' processor
    first_range: tuple[int, int] | None = None  # (min, max) pixels that an image is resized to first
    has_plain_positions: bool = False


_UNKNOWN = _PublishedCode()
_PUBLISHED = (
    # gme_inference.py and modeling_gme_qwen2vl.py: fetch_image resizes with the limits of qwen-vl-utils, and
    # the processor then with 256 to 1280 tokens. The decoder gets vectors without positions, so these are
    # 0, 1, 2 … on all axes.
    _PublishedCode(
        r"gme-?qwen2-?vl",
        256 * 28 * 28,
        1280 * 28 * 28,
        first_range=(4 * 28 * 28, 16_384 * 28 * 28),
        has_plain_positions=True,
    ),
    # qwen3_vl_embedding.py of its repositories and of QwenLM/Qwen3-VL-Embedding: 4 to 1800 tokens, resized by
    # qwen-vl-utils alone, whatever preprocessor_config.json says (1280).
    _PublishedCode(r"qwen3-vl-embedding", 4 * 32 * 32, 1800 * 32 * 32),
    # scripts/qwen3_vl_reranker.py and preprocessor_config.json of its repositories: 4 to 1280 tokens. The
    # version in QwenLM/Qwen3-VL-Embedding allows 1800 since 8ce3aab.
    _PublishedCode(r"qwen3-vl-reranker", 4 * 32 * 32, 1280 * 32 * 32),
    # processing_colqwen3.py of TomoroAI's repositories: at most 1280 tokens unless a caller says otherwise.
    _PublishedCode(r"tomoro-(ai-)?colqwen3-embed", max_pixels=1280 * 32 * 32, uses_qwen_vl_utils=False),
)


def _published(identity: Identity) -> _PublishedCode:
    named = (each for each in _PUBLISHED if identity.is_named(each.names, with_origin=True))
    return next(named, _UNKNOWN)


def with_published_pixels(spec: ImageProcessorSpec, identity: Identity) -> ImageProcessorSpec:
    """The processor with the limits that the model's published code sets, for models known by name."""
    known = _published(identity)
    if not isinstance(spec.geometry, PixelRange) or known is _UNKNOWN:
        return spec
    geometry = msgspec.structs.replace(
        spec.geometry,
        min_pixels=spec.geometry.min_pixels if known.min_pixels is None else known.min_pixels,
        max_pixels=known.max_pixels,
        first_range=known.first_range,
        sides_have_a_token=known.uses_qwen_vl_utils,
    )
    return msgspec.structs.replace(spec, geometry=geometry)

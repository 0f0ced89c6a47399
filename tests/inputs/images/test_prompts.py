"""Token ids of prompts with images, against transformers' processors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers import PreTrainedTokenizerFast

from penstock.checkpoint.identity import Identity
from penstock.checkpoint.image_processor import PixelRange
from penstock.checkpoint.image_processor_files import read_image_processor
from penstock.checkpoint.image_prompts import read_image_prompt, with_published_pixels
from penstock.errors import BadValue, ModelLoadError
from penstock.inputs.images.preprocess import prepare
from penstock.inputs.images.prompts import ImagePrompts
from penstock.inputs.images.sizes import within_pixels
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import PreparedImage
from tests.inputs.images.folders import write_tokenizer
from tests.inputs.images.pictures import noise

Json = dict[str, Any]
QWEN_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
]
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PICTURES = [noise(90, 60), noise(40, 130), noise(64, 64)]


class Subject:
    """One model's folder, read by transformers and by Penstock."""

    def __init__(self, folder: Path, config: Json, image_processor: Any, **tokens: Any) -> None:
        self.folder, self.config = folder, config
        self.image_processor = image_processor
        image_processor.save_pretrained(folder)
        self.reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **tokens)
        (folder / "config.json").write_text(json.dumps(config))

    def prompts(self) -> ImagePrompts:
        processor = read_image_processor(self.folder, self.config)
        assert processor is not None
        prompt = read_image_prompt(self.folder, self.config, processor, Identity(()))
        assert prompt is not None
        return ImagePrompts(prompt, processor, Tokenizer(self.folder))

    def images(self, pictures: list[Image.Image]) -> list[PreparedImage]:
        processor = read_image_processor(self.folder, self.config)
        assert processor is not None
        return [prepare(picture, processor) for picture in pictures]

    def pages(self) -> list[list[int]]:
        """Penstock's token rows of images without text."""
        prompts, out = self.prompts(), []
        for image in self.images(PICTURES):
            (ids,) = prompts.tokenizer.encode([prompts.text([image])], prompts.prompt.adds_special_tokens)
            row = prompts.row(ids, [image])
            _check_places(row.token_ids, row.starts, row.images, prompts.token_id)
            out.append(row.token_ids.tolist())
        return out


def _check_places(ids: Any, starts: list[int], images: list[PreparedImage], token: int) -> None:
    """Every placeholder belongs to an image, and each image has one placeholder per token."""
    expected = np.concatenate([np.arange(s, s + i.num_tokens) for s, i in zip(starts, images, strict=True)])
    assert np.array_equal(np.flatnonzero(ids == token), expected)


def unpadded(batch: Any) -> list[list[int]]:
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [np.asarray(ids)[np.asarray(mask) == 1].tolist() for ids, mask in rows]


def qwen(folder: Path, architecture: str = "Qwen2VLForConditionalGeneration", **config: Any) -> Subject:
    write_tokenizer(folder, QWEN_TOKENS, pad_token="<|endoftext|>")
    image_processor = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 3136, "longest_edge": 40_000}
    )
    subject = Subject(
        folder, {"architectures": [architecture], **config}, image_processor, pad_token="<|endoftext|>"
    )
    subject.config["image_token_id"] = subject.reference.convert_tokens_to_ids("<|image_pad|>")
    return subject


@pytest.mark.parametrize("visual_prompt_prefix", [None, f"Look: {QWEN_IMAGE} please."])
def test_pages_of_colqwen_are_read_as_by_its_processor(
    tmp_path: Path, visual_prompt_prefix: str | None
) -> None:
    subject = qwen(tmp_path, "ColQwen2ForRetrieval")
    processor = transformers.ColQwen2Processor(
        subject.image_processor, subject.reference, visual_prompt_prefix=visual_prompt_prefix
    )
    if visual_prompt_prefix is not None:
        values = {"visual_prompt_prefix": visual_prompt_prefix}
        (tmp_path / "processor_config.json").write_text(json.dumps(values))
    assert subject.pages() == unpadded(processor.process_images(images=PICTURES))


@pytest.mark.parametrize("name", ["Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"])
def test_texts_with_images_of_qwen_are_read_as_by_its_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    subject = qwen(tmp_path)
    mixin = transformers.processing_utils.ProcessorMixin
    monkeypatch.setattr(
        mixin, "check_argument_for_proper_class", lambda *_: None
    )  # the processor has no video processor
    processor = getattr(transformers, name)(subject.image_processor, subject.reference)
    text = f"<|im_start|>user\n{QWEN_IMAGE}what is it? {QWEN_IMAGE}{QWEN_IMAGE}<|im_end|>\n"
    expected = processor(images=PICTURES, text=[text], padding=True, return_tensors="np")
    prompts, images = subject.prompts(), subject.images(PICTURES)
    (ids,) = prompts.tokenizer.encode([prompts.fill(text, images)])
    row = prompts.row(ids, images)
    assert row.token_ids.tolist() == expected["input_ids"][0].tolist()
    parts = [images[0], "what is it? ", images[1], images[2]]
    assert prompts.text(parts, "<|im_start|>user\n", "<|im_end|>\n") == text
    made = prompts.request_images([None, row], np.array([4, len(row.token_ids)], dtype=np.int32))
    assert made.images is not None and made.rope_positions is not None
    assert made.images.rows.tolist() == [1, 1, 1]
    assert made.images.starts.tolist() == row.starts
    assert len(made.rope_positions) == 3 * (4 + len(row.token_ids))


def test_pages_of_colpali_are_read_as_by_its_processor(tmp_path: Path) -> None:
    write_tokenizer(
        tmp_path, ["<bos>", "<pad>", "<image>"], ("<bos>", ""), bos_token="<bos>", pad_token="<pad>"
    )
    image_processor = transformers.SiglipImageProcessorPil(size={"height": 56, "width": 56})
    image_processor.image_seq_length = 16
    vision = {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 56}
    config = {"architectures": ["ColPaliForRetrieval"], "vlm_config": {"vision_config": vision}}
    subject = Subject(tmp_path, config, image_processor, bos_token="<bos>", pad_token="<pad>")
    config["vlm_config"]["image_token_index"] = subject.reference.convert_tokens_to_ids("<image>")
    reference = subject.reference
    reference._tokenizer.post_processor = None  # the processor disables the tokenizer's own special tokens
    processor = transformers.ColPaliProcessor(image_processor, reference)
    assert subject.pages() == unpadded(processor.process_images(images=PICTURES))


VBERT_TOKENS = [
    *("[CLS]", "[SEP]", "[PAD]", "<|begin_of_text|>", "<fake_token_around_image>", "<image>"),
    *("<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]


@pytest.mark.parametrize("is_split", [True, False])
def test_pages_of_colmodernvbert_are_read_as_by_its_processor(tmp_path: Path, is_split: bool) -> None:
    write_tokenizer(tmp_path, VBERT_TOKENS, ("[CLS]", "[SEP]"), pad_token="[PAD]")
    image_processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 32}, do_image_splitting=is_split
    )
    vision = {"model_type": "siglip_vision_model", "patch_size": 8, "image_size": 32}
    inner = {"vision_config": vision, "pixel_shuffle_factor": 2}
    subject = Subject(
        tmp_path,
        {"architectures": ["ColModernVBertForRetrieval"], "vlm_config": inner},
        image_processor,
        pad_token="[PAD]",
    )
    processor = transformers.ColModernVBertProcessor(image_processor, subject.reference, image_seq_len=4)
    assert subject.pages() == unpadded(processor.process_images(images=PICTURES))


def test_images_of_embeddinggemma_stand_between_their_marks(tmp_path: Path) -> None:
    names = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    write_tokenizer(tmp_path, ["<bos>", *names.values()], ("<bos>", ""), bos_token="<bos>", **names)
    image_processor = transformers.Gemma4ImageProcessorPil(max_soft_tokens=70)
    config = {"architectures": ["EmbeddingGemma2Model"], "vision_config": {"patch_size": 16}}
    subject = Subject(tmp_path, config, image_processor)
    token = {name: subject.reference.convert_tokens_to_ids(text) for name, text in names.items()}
    bos = subject.reference.convert_tokens_to_ids("<bos>")
    for ids, image in zip(subject.pages(), subject.images(PICTURES), strict=True):
        placeholders = [token["image_token"]] * image.num_tokens
        assert ids == [bos, token["boi_token"], *placeholders, token["eoi_token"]]


@pytest.mark.parametrize(
    "make",
    [
        lambda prompts, image: prompts.text([image, "look: <|image_pad|>"]),
        lambda prompts, image: prompts.text(["<|image_pad|>", image]),
    ],
)
def test_a_text_cannot_claim_to_be_an_image(
    tmp_path: Path, make: Callable[[ImagePrompts, PreparedImage], str]
) -> None:
    subject = qwen(tmp_path)
    prompts, (image,) = subject.prompts(), subject.images(PICTURES[:1])
    (ids,) = prompts.tokenizer.encode([make(prompts, image)])
    with pytest.raises(BadValue, match=r"has the token '<\|image_pad\|>' \+1 times beside its images"):
        prompts.row(ids, [image])
    with pytest.raises(BadValue, match="0 times for 1 images"):
        prompts.fill("a template without a place for images", [image])


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    subject = qwen(tmp_path)
    subject.config["image_token_id"] = 7
    with pytest.raises(ModelLoadError, match=r"but config\.json says 7"):
        subject.prompts()


def test_models_known_by_name_have_the_pixels_of_their_published_code(tmp_path: Path) -> None:
    subject = qwen(tmp_path)
    spec = read_image_processor(subject.folder, subject.config)
    assert spec is not None
    for name, pixels in {
        "alibaba-nlp/gme-qwen2-vl-2b-instruct": (200_704, 1_003_520),
        "qwen/qwen3-vl-embedding-2b": (4096, 1_843_200),
        "qwen/qwen3-vl-reranker-8b": (4096, 1_310_720),
        "tomoroai/tomoro-colqwen3-embed-4b": (3136, 1_310_720),
        "qwen/qwen2-vl-2b-instruct": (3136, 40_000),
    }.items():
        geometry = with_published_pixels(spec, Identity((name,))).geometry
        assert isinstance(geometry, PixelRange)
        assert (geometry.min_pixels, geometry.max_pixels) == pixels
        assert geometry.sides_have_a_token is ("gme" in name or "qwen3-vl" in name)
        assert geometry.first_range == ((3136, 12_845_056) if "gme" in name else None)


def test_a_side_shorter_than_a_token_counts_as_one_in_qwen_vl_utils_only() -> None:
    """The arithmetic of qwen_vl_utils.smart_resize and of transformers' processor, for 500 × 10 pixels."""
    limits = 4 * 32 * 32, 1800 * 32 * 32
    assert within_pixels((10, 500), 32, *limits, sides_have_a_token=True) == (32, 512)
    assert within_pixels((10, 500), 32, *limits) == (32, 480)

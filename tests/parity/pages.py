"""Small seeded page retrievers with SigLIP towers, in their published layouts, with transformers' processors
and models as the reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from tests.inputs.images.folders import write_tokenizer
from tests.inputs.images.pictures import noise, photo_folder
from tests.parity.reference import Vectors, randomise

Json = dict[str, Any]
DIM, HIDDEN, PATCH, SIDE = 20, 48, 14, 56
VOCABULARY = 640
QUERIES = ["what does the revenue chart show?", "a cat", "Question: the third quarter of the year"]
TEXT: Json = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 72,
    "max_position_embeddings": 512,
}
VISION: Json = {
    "model_type": "siglip_vision_model",
    "hidden_size": 40,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def pictures() -> list[Image.Image]:
    """Pictures of different sizes: photographs if scikit-image has them, otherwise patterns."""
    found = [noise(90, 60), noise(40, 130, seed=1), noise(64, 64, seed=2)]
    if (folder := photo_folder()) is not None:
        found += [Image.open(folder / name).convert("RGB") for name in ("astronaut.png", "rocket.jpg")]
    return found


@dataclass(frozen=True)
class PageReference:
    """The reference's token vectors of queries and pages, without padding."""

    model: Any
    queries: Callable[[Sequence[str]], list[Vectors]]
    pages: Callable[[Sequence[Image.Image]], list[Vectors]]


@dataclass(frozen=True)
class PageCase:
    name: str
    write: Callable[[Path], PageReference]
    reference: str = "ColPaliForRetrieval"  # of transformers


@torch.inference_mode()
def _vectors(embeddings: torch.Tensor, inputs: Any) -> list[Vectors]:
    kept = inputs["attention_mask"].bool()
    return [row[mask].numpy() for row, mask in zip(embeddings, kept, strict=True)]


def _paligemma_config(kind: str, image_token: int) -> Any:
    own = {"sliding_window": 4, "query_pre_attn_scalar": 16} if kind == "gemma2" else {}
    vision = VISION | {"patch_size": PATCH, "image_size": SIDE, "vision_use_head": False}
    return transformers.PaliGemmaConfig(
        text_config={"model_type": kind, **TEXT, **own},
        vision_config=vision,
        projection_dim=HIDDEN,
        hidden_size=HIDDEN,
        image_token_index=image_token,
    )


def _paligemma_files(folder: Path, frame: tuple[str, str]) -> tuple[PreTrainedTokenizerFast, Any]:
    """Write the tokenizer and the image processor to `folder`; returns the reference's versions."""
    named = {"bos_token": "<bos>", "pad_token": "<pad>", "eos_token": "<eos>"}
    write_tokenizer(folder, ["<pad>", "<eos>", "<bos>", "<image>"], frame, **named)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)
    tokenizer._tokenizer.post_processor = None  # processors disable the tokenizer's own special tokens
    image_processor = transformers.SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    image_processor.image_seq_length = (SIDE // PATCH) ** 2
    image_processor.save_pretrained(folder)
    return tokenizer, image_processor


def native_colpali(kind: str, prefix: str | None = None) -> Callable[[Path], PageReference]:
    """The layout of transformers' class. The saved tokenizer adds no special tokens."""

    def write(folder: Path) -> PageReference:
        tokenizer, image_processor = _paligemma_files(folder, ("", ""))
        inner = _paligemma_config(kind, tokenizer.convert_tokens_to_ids("<image>"))
        config = transformers.ColPaliConfig(vlm_config=inner.to_dict(), embedding_dim=DIM)
        model = transformers.ColPaliForRetrieval(config).eval()
        randomise(model, 4)
        model.save_pretrained(folder)
        own = {} if prefix is None else {"query_prefix": prefix}
        if own:
            (folder / "processor_config.json").write_text(json.dumps(own))
        processor = transformers.ColPaliProcessor(image_processor, tokenizer, **own)

        def vectors(inputs: Any) -> list[Vectors]:
            with torch.inference_mode():
                return _vectors(model(**inputs).embeddings, inputs)

        return PageReference(
            model,
            lambda texts: vectors(processor.process_queries(text=list(texts))),
            lambda images: vectors(processor.process_images(images=list(images))),
        )

    return write


def engine_colpali(renamed: dict[str, str]) -> Callable[[Path], PageReference]:
    """The layout of colpali-engine's class: PaliGemma with its language-model head, and a projection."""

    def write(folder: Path) -> PageReference:
        tokenizer, image_processor = _paligemma_files(folder, ("<bos>", "<eos>"))
        config = _paligemma_config("gemma", tokenizer.convert_tokens_to_ids("<image>"))
        model = transformers.PaliGemmaForConditionalGeneration(config).eval()
        projection = torch.nn.Linear(HIDDEN, DIM)
        randomise(model, 5)
        randomise(projection, 6)
        model.save_pretrained(folder)
        tensors = {
            _renamed("model." + name, renamed): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        tensors["custom_text_proj.weight"] = projection.weight.detach()
        tensors["custom_text_proj.bias"] = projection.bias.detach()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(saved | {"architectures": ["ColPali"]}))
        processor = transformers.PaliGemmaProcessor(image_processor, tokenizer)

        def vectors(inputs: Any) -> list[Vectors]:
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])  # the whole input is prefix
            with torch.inference_mode():
                states = model.model(**inputs).last_hidden_state
                return _vectors(torch.nn.functional.normalize(projection(states), dim=-1), inputs)

        def queries(texts: Sequence[str]) -> list[Vectors]:
            written = ["<bos>" + text + "<pad>" * 10 for text in texts]
            return vectors(tokenizer(written, return_tensors="pt", padding="longest"))

        def pages(images: Sequence[Image.Image]) -> list[Vectors]:
            prompt = ["<image><bos>Describe the image."] * len(images)
            return vectors(
                processor(text=prompt, images=list(images), return_tensors="pt", padding="longest")
            )

        return PageReference(model, queries, pages)

    return write


def _renamed(name: str, renamed: dict[str, str]) -> str:
    for old, new in renamed.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


VBERT_TOKENS = [
    *("[CLS]", "[SEP]", "[PAD]", "<|begin_of_text|>", "<fake_token_around_image>", "<image>"),
    *("<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]
VBERT_SIDE, VBERT_PATCH = 32, 8


def vbert_config(image_token: int) -> Any:
    text = {key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "head_dim")}
    window = {"local_attention": 8, "global_attn_every_n_layers": 2, "num_hidden_layers": 4}
    window |= {f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    return transformers.ModernVBertConfig(
        text_config={"model_type": "modernbert", **text, **window},
        vision_config=VISION | {"patch_size": VBERT_PATCH, "image_size": VBERT_SIDE},
        pixel_shuffle_factor=2,
        image_token_id=image_token,
    )


def vbert_files(folder: Path) -> tuple[PreTrainedTokenizerFast, Any]:
    named = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    write_tokenizer(folder, VBERT_TOKENS, ("[CLS]", "[SEP]"), **named)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)
    image_processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 96}, max_image_size={"longest_edge": VBERT_SIDE}
    )
    image_processor.save_pretrained(folder)
    return tokenizer, transformers.ColModernVBertProcessor(image_processor, tokenizer, image_seq_len=4)


def native_colmodernvbert(folder: Path) -> PageReference:
    tokenizer, processor = vbert_files(folder)
    inner = vbert_config(tokenizer.convert_tokens_to_ids("<image>"))
    config = transformers.ColModernVBertConfig(vlm_config=inner.to_dict(), embedding_dim=DIM)
    model = transformers.ColModernVBertForRetrieval(config).eval()
    randomise(model, 7)
    model.save_pretrained(folder)

    def vectors(inputs: Any) -> list[Vectors]:
        inputs = {name: value for name, value in inputs.items() if name != "token_type_ids"}
        with torch.inference_mode():
            return _vectors(model(**inputs).embeddings, inputs)

    return PageReference(
        model,
        lambda texts: vectors(processor.process_queries(text=list(texts))),
        lambda images: vectors(processor.process_images(images=list(images))),
    )


# Tensor names in files of transformers 4, such as vidore/colpali-v1.3-merged.
OLD_NAMES = {
    "model.model.language_model.": "model.language_model.model.",
    "model.model.vision_tower.": "model.vision_tower.vision_model.",
    "model.model.multi_modal_projector.": "model.multi_modal_projector.",
    "model.lm_head.": "model.language_model.lm_head.",
}
CASES = [
    PageCase("colpali", native_colpali("gemma")),
    PageCase("colpali-prefix", native_colpali("gemma", "Look: ")),
    PageCase("colpali2", native_colpali("gemma2")),
    PageCase("colpali-engine", engine_colpali({}), "PaliGemmaForConditionalGeneration"),
    PageCase("colpali-engine-old", engine_colpali(OLD_NAMES), "PaliGemmaForConditionalGeneration"),
    PageCase("colmodernvbert", native_colmodernvbert, "ColModernVBertForRetrieval"),
]


def maxsim(query: Vectors, page: Vectors) -> float:
    return float((query @ page.T).max(axis=1).sum())


def worst_cosine(got: Sequence[Any], wanted: Sequence[Vectors]) -> float:
    """The smallest cosine of any token vector. Fails if rows have different numbers of tokens."""
    assert [np.shape(row) for row in got] == [row.shape for row in wanted]
    return min(float((np.asarray(a) * b).sum(axis=1).min()) for a, b in zip(got, wanted, strict=True))

"""Small seeded checkpoints of CLIP, SigLIP and SigLIP 2 in their published layouts, with their references."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.inputs.images.pictures import noise
from tests.parity.reference import Vectors, randomise

START, END, PAD = "<|startoftext|>", "<|endoftext|>", "<pad>"
NUM_WORDS = 96
TEXT = {
    "vocab_size": NUM_WORDS + 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 8,
}
TEXTS = ["w1 w2 w3", "w4", "w5 " * 30, "w90 w91 w92 w93 w94", " W1, w2. \n (w3)! "]
IMAGES = [noise(90, 70), noise(64, 64, seed=1), noise(33, 140, seed=2), noise(300, 40, seed=3)]
SIGLIP_LENGTH = 24


@dataclass(frozen=True)
class DualCase:
    name: str
    model: str
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    pads: str | None = None  # side on which texts are padded

    def write(self, folder: Path) -> DualReference:
        config = getattr(transformers, f"{self.model}Config")(
            text_config=TEXT | self.text, vision_config=VISION | self.vision, **self.outer
        )
        model: Any = getattr(transformers, f"{self.model}Model")(config).eval()
        randomise(model, seed=1)
        with torch.no_grad():
            model.logit_scale.fill_(2.3)
        model.save_pretrained(folder)
        processor = getattr(transformers, f"{self.model}ImageProcessor")(**self.processor)
        processor.save_pretrained(folder)
        tokenizer = word_tokenizer(frames=self.pads is None)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"pad_token": PAD, **self.tokenizer}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return DualReference(self, model, processor, tokenizer)


def word_tokenizer(*, frames: bool) -> Tokenizer:
    """A tokenizer of the words w0, w1, …. Adds an end token, and with `frames` also a start token."""
    words = {f"w{number}": number for number in range(NUM_WORDS)}
    vocabulary = words | {PAD: NUM_WORDS, START: NUM_WORDS + 1, END: NUM_WORDS + 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([PAD, START, END])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}" if frames else f"$A {END}",
        special_tokens=[(START, vocabulary[START]), (END, vocabulary[END])],
    )
    return tokenizer


@dataclass(frozen=True, eq=False)
class DualReference:
    case: DualCase
    model: Any
    processor: Any
    tokenizer: Tokenizer

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Vectors:
        rows = [self.tokenizer.encode(self._canonical(text)).ids for text in texts]
        if self.case.pads is None:
            vectors = [
                self.model.get_text_features(
                    input_ids=torch.tensor([row[:76] + row[-1:] if len(row) > 77 else row])
                )
                for row in rows
            ]
            return unit(torch.cat([each.pooler_output for each in vectors]))
        padded = [self._padded(row) for row in rows]
        return unit(self.model.get_text_features(input_ids=torch.tensor(padded)).pooler_output)

    def _canonical(self, text: str) -> str:
        """The text after the normalisation of the tokenizer's class in transformers. SiglipTokenizer, which
        needs sentencepiece, removes punctuation and joins words by single spaces."""
        if self.case.tokenizer.get("tokenizer_class") == "SiglipTokenizer":
            words = "".join(letter for letter in text.lower() if letter not in string.punctuation)
            return " ".join(words.split())
        return text.lower() if self.case.pads else text

    def _padded(self, row: list[int]) -> list[int]:
        row = row if len(row) <= SIGLIP_LENGTH else [*row[: SIGLIP_LENGTH - 1], row[-1]]
        padding = [NUM_WORDS] * (SIGLIP_LENGTH - len(row))
        return padding + row if self.case.pads == "left" else row + padding

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image]) -> Vectors:
        inputs = self.processor(images=list(images), return_tensors="pt")
        return unit(self.model.get_image_features(**inputs).pooler_output)

    @torch.no_grad()
    def logits(self, texts: Sequence[str], images: Sequence[Image.Image]) -> Vectors:
        """[images, texts], scaled as the model's own forward pass does."""
        cosines = torch.from_numpy(self.images(images)) @ torch.from_numpy(self.texts(texts)).T
        scaled = cosines * self.model.logit_scale.exp()
        return (scaled + getattr(self.model, "logit_bias", torch.zeros(()))).numpy()


def unit(vectors: torch.Tensor) -> Vectors:
    normed: Vectors = (vectors / vectors.norm(dim=-1, keepdim=True)).numpy()
    return normed


_CLIP_SIZE = {"size": {"shortest_edge": 40}, "crop_size": {"height": 40, "width": 40}}
CLIP = DualCase(
    "clip",
    "CLIP",
    text={"eos_token_id": NUM_WORDS + 2, "max_position_embeddings": 77},
    vision={"image_size": 40},
    outer={"projection_dim": 32},
    processor=_CLIP_SIZE,
)
CASES = [
    CLIP,
    DualCase(  # the first files: the end token has the highest id; text_config has another projection_dim
        "clip-legacy",
        "CLIP",
        text={"eos_token_id": 2, "max_position_embeddings": 77, "projection_dim": 512, "hidden_act": "gelu"},
        vision={"image_size": 40},
        outer={"projection_dim": 32},
        processor=_CLIP_SIZE,
    ),
    DualCase(
        "siglip",
        "Siglip",
        text={"max_position_embeddings": SIGLIP_LENGTH, "projection_size": 48},
        vision={"image_size": 40},
        processor={"size": {"height": 40, "width": 40}},
        tokenizer={"padding_side": "right", "tokenizer_class": "SiglipTokenizer"},
        pads="right",
    ),
    DualCase(
        "siglip2-naflex",
        "Siglip2",
        text={"max_position_embeddings": SIGLIP_LENGTH, "projection_size": 48},
        vision={"num_patches": 49},
        processor={"patch_size": 8, "max_num_patches": 60},
        tokenizer={"tokenizer_class": "Siglip2Tokenizer"},
        pads="left",
    ),
]


def largest_difference(got: Any, wanted: Vectors) -> float:
    return float(np.abs(np.asarray(got) - wanted).max())

"""Small seeded EmbeddingGemma 2 checkpoints with their vision tower, with transformers as the reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import PreTrainedTokenizerFast

from tests.inputs.images.folders import write_tokenizer
from tests.parity.reference import Vectors, randomise

TOKENS = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
TEXT: dict[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 10,
    "sliding_window_pattern": 2,
    "hidden_size_per_layer_input": 20,
    "embedding_dim": 56,
    "max_position_embeddings": 512,
}
VISION: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "patch_size": 4,
    "position_embedding_size": 256,
}
Part = str | Image.Image


@dataclass(frozen=True)
class GemmaCase:
    name: str
    vision: dict[str, Any] = field(default_factory=dict)
    frames: tuple[str, str] = ("<bos>", "<eos>")
    names_tokens: bool = True  # tokenizer_config.json names the tokens around images
    reference: ClassVar[str] = "EmbeddingGemma2Model"  # of transformers

    def write(self, folder: Path) -> GemmaReference:
        named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
        special = ["<pad>", "<eos>", "<bos>", *TOKENS.values()]
        write_tokenizer(folder, special, self.frames, **named, **(TOKENS if self.names_tokens else {}))
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)
        ids = {f"{key}_id": tokenizer.convert_tokens_to_ids(token) for key, token in TOKENS.items()}
        config = transformers.EmbeddingGemma2Config(
            text_config=TEXT | {"pad_token_id": tokenizer.pad_token_id},
            vision_config=VISION | self.vision,
            video_token_id=639,
            audio_token_id=638,
            **ids,
        )
        model = transformers.EmbeddingGemma2Model(config).eval()
        randomise(model, 9)
        _set_buffers(model)
        model.save_pretrained(folder)
        processor = transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
        processor.save_pretrained(folder)
        nested = {"image_processor": json.loads((folder / "preprocessor_config.json").read_text())}
        (folder / "preprocessor_config.json").unlink()
        (folder / "processor_config.json").write_text(json.dumps(nested))
        return GemmaReference(model, tokenizer, processor)


def _set_buffers(model: Any) -> None:
    """Set the buffers: bounds that clamp values, and a bias and scale."""
    draw = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith(("input_min", "output_min")):
            buffer.fill_(-0.9)
        elif name.endswith(("input_max", "output_max")):
            buffer.fill_(0.7)
        elif name.endswith(("std_bias", "std_scale")):
            buffer.copy_(torch.rand(buffer.shape, generator=draw) + 0.2)


@dataclass(frozen=True)
class GemmaReference:
    model: Any
    tokenizer: PreTrainedTokenizerFast
    processor: Any

    @torch.inference_mode()
    def vector(self, parts: Sequence[Part]) -> Vectors:
        """The normalised mean of the hidden states of one input."""
        images = [part for part in parts if not isinstance(part, str)]
        inputs: dict[str, Any] = {}
        counts: list[int] = []
        if images:
            made = self.processor(images, return_tensors="pt")
            counts = list(made["num_soft_tokens_per_image"])
            inputs = {key: torch.as_tensor(made[key]) for key in ("pixel_values", "image_position_ids")}
        left = iter(counts)
        begin, image, end = (TOKENS[key] for key in ("boi_token", "image_token", "eoi_token"))
        text = "".join(part if isinstance(part, str) else begin + image * next(left) + end for part in parts)
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        states = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).last_hidden_state
        mean = states[0].mean(0).numpy()
        normed: Vectors = mean / np.linalg.norm(mean)
        return normed


CASES = [
    GemmaCase("plain"),
    GemmaCase("standardized", {"standardize": True, "pooling_kernel_size": 3}, names_tokens=False),
    GemmaCase("clipped", {"use_clipped_linears": True}),
]

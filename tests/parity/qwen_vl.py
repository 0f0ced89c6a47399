"""Small seeded Qwen-VL checkpoints in their published layouts, with transformers as the reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from penstock.inputs.images.positions import rope_positions
from penstock.types import Ints, PoolingParams, Request, RequestImages
from tests.checkpoints import WORDS
from tests.parity.reference import Vectors, randomise

Json = dict[str, Any]
HIDDEN, PATCH = 48, 4
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PAD, TURN, END, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL))
VOCABULARY = 400
TEXT: Json = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 72,
    "max_position_embeddings": 512,
    "eos_token_id": END,
    "bos_token_id": PAD,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
VISION: Json = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOWERS: dict[str, Json] = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": HIDDEN},
    "qwen2_5_vl": {
        "hidden_size": 16,
        "intermediate_size": 40,
        "out_hidden_size": HIDDEN,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 16,
        "intermediate_size": 40,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    },
}
PREFIXES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def config_of(kind: str, **text: Any) -> Any:
    own = {"head_dim": 16} if kind == "qwen3_vl" else {}
    return getattr(transformers, f"{PREFIXES[kind]}Config")(
        text_config=TEXT | own | text, vision_config=VISION | TOWERS[kind], **TOKENS
    )


def make_model(kind: str, suffix: str = "ForConditionalGeneration", seed: int = 3, **text: Any) -> Any:
    model = getattr(transformers, PREFIXES[kind] + suffix)(config_of(kind, **text))
    randomise(model, seed)
    model.generation_config = transformers.GenerationConfig(eos_token_id=END, pad_token_id=PAD)
    return model.eval()


def write_model(folder: Path, model: Any) -> Path:
    """Write a checkpoint in transformers' layout, with its tokenizer and image processor."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_files(folder)
    return folder


def write_files(folder: Path) -> None:
    tokenizer = qwen_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[PAD],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 64,
        "max_pixels": 1 << 14,
        "image_mean": MEAN,
        "image_std": STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*WORDS, *["yes", "no"] * 50, "yes no yes no"], trainer)
    return tokenizer


def as_published(folder: Path, renamed: dict[str, str], config: Json) -> None:
    """Give a checkpoint the tensor names and config keys of files on the hub."""
    tensors = load_file(folder / "model.safetensors")
    out = {}
    for name, tensor in tensors.items():
        for old, new in renamed.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        out[name] = tensor.contiguous()
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def flat_config(kind: str, folder: Path) -> Json:
    """config.json with the text model's keys at its top level, as in Qwen2-VL's first files."""
    saved = json.loads((folder / "config.json").read_text())
    text = {
        key: value for key, value in saved.pop("text_config").items() if key not in ("model_type", "dtype")
    }
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return saved | text | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


@dataclass(frozen=True)
class Row:
    """Token ids with image placeholders, and the patches of the images."""

    ids: list[int]
    grids: list[tuple[int, int]] = field(default_factory=list)  # patches down and across
    seed: int = 0

    @property
    def patches(self) -> list[NDArray[np.uint8]]:
        draw = np.random.default_rng(self.seed)
        return [
            draw.integers(0, 256, (down * across, 3 * PATCH * PATCH), np.uint8) for down, across in self.grids
        ]

    @property
    def starts(self) -> list[int]:
        """The first token of each image."""
        return [at + 1 for at, token in enumerate(self.ids) if token == VISION_START]


def make_row(*parts: int | tuple[int, int], seed: int = 0) -> Row:
    """A row of the given parts: a number of text tokens, or an image's patches (down, across)."""
    draw, ids, grids = np.random.default_rng(seed + 100), list[int](), []
    for part in parts:
        if isinstance(part, int):
            ids += draw.integers(len(SPECIAL), VOCABULARY, part).tolist()
        else:
            ids += [VISION_START, *[IMAGE] * (part[0] * part[1] // 4), VISION_END]
            grids.append(part)
    return Row(ids, grids, seed)


def request_of(request_id: str, rows: Sequence[Row], params: PoolingParams, **more: Any) -> Request:
    """The request that an API process makes of these rows."""
    lengths = np.array([len(row.ids) for row in rows], dtype=np.int32)
    where = [(number, start) for number, row in enumerate(rows) for start in row.starts]
    images = rope = None
    if where:
        grids = np.array([grid for row in rows for grid in row.grids], dtype=np.int32)
        image_rows, starts = np.array(where, dtype=np.int32).T
        pixels = [patches for row in rows for patches in row.patches]
        rope = rope_positions(lengths, image_rows, starts, grids // 2)
        images = RequestImages(
            np.concatenate(pixels),
            grids,
            image_rows,
            starts,
            grids.prod(1).astype(np.int32) // 4,
            _digests(pixels),
        )
    ids: Ints = np.array([token for row in rows for token in row.ids], dtype=np.int32)
    return Request(request_id, ids, lengths, params, images=images, rope_positions=rope, **more)


def _digests(pixels: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    import hashlib

    parts = [hashlib.blake2b(each.tobytes(), digest_size=16).digest() for each in pixels]
    return np.frombuffer(b"".join(parts), dtype=np.uint8).reshape(-1, 16)


def reference_inputs(row: Row) -> Json:
    """The arguments of transformers' models for one row."""
    ids = torch.tensor([row.ids])
    inputs: Json = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not row.grids:
        return inputs
    mean, std = (torch.tensor(values)[:, None] for values in (MEAN, STD))
    pixels = torch.from_numpy(np.concatenate(row.patches)).float().view(-1, 3, PATCH * PATCH)
    frames = ((pixels / 255 - mean) / std)[:, :, None].expand(-1, -1, 2, -1).flatten(1)
    return inputs | {
        "pixel_values": frames,
        "image_grid_thw": torch.tensor([(1, *grid) for grid in row.grids]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


@torch.inference_mode()
def reference_states(model: Any, row: Row) -> Vectors:
    """The last hidden states of a row, [tokens, hidden]."""
    base = model.model if hasattr(model, "lm_head") else model
    base.rope_deltas = None
    states: Vectors = base(**reference_inputs(row)).last_hidden_state[0].numpy()
    return states


@torch.inference_mode()
def reference_tokens(model: Any, row: Row, count: int) -> list[int]:
    """The greedy continuation of a row."""
    out = model.generate(**reference_inputs(row), max_new_tokens=count, do_sample=False)
    return [int(token) for token in out[0, len(row.ids) :]]

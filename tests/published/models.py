"""All records, and their files on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.checkpoint.describe import read_spec
from penstock.checkpoint.spec import ModelSpec
from tests.checkpoints import wordpiece_tokenizer, write_json
from tests.published.catalog import Published
from tests.published.decoders import DECODERS
from tests.published.dual import DUAL
from tests.published.embedders import EMBEDDERS
from tests.published.encoders import ENCODERS
from tests.published.more_decoders import MORE_DECODERS
from tests.published.more_encoders import MORE_ENCODERS
from tests.published.newer import NEWER
from tests.published.others import OTHERS
from tests.published.pages import PAGES
from tests.published.qwen_vl import QWEN_VL

MODELS = (
    *ENCODERS,
    *MORE_ENCODERS,
    *DECODERS,
    *EMBEDDERS,
    *MORE_DECODERS,
    *NEWER,
    *OTHERS,
    *QWEN_VL,
    *DUAL,
    *PAGES,
)
SERVED = [model for model in MODELS if model.reads is not None]
REFUSED = [model for model in MODELS if model.reads is None]


def write(model: Published, folder: Path) -> Path:
    """The model's files below `folder`, with a small vocabulary."""
    target = folder / model.id.rpartition("/")[2]
    target.mkdir()
    for name, content in ({"config.json": model.config} | model.files).items():
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif content is not None:
            write_json(file, content)
    tokenizer = wordpiece_tokenizer()
    tokenizer.add_special_tokens(list(model.tokens))
    home = target / model.tokenizer_folder
    home.mkdir(exist_ok=True)
    tokenizer.save(str(home / "tokenizer.json"))
    if model.tensors:
        save_file(
            {name: torch.zeros(shape) for name, shape in model.tensors.items()}, home / "model.safetensors"
        )
    return target


def read(model: Published, folder: Path) -> ModelSpec:
    return read_spec(write(model, folder), model.id)

"""Small seeded page retrievers in the layouts of colpali-engine and transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.parity.qwen_vl import (
    HIDDEN,
    Row,
    as_published,
    config_of,
    flat_config,
    make_model,
    reference_states,
    write_files,
    write_model,
)
from tests.parity.reference import Vectors, randomise

DIM = 20


class Retriever:
    """A Qwen-VL model of transformers, followed by a projection and normalisation."""

    def __init__(self, model: Any, projection: torch.nn.Linear) -> None:
        self.model = model
        self.projection = projection

    @torch.inference_mode()
    def __call__(self, row: Row) -> Vectors:
        vectors = self.projection(torch.from_numpy(reference_states(self.model, row)))
        out: Vectors = torch.nn.functional.normalize(vectors, dim=-1).numpy()
        return out


def colpali_layout(kind: str, name: str, old: bool) -> Callable[[Path], Retriever]:
    """Files of colpali-engine, whose models are those of transformers without a head. `old`: tensor names
    from before Qwen2-VL's language model became a separate module."""

    def write(folder: Path) -> Retriever:
        model = make_model(kind, "Model")
        model.custom_text_proj = torch.nn.Linear(HIDDEN, DIM)
        randomise(model.custom_text_proj, 8)
        write_model(folder, model)
        renamed = {"language_model.": "model."} if old else {}
        config = flat_config(kind, folder) if old else json.loads((folder / "config.json").read_text())
        as_published(folder, renamed, config | {"architectures": [name]})
        return Retriever(model, model.custom_text_proj)

    return write


def native_layout(folder: Path) -> Retriever:
    config = transformers.ColQwen2Config(vlm_config=config_of("qwen2_5_vl").to_dict(), embedding_dim=DIM)
    model = transformers.ColQwen2ForRetrieval(config).eval()
    randomise(model, 4)
    folder.mkdir()
    model.save_pretrained(folder)
    write_files(folder)
    return Retriever(model.vlm, model.embedding_proj_layer)


LAYOUTS: dict[str, Callable[[Path], Retriever]] = {
    "ColQwen2": colpali_layout("qwen2_vl", "ColQwen2", old=True),
    "ColQwen2_5": colpali_layout("qwen2_5_vl", "ColQwen2_5", old=False),
    "ColQwen3": colpali_layout("qwen3_vl", "ColQwen3", old=False),
    "ColQwen2ForRetrieval": native_layout,
}

"""Published models are read as their authors mean them, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.describe import read_spec
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.models.registry import build_model
from penstock.types import Task
from penstock.weights.stream import DummySource
from tests.checkpoints import wordpiece_tokenizer, write_json
from tests.published.catalog import Published
from tests.published.decoders import DECODERS
from tests.published.embedders import EMBEDDERS
from tests.published.encoders import ENCODERS

MODELS = (*ENCODERS, *DECODERS, *EMBEDDERS)
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "dim", "d_model", "pooler_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "hidden_dim", "d_ff", "moe_intermediate_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_trained_positions"), 96),
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
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
    tokenizer.save(str(target / "tokenizer.json"))
    return target


def read(model: Published, folder: Path) -> ModelSpec:
    return read_spec(write(model, folder), model.id)


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.id)
def test_a_model_is_read_as_its_authors_mean_it(model: Published, tmp_path: Path) -> None:
    spec, reads = read(model, tmp_path), model.reads
    assert reads is not None
    assert (spec.tasks[0].value, spec.score_kind) == (reads.task, reads.score)
    assert (spec.max_model_len, spec.is_causal) == (reads.max_tokens, reads.causal)
    if reads.task in ("classify", "token_classify"):
        assert len(spec.labels) == reads.labels
    if reads.pooling is not None:
        pooling = (spec.pooling.methods, spec.pooling.normalize, spec.embed_dim)
        assert pooling == (reads.pooling, reads.normalize, reads.dimension)
    assert spec.prompts == dict(reads.prompts)


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.id)
def test_a_model_of_its_configuration_can_be_built(model: Published, tmp_path: Path) -> None:
    """Every option of config.json is accepted by the family's wiring; only the sizes are smaller."""
    spec = read(model, tmp_path)
    config = small(spec.config)
    build = LayerBuilder(DummySource(0, torch.float32, torch.device("cpu")))
    build.folder = spec.path
    built = build_model(spec.architecture, config, build, splade=spec.tasks[0] is Task.SPARSE)
    assert built.hidden_size == 64


def small(config: dict[str, Any]) -> dict[str, Any]:
    out = config | {key: value for key, value in SMALL.items() if config.get(key) is not None}
    if "layer_types" in config:
        out["layer_types"] = config["layer_types"][-2:]
    if isinstance(config.get("pad_token_id"), int):
        out["pad_token_id"] = min(config["pad_token_id"], 1)
    return out


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.id)
def test_a_model_that_is_not_served_is_refused_with_the_reason(model: Published, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=model.refused):
        read(model, tmp_path)

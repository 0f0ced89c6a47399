"""Published models are read as their authors mean them, or refused with the reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.spec import ModelSpec, with_generation
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.models.registry import build_model
from penstock.types import Task
from penstock.weights.stream import DummySource
from tests.published.catalog import Published
from tests.published.models import MODELS, REFUSED, SERVED, read

CLIPS = ("openai/clip-vit-base-patch32", "sentence-transformers/clip-ViT-B-32")
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "dim", "d_model", "pooler_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "hidden_dim", "d_ff", "moe_intermediate_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_trained_positions"), 96),
    "embedding_size": 64,
    "num_experts": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
# Their weights are read by builders of their own, or not by a model at all.
# To as many numbers as it has "labels", or as its two towers share.
_PROJECTED = ("voyageai/voyage-4-nano", "google/embeddinggemma-2", *CLIPS)
_SIGLIP_LIKE = ("clip", "siglip", "siglip2", "colpali", "paligemma", "colmodernvbert")  # have such a tower
_NOT_BUILT = (Task.ENTITIES, Task.ZERO_SHOT)


def test_at_least_a_hundred_models_are_recorded_once_each() -> None:
    ids = [model.id for model in MODELS]
    assert len(ids) == len(set(ids)) >= 100
    assert len(SERVED) >= 60


def test_a_record_says_how_its_model_is_read_or_why_not() -> None:
    assert all((model.reads is None) == bool(model.refused) for model in MODELS)


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
    assert (spec.prompts, spec.default_prompt_name) == (dict(reads.prompts), reads.default_prompt)
    assert reads.end == (spec.text_end if spec.late is None else spec.late.query_end)
    assert with_generation(spec, None).generates == reads.generates
    assert spec.adapters == reads.adapters
    assert (spec.why_not_sliced is None) == reads.is_sliced
    if spec.late is not None:
        assert (spec.late.query_marker, spec.late.document_marker) == reads.markers
        assert spec.token_dim == reads.dimension
    answers = () if spec.score is None else spec.score.tokens
    assert answers == tuple(token_id(answer, spec) for answer in reads.answers)


def token_id(token: str | int, spec: ModelSpec) -> int | None:
    if isinstance(token, int):
        return token
    from tokenizers import Tokenizer

    number: int | None = Tokenizer.from_file(str(spec.path / "tokenizer.json")).token_to_id(token)
    return number


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.id)
def test_a_model_of_its_configuration_can_be_built(
    model: Published, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every option of config.json is accepted by the family's wiring, and known; only sizes are smaller."""
    spec = read(model, tmp_path)
    if spec.tasks[0] in _NOT_BUILT or spec.static is not None:
        pytest.skip("its weights are not those of a model of this kind")
    with caplog.at_level(logging.WARNING, "penstock.load"):
        built = build(spec)
    assert built.hidden_size == (spec.embed_dim if model.id in _PROJECTED else 64)
    assert "does not know" not in caplog.text


def build(spec: ModelSpec) -> Any:
    weights = DummySource(0, torch.float32, torch.device("cpu"))
    generates = with_generation(spec, None).generates
    layers = LayerBuilder(weights)
    layers.folder = spec.path
    splade = spec.tasks[0] is Task.SPARSE
    return build_model(spec.architecture, small(spec.config), layers, splade=splade, generates=generates)


def small(config: dict[str, Any]) -> dict[str, Any]:
    out = config | {key: value for key, value in SMALL.items() if config.get(key) is not None}
    out.pop("quantization_config", None)  # dummy weights are not quantised
    if (latent := config.get("latent_attention_config")) is not None:
        out["latent_attention_config"] = latent | {"hidden_dim": 64, "latent_dim": 64, "cross_dim_head": 64}
    if (vision := config.get("vision_config")) is not None and "mrope_section" in str(config):
        out["vision_config"] = _small_vision(vision)
        scaling = config["rope_scaling"]
        out["rope_scaling"] = scaling | {"mrope_section": [4, 2, 2]}
    elif vision is not None and config.get("model_type") in _SIGLIP_LIKE:
        tower = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
        out["vision_config"] = vision | tower
    elif vision is not None and config.get("model_type") == "embedding_gemma2":
        out["vision_config"] = vision | {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96}
    if "full_attn_idxs" in config:
        out["full_attn_idxs"] = [1]
    if "layer_types" in config:
        out["layer_types"] = config["layer_types"][-2:]
    if isinstance(config.get("pad_token_id"), int):
        out["pad_token_id"] = min(config["pad_token_id"], 1)
    return out


def _small_vision(vision: dict[str, Any]) -> dict[str, Any]:
    small = {"depth": 2, "num_heads": 2, "intermediate_size": 96, "num_position_embeddings": 16}
    small |= {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0], "embed_dim": 32}
    small["out_hidden_size"] = 64
    small["hidden_size"] = 64 if "embed_dim" in vision else 32
    return vision | {key: value for key, value in small.items() if key in vision}


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.id)
def test_a_model_that_is_not_served_is_refused_with_the_reason(model: Published, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=model.refused):
        build(read(model, tmp_path))

"""Published models are read as their authors mean them, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.checkpoint.spec import ModelSpec, read_spec
from penstock.errors import ModelLoadError
from tests.checkpoints import wordpiece_tokenizer, write_json
from tests.published.catalog import Published
from tests.published.encoders import ENCODERS

MODELS = (*ENCODERS,)
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


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.id)
def test_a_model_that_is_not_served_is_refused_with_the_reason(model: Published, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=model.refused):
        read(model, tmp_path)

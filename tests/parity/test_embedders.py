"""Embedders whose code is published with their weights, against the steps of that code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import torch

from penstock import Engine
from penstock.errors import ModelLoadError
from tests.parity.decoders import FAMILIES, ROWS, reference_states, unit
from tests.parity.embedders import EMBEDDERS, write_modules
from tests.parity.reference import cosines


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **{"max_num_batched_tokens": 1024} | options)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_states_and_vectors_equal_those_of_the_published_code(name: str, tmp_path: Path) -> None:
    embedder = EMBEDDERS[name]
    states = embedder.write(tmp_path).token_states(ROWS)
    with open_engine(tmp_path, **embedder.options) as engine:
        ours = np.concatenate(engine.token_embed(ROWS, normalize=False))
        vectors = engine.embed(ROWS)
    np.testing.assert_allclose(ours, np.concatenate(states), atol=2e-5)
    np.testing.assert_allclose(vectors, unit(embedder.pooled(states)), atol=1e-5)
    with open_engine(tmp_path, dtype="bfloat16", **embedder.options) as engine:
        assert cosines(engine.embed(ROWS), vectors).min() >= 0.999


POOLING = ("sentence_transformers.models.Pooling", "1_Pooling", {"pooling_mode_mean_tokens": True})
TRANSFORMER = ("sentence_transformers.models.Transformer", "", None)
QUANTIZER = ("st_quantize.FlexibleQuantizer", "", None)


def write_pplx(folder: Path, *modules: tuple[str, str, dict[str, Any] | None]) -> Path:
    FAMILIES["pplx"].write(folder)
    write_modules(folder, *modules)
    return folder


def test_pplx_embed_gives_the_integers_and_bits_of_its_quantizer(tmp_path: Path) -> None:
    folder = write_pplx(tmp_path, TRANSFORMER, POOLING, QUANTIZER)
    pooled = torch.from_numpy(np.stack([s.mean(0) for s in reference_states(FAMILIES["pplx"], folder)]))
    whole = (pooled.tanh() * 127).round().numpy()
    bits = np.packbits(pooled.numpy() >= 0, axis=-1)
    assert (whole == 0).any(), "the sign of the vector differs from that of the integers"
    with open_engine(folder) as engine:
        found = engine.embed(ROWS)
        assert (found == found.round()).all() and np.abs(
            found - whole
        ).max() <= 1  # a tie may round either way
        assert (found == whole).mean() > 0.99
        np.testing.assert_array_equal(engine.embed(ROWS, dtype="int8"), found)
        np.testing.assert_array_equal(engine.embed(ROWS, dtype="uint8"), found + 128)
        np.testing.assert_array_equal(engine.embed(ROWS, dtype="ubinary"), bits)
        np.testing.assert_array_equal(engine.embed(ROWS, dimensions=16), found[:, :16])
        np.testing.assert_allclose(engine.embed(ROWS, normalize=True), unit(found), atol=1e-6)
        scores = engine.score("a text", ["another one"])
        query, document = engine.embed(["a text", "another one"])
        np.testing.assert_allclose(np.ravel(scores), unit(query[None]) @ unit(document[None])[0], atol=1e-5)


def test_a_module_after_the_quantizer_is_refused(tmp_path: Path) -> None:
    last = ("sentence_transformers.models.Normalize", "2_Normalize", None)
    folder = write_pplx(tmp_path, TRANSFORMER, POOLING, QUANTIZER, last)
    with pytest.raises(ModelLoadError, match="a module after FlexibleQuantizer"):
        open_engine(folder)

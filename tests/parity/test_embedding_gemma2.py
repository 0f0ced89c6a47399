"""EmbeddingGemma 2's vectors of images, and of texts with images, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Engine
from penstock.errors import ModelLoadError, NotPossible
from penstock.inputs.images.preprocess import prepare
from penstock.models.embedding_gemma2 import layer_shapes
from penstock.types import Content
from tests.parity.embedding_gemma2 import CASES, GemmaCase, GemmaReference
from tests.parity.pages import pictures

LEAST = 0.9999
PICTURES = pictures()


class Subject:
    def __init__(self, case: GemmaCase, folder: Path) -> None:
        self.reference: GemmaReference = case.write(folder)
        self.engine = Engine(str(folder), device="cpu", dtype="float32")
        pixels = self.engine.spec.images
        assert pixels is not None
        self.images = [prepare(picture, pixels) for picture in PICTURES]

    def embed(self, rows: list[Any]) -> np.ndarray:
        found = np.asarray(self.engine.embed(rows))
        return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    made = Subject(request.param, tmp_path_factory.mktemp(request.param.name))
    yield made
    made.engine.close()


def test_images_have_the_vectors_of_the_reference(subject: Subject) -> None:
    got = subject.embed(subject.images)
    wanted = np.stack([subject.reference.vector([picture]) for picture in PICTURES])
    assert (got * wanted).sum(axis=1).min() > LEAST and np.abs(got - wanted).max() < 1e-4
    assert np.abs(wanted[0] - wanted[1]).max() > 1e-2  # so another picture's vector would fail the comparison


def test_texts_with_images_have_the_vectors_of_the_reference(subject: Subject) -> None:
    first, second = subject.images[:2]
    rows: list[Any] = [
        Content(("a cat: ", first, " and a chart: ", second)),
        "the third quarter",
        second,
        Content((second, "what does it show?")),
        first,
    ]
    wanted = [
        subject.reference.vector(parts)
        for parts in (
            ["a cat: ", PICTURES[0], " and a chart: ", PICTURES[1]],
            ["the third quarter"],
            [PICTURES[1]],
            [PICTURES[1], "what does it show?"],
            [PICTURES[0]],
        )
    ]
    mixed = subject.embed(rows)
    alone = np.concatenate([subject.embed([row]) for row in rows])
    assert (mixed * np.stack(wanted)).sum(axis=1).min() > LEAST
    assert np.abs(mixed - alone).max() < 1e-5


def test_without_an_image_processor_texts_keep_working(tmp_path: Path) -> None:
    reference = CASES[0].write(tmp_path)
    (tmp_path / "processor_config.json").unlink()
    with Engine(str(tmp_path), device="cpu", dtype="float32") as engine:
        got = np.asarray(engine.embed(["the third quarter"]))[0]
        wanted = reference.vector(["the third quarter"])
        assert float(got @ wanted) / float(np.linalg.norm(got)) > LEAST
        with pytest.raises(NotPossible, match="reads no images"):
            engine.embed(images=PICTURES[:1])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "siglip_vision_model", "gemma4_vision"),
        ("use_registers", True, "use_registers = True"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 100.0}, "rope_parameters"),
        ("pooling_kernel_size", 2, "pooling_kernel_size"),
        ("position_embedding_size", 20, "position_embedding_size"),
        ("standardize", "yes", "true or false"),
        ("output_proj_dims", 12, "output_proj_dims"),
    ],
)
def test_a_tower_whose_results_would_differ_is_refused(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    CASES[0].write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        Engine(str(tmp_path), device="cpu", dtype="float32").close()


def test_layers_are_numbered_with_and_without_leading_zeros() -> None:
    values = {"head_dim": 512, "num_key_value_heads": 1}
    config = {
        "num_hidden_layers": 12,
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    plain, padded = (
        layer_shapes(config | {"per_layer_config": dict.fromkeys(names, values)})
        for names in (("5", "11"), ("05", "11"))
    )
    assert plain == padded and [shape.head_dim for shape in plain].count(512) == 2
    with pytest.raises(ModelLoadError, match="no layer's number"):
        layer_shapes(config | {"per_layer_config": {"last": values}})

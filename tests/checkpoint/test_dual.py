"""How CLIP and SigLIP folders are read, and which are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Engine
from penstock.checkpoint.describe import read_spec
from penstock.errors import BadValue, ModelLoadError, NotPossible
from penstock.inputs.images.preprocess import prepare
from penstock.types import Content, Task
from tests.checkpoints import write_bert
from tests.parity.dual import CASES, CLIP, IMAGES, NUM_WORDS, largest_difference

SIGLIP = CASES[2]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    CLIP.write(folder)
    return folder


def changed(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a folder and change its config.json."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_dual_model_is_described_without_its_weights(clip_folder: Path) -> None:
    spec = read_spec(clip_folder, "clip")
    assert spec.tasks == (Task.EMBED, Task.SCORE) and spec.embed_dim == 32
    assert spec.pooling.methods == ("last",) and spec.pooling.normalize
    assert spec.dual is not None and spec.dual.end_token == NUM_WORDS + 2
    assert spec.dual.logit_scale == pytest.approx(2.3)
    assert spec.images is not None and spec.images.max_patches == 25


def test_siglip_pads_texts_to_the_length_that_it_was_trained_with(tmp_path: Path) -> None:
    SIGLIP.write(tmp_path)
    spec = read_spec(tmp_path, "siglip")
    assert spec.dual is not None and spec.lower_case
    assert (spec.dual.padded_length, spec.dual.pad_token, spec.dual.pads_left) == (24, NUM_WORDS, False)
    assert spec.dual.activation == "sigmoid"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config["vision_config"].update(image_size=48), "has to be 48, as image_size"),
        (lambda config: config["vision_config"].update(window_size=7), "vision_config.window_size = 7"),
        (lambda config: config["vision_config"].update(num_channels=1), "num_channels = 1"),
        (lambda config: config["vision_config"].update(vision_use_head=False), "vision_use_head = "),
        (lambda config: config["vision_config"].update(patch_size="8"), "patch_size"),
        (lambda config: config["text_config"].update(eos_token_id=[1, 2]), "eos_token_id"),
        (lambda config: config.update(text_config_dict={"hidden_size": 65}), "text_config_dict.hidden_size"),
    ],
)
def test_a_tower_that_would_be_computed_otherwise_is_refused_by_name(
    change: Callable[[dict[str, Any]], None], message: str, clip_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_spec(changed(clip_folder, tmp_path, change), "clip")


def test_a_model_without_an_image_processor_is_refused(clip_folder: Path, tmp_path: Path) -> None:
    folder = changed(clip_folder, tmp_path, lambda config: None)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no preprocessor_config\.json"):
        read_spec(folder, "clip")


def test_the_layout_of_sentence_transformers_keeps_vectors_as_they_are(tmp_path: Path) -> None:
    """clip-ViT-B-32 has its files below 0_CLIPModel, and no Normalize module."""
    reference = CLIP.write(tmp_path / "0_CLIPModel")
    module = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    with Engine(str(tmp_path), device="cpu", dtype="float32") as engine:
        vectors = engine.embed(["w1 w2", IMAGES[0]])
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.abs(norms - 1).min() > 1e-2
    wanted = np.concatenate([reference.texts(["w1 w2"]), reference.images(IMAGES[:1])])
    assert largest_difference(vectors / norms, wanted) < 1e-5


def test_inputs_that_the_model_cannot_read_are_refused_in_words(clip_folder: Path) -> None:
    with Engine(str(clip_folder), device="cpu", dtype="float32") as engine:
        assert engine.spec.images is not None
        image = prepare(IMAGES[0], engine.spec.images)
        for message, call in (
            ("has no end token", lambda: engine.embed([[1, 2, 3]])),
            ("has 2 parts", lambda: engine.embed([Content(("w1", image))])),
            ("give images as input", lambda: engine.zero_shot(["w1"], ["w2", "w3"])),
            ("labels compete", lambda: engine.zero_shot([image], ["w2", "w3"], multi_label=True)),
            ("one {} for the label", lambda: engine.zero_shot([image], ["w2"], hypothesis_template="w1")),
            ("not both", lambda: engine.embed(["w1"], images=[image])),
            ("at least one image", lambda: engine.embed(images=[])),
        ):
            with pytest.raises(BadValue, match=message):
                call()
        cut = engine.embed([[1, 2, NUM_WORDS + 2, 5, 6], [1, 2, NUM_WORDS + 2]])
        assert np.array_equal(cut[0], cut[1])  # tokens after the first end token have no effect


def test_a_model_of_texts_refuses_images(tmp_path: Path) -> None:
    write_bert(tmp_path)
    with Engine(str(tmp_path), device="cpu") as engine:
        for call in (
            lambda: engine.embed(images=[IMAGES[0]]),
            lambda: engine.embed(["text", IMAGES[0]]),
            lambda: engine.score("text", [IMAGES[0]]),
        ):
            with pytest.raises(NotPossible, match="reads no images"):
                call()

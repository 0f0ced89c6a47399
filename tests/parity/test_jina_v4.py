"""jina-embeddings-v4: single and token vectors of texts and images, with the adapter of each request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock import Engine
from penstock.checkpoint.describe import read_spec
from penstock.errors import BadValue, ModelLoadError
from penstock.inputs.images.preprocess import prepare
from penstock.types import Content, Task
from tests.inputs.images.pictures import noise
from tests.parity.jina_v4 import DIM, TASKS, JinaV4, single_vector, token_vectors
from tests.parity.picture_reference import Reference
from tests.parity.qwen_vl import HIDDEN, qwen_tokenizer
from tests.parity.reference import Vectors

PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>\n"
PICTURES = [noise(50, 38), noise(33, 90, seed=3)]
TEXTS = ["the page of the book", "a river"]


class Expected:
    """The results of the published forward pass with the adapter of a task."""

    def __init__(self, jina: JinaV4, task: str) -> None:
        model, self.projector = jina.model(task)
        self.reference = Reference(model)

    def text(self, text: str) -> tuple[Vectors, Vectors]:
        states = self.reference.states(text, [])
        ids = qwen_tokenizer().encode(text).ids
        return single_vector(states, ids), token_vectors(states, self.projector)

    def image(self, picture: Any) -> tuple[Vectors, Vectors]:
        states = self.reference.states(PAGE, [picture])
        before, after = PAGE.split("<|image_pad|>")
        encode = qwen_tokenizer().encode
        inner = len(states) - len(encode(before).ids) - len(encode(after).ids)
        ids = [*encode(before).ids, *[-1] * inner, *encode(after).ids]
        return single_vector(states, ids), token_vectors(states, self.projector)


def near(got: Vectors, wanted: Vectors, tolerance: float = 1e-3) -> bool:
    return got.shape == wanted.shape and float(np.abs(got - wanted).max()) < tolerance


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> tuple[JinaV4, Path]:
    folder = tmp_path_factory.mktemp("jina") / "jina-embeddings-v4"
    return JinaV4(folder), folder


def test_each_task_gives_one_vector_and_token_vectors_of_texts_and_images(
    jina: tuple[JinaV4, Path],
) -> None:
    with Engine(str(jina[1]), device="cpu", dtype="float32") as engine:
        assert engine.spec.tasks == (Task.EMBED, Task.TOKEN_EMBED, Task.SCORE)
        assert (engine.spec.embed_dim, engine.spec.token_dim) == (HIDDEN, DIM)
        assert engine.spec.adapters == TASKS
        seen = []
        for task in TASKS:
            expected = Expected(jina[0], task)
            vectors = engine.embed([*TEXTS, *PICTURES], adapter=task)
            tokens = engine.token_embed([*TEXTS, *PICTURES], adapter=task)
            wanted = [expected.text("Query: " + text) for text in TEXTS]
            wanted += [expected.image(picture) for picture in PICTURES]
            for vector, matrix, (single, multi) in zip(vectors, tokens, wanted, strict=True):
                assert near(vector, single) and near(matrix, multi)
            seen.append(vectors)
    assert np.abs(seen[0] - seen[1]).max() > 1e-2 and np.abs(seen[1] - seen[2]).max() > 1e-2


def test_passages_have_a_prompt_of_their_own_but_for_matching(jina: tuple[JinaV4, Path]) -> None:
    with Engine(str(jina[1]), device="cpu", dtype="float32") as engine:
        for task, options, prompt in (
            ("retrieval", {"prompt_name": "passage"}, "Passage: "),
            ("retrieval", {"input_type": "document"}, "Passage: "),
            ("code", {"input_type": "query"}, "Query: "),
            ("text-matching", {"prompt_name": "passage"}, "Query: "),
            ("text-matching", {"input_type": "document"}, "Query: "),
            ("text-matching", {"prompt": "So: "}, "So: "),
        ):
            wanted, _ = Expected(jina[0], task).text(prompt + TEXTS[0])
            assert near(engine.embed([TEXTS[0]], adapter=task, **options)[0], wanted)
        by_type = engine.embed([TEXTS[0]], input_type="document")  # documents use the adapter "retrieval"
        assert near(by_type[0], Expected(jina[0], "retrieval").text("Passage: " + TEXTS[0])[0])


def test_scores_compare_a_text_with_images_by_their_vectors(jina: tuple[JinaV4, Path]) -> None:
    expected = Expected(jina[0], "retrieval")
    with Engine(str(jina[1]), device="cpu", dtype="float32") as engine:
        scores = engine.score(TEXTS[0], PICTURES)
    query = expected.text("Query: " + TEXTS[0])[0]
    wanted = [float(query @ expected.image(picture)[0]) for picture in PICTURES]
    assert np.abs(np.array(scores) - wanted).max() < 1e-3


def test_a_merged_task_needs_no_choice(jina: tuple[JinaV4, Path]) -> None:
    expected = Expected(jina[0], "code")
    options = {"hf_overrides": {"lora_task": "code"}}
    with Engine(str(jina[1]), device="cpu", dtype="float32", **options) as engine:
        assert engine.spec.adapters == ()
        assert near(engine.embed([TEXTS[0]])[0], expected.text("Query: " + TEXTS[0])[0])
        (tokens,) = engine.token_embed([PICTURES[0]])
        assert near(tokens, expected.image(PICTURES[0])[1])


def test_unsupported_inputs_are_refused(jina: tuple[JinaV4, Path]) -> None:
    with Engine(str(jina[1]), device="cpu", dtype="float32") as engine:
        with pytest.raises(BadValue, match="needs an adapter for each request"):
            engine.embed(TEXTS)
        with pytest.raises(BadValue, match="adapter 'separation' is unknown"):
            engine.embed(TEXTS, adapter="separation")
        assert engine.spec.images is not None
        both = Content(("a text", prepare(PICTURES[0], engine.spec.images)))
        with pytest.raises(BadValue, match="a text or one image, not both"):
            engine.embed([both], adapter="code")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"single_vector_pool_strategy": "last"}, "single_vector_pool_strategy"),
        ({"truncate_dim": 16}, "truncate_dim"),
        ({"task_names": ["retrieval"]}, r"belongs to none of the tasks: retrieval"),
        ({"lora_task": "other"}, "not among the model's adapters"),
    ],
)
def test_contradictory_files_are_refused(
    jina: tuple[JinaV4, Path], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Engine(str(jina[1]), device="cpu", hf_overrides=change)


def test_a_tensor_that_fits_no_module_is_refused(tmp_path: Path) -> None:
    JinaV4(tmp_path / "model")
    file = tmp_path / "model/adapters/adapter_model.safetensors"
    moved = {name.replace("layers.1.", "layers.9."): each for name, each in load_file(file).items()}
    save_file(moved, file)
    with pytest.raises(ModelLoadError, match=r"does not have, or that cannot be adapted: .*layers\.9\."):
        Engine(str(tmp_path / "model"), device="cpu")


def test_prompts_in_the_files_override_the_defaults(tmp_path: Path) -> None:
    JinaV4(tmp_path / "model")
    prompts = {"prompts": {"query": "Ask: "}, "default_prompt_name": None}
    (tmp_path / "model/config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert read_spec(tmp_path / "model", "jina").prompts == {"query": "Ask: "}

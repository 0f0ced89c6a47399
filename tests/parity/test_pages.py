"""ColPali and ColModernVBERT against transformers: queries, pages, both in one call, and their scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock import Engine
from penstock.errors import BadValue, ModelLoadError
from penstock.inputs.images.preprocess import prepare
from penstock.types import Content, Task
from tests.parity.lora import write_adapter
from tests.parity.pages import (
    CASES,
    DIM,
    QUERIES,
    PageCase,
    maxsim,
    pictures,
    vbert_config,
    vbert_files,
    worst_cosine,
)
from tests.parity.reference import cosines, randomise

LEAST = 0.9999
PICTURES = pictures()


class Subject:
    def __init__(self, case: PageCase, folder: Path) -> None:
        reference = case.write(folder)
        self.queries, self.pages = reference.queries(QUERIES), reference.pages(PICTURES)
        self.engine = Engine(str(folder), device="cpu", dtype="float32")


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    made = Subject(request.param, tmp_path_factory.mktemp(request.param.name))
    yield made
    made.engine.close()


def test_queries_and_pages_have_the_vectors_of_the_reference(subject: Subject) -> None:
    spec = subject.engine.spec
    assert spec.tasks == (Task.TOKEN_EMBED, Task.SCORE) and spec.token_dim == DIM and not spec.is_causal
    queries = subject.engine.token_embed(QUERIES, input_type="query")
    assert worst_cosine(queries, subject.queries) > LEAST
    pages = subject.engine.token_embed(PICTURES)
    assert worst_cosine(pages, subject.pages) > LEAST
    for got, wanted in zip([*queries, *pages], [*subject.queries, *subject.pages], strict=True):
        assert np.abs(got - wanted).max() < 1e-4


def test_a_page_has_the_same_vectors_alone_and_among_texts_and_pages(subject: Subject) -> None:
    embed = subject.engine.token_embed
    mixed = embed(
        [PICTURES[1], "a text", PICTURES[0], PICTURES[2], "another text of more words", PICTURES[1]]
    )
    assert worst_cosine([mixed[0], mixed[2], mixed[3]], [subject.pages[n] for n in (1, 0, 2)]) > LEAST
    (alone,) = embed([PICTURES[1]])
    assert np.abs(alone - mixed[0]).max() < 1e-5 and np.array_equal(mixed[0], mixed[5])
    (text,) = embed(["a text"])
    assert np.abs(text - mixed[1]).max() < 1e-5


def test_scores_of_pages_are_those_of_maxsim(subject: Subject) -> None:
    got = subject.engine.score(QUERIES[0], PICTURES)
    wanted = [maxsim(subject.queries[0], page) for page in subject.pages]
    assert np.abs(np.array(got) - wanted).max() < 1e-3
    ranked = subject.engine.rerank(QUERIES[0], PICTURES)
    assert [hit.index for hit in ranked] == sorted(range(len(wanted)), key=lambda n: -wanted[n])


def test_an_image_beside_a_text_is_refused_where_no_prompt_has_both(tmp_path: Path) -> None:
    CASES[0].write(tmp_path)
    with Engine(str(tmp_path), device="cpu", dtype="float32") as engine:
        assert engine.spec.images is not None
        image = prepare(PICTURES[0], engine.spec.images)
        with pytest.raises(BadValue, match="a text or one image, not both"):
            engine.token_embed([Content(("look at this: ", image))])


@pytest.mark.parametrize("suffix", ["Model", "ForMaskedLM"])
def test_modernvbert_embeds_texts_with_images(suffix: str, tmp_path: Path) -> None:
    """ColModernVBERT's backbone: the mean hidden state of a text with two pictures among its words."""
    tokenizer, processor = vbert_files(tmp_path)
    config = vbert_config(tokenizer.convert_tokens_to_ids("<image>"))
    model: Any = getattr(transformers, f"ModernVBert{suffix}")(config).eval()
    randomise(model, 8)
    model.save_pretrained(tmp_path)
    inputs = processor(images=[PICTURES[:2]], text=["a <image>cat, then <image>the chart"])
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        states = (model.model if suffix == "ForMaskedLM" else model)(**inputs).last_hidden_state[0]
    wanted = states.mean(0).numpy()
    with Engine(str(tmp_path), device="cpu", dtype="float32") as engine:
        assert engine.spec.images is not None
        first, second = (prepare(picture, engine.spec.images) for picture in PICTURES[:2])
        row = Content(("a ", first, "cat, then ", second, "the chart"))
        got, alone, text = engine.embed([row, first, "a text"])
        (again,) = engine.embed([row])
    given = np.repeat(wanted[None], 3, axis=0)
    assert cosines(np.stack([got, alone, text]), given)[0] > LEAST and np.abs(got - again).max() < 1e-5
    assert cosines(np.stack([got, alone, text]), given)[1:].max() < LEAST


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        (("vlm_config", "vision_config"), "model_type", "clip_vision_model", "siglip_vision_model"),
        (("vlm_config", "vision_config"), "use_registers", True, "use_registers = True"),
        (("vlm_config", "vision_config"), "num_channels", 1, "num_channels = 1"),
        (("vlm_config", "text_config"), "hidden_activation", "silu", "hidden_activation = 'silu'"),
        (("vlm_config", "text_config"), "use_bidirectional_attention", False, "use_bidirectional_attention"),
        (("vlm_config", "text_config"), "model_type", "gemma3_text", "supported: gemma, gemma2"),
        (("vlm_config",), "model_type", "llava", "supported: 'paligemma'"),
        ((), "mask_non_image_embeddings", True, "mask_non_image_embeddings"),
        ((), "embedding_dim", DIM + 1, "embedding_proj_layer"),
    ],
)
def test_models_whose_results_would_differ_are_refused(
    where: tuple[str, ...], key: str, value: Any, message: str, tmp_path: Path
) -> None:
    CASES[0].write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    part = config
    for name in where:
        part = part[name]
    part[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        Engine(str(tmp_path), device="cpu", dtype="float32").close()


def test_a_tensor_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    CASES[0].write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["vlm.multi_modal_projector.linear_2.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="linear_2"):
        Engine(str(tmp_path), device="cpu", dtype="float32").close()


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=lambda case: case.name)
def test_adapters_change_the_text_model_and_are_refused_for_the_tower(case: PageCase, tmp_path: Path) -> None:
    reference = case.write(tmp_path / "base")
    plain = reference.pages(PICTURES[:2])
    layers = (
        r".*\.(language_model|text_model)\.layers\.\d+\..*(q_proj|down_proj|Wqkv|Wo)|embedding_proj_layer"
    )
    adapted: Any = write_adapter(reference.model, tmp_path / "text", target_modules=layers)
    write_adapter(reference.model, tmp_path / "tower", target_modules=r".*vision_.*q_proj")
    reference.model.load_state_dict(adapted.merge_and_unload().state_dict())
    wanted, query = reference.pages(PICTURES[:2]), reference.queries(QUERIES[:1])
    modules = {"text": str(tmp_path / "text")}
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "enable_lora": True}
    with Engine(str(tmp_path / "base"), lora_modules=modules, **options) as engine:
        assert worst_cosine(engine.token_embed(PICTURES[:2], adapter="text"), wanted) > LEAST
        assert worst_cosine(engine.token_embed(PICTURES[:2]), plain) > LEAST
        own = engine.token_embed(QUERIES[:1], input_type="query", adapter="text")
        assert worst_cosine(own, query) > LEAST
        with pytest.raises(ModelLoadError, match=r"vision_.*q_proj"):
            engine.load_adapter("tower", str(tmp_path / "tower"))
    assert worst_cosine(wanted, plain) < LEAST  # the adapter has an effect

"""Pictures, from pixels to vectors, scores and words, against transformers' processors and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock import Engine
from penstock.checkpoint import image_prompts
from penstock.errors import BadValue
from tests.inputs.images.pictures import noise
from tests.parity.page_retrievers import Retriever, native_layout
from tests.parity.picture_reference import Reference
from tests.parity.qwen_vl import make_model, qwen_tokenizer, write_model

PICTURES = [noise(50, 38), noise(33, 90, seed=3)]
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
PAGE = f"<|im_start|>user\n{IMAGE_TEXT}Describe the image.<|im_end|><|endoftext|>"
ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
JUDGE = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."


def test_gme_embeds_pictures_in_its_own_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published code resizes twice and numbers image tokens like text tokens. Its pixel limits are far
    above these pictures, so the test uses smaller limits."""
    model, folder = make_model("qwen2_vl"), tmp_path / "gme-Qwen2-VL-2B-Instruct"
    write_model(folder, model)
    (known, *_) = image_prompts._PUBLISHED
    small = msgspec.structs.replace(known, min_pixels=64, max_pixels=1 << 14, first_range=(64, 1 << 20))
    monkeypatch.setattr(image_prompts, "_PUBLISHED", (small,))
    reference = Reference(model)
    begin = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    text, large = begin + IMAGE_TEXT + ANSWER + "<|endoftext|>", noise(203, 91)
    with Engine(str(folder), dtype="float32", device="cpu", enable_generation=False) as engine:
        got = engine.embed(images=[*PICTURES, large])
    for vector, picture in zip(got, [*PICTURES, large], strict=True):
        first = picture.resize([max(8, round(side / 8) * 8) for side in picture.size])
        wanted = reference.vector(text, [first], plain_positions=True)
        assert float(vector @ wanted) > 0.9999 and np.abs(vector - wanted).max() < 1e-3
        other = reference.vector(text, [first])
        assert np.abs(vector - other).max() > 1e-2
    once = reference.vector(text, [large], plain_positions=True)
    assert np.abs(got[-1] - once).max() > 1e-3


def test_pages_are_scored_by_maxsim_against_queries(tmp_path: Path) -> None:
    retriever = native_layout(tmp_path / "model")
    with Engine(str(tmp_path / "model"), dtype="float32", device="cpu") as engine:
        scores = engine.score("the page", PICTURES)
    wanted = [_maxsim(retriever, picture) for picture in PICTURES]
    assert np.abs(np.array(scores) - wanted).max() < 1e-2  # the scores are about twenty


@torch.inference_mode()
def _maxsim(retriever: Retriever, picture: Any) -> float:
    reference = Reference(retriever.model)
    query = "Query: the page" + "<|endoftext|>" * 10 + "\n"
    sides = [reference.states(query, []), reference.states(PAGE, [picture])]
    projected = [retriever.projection(torch.from_numpy(side)) for side in sides]
    left, right = (torch.nn.functional.normalize(side, dim=-1) for side in projected)
    return float((left @ right.T).max(dim=1).values.sum())


def test_the_reranker_reads_pictures_as_queries_and_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = make_model("qwen3_vl"), tmp_path / "Qwen3-VL-Reranker-2B"
    write_model(folder, model)
    monkeypatch.setattr(image_prompts, "_PUBLISHED", ())
    reference, weights = Reference(model), model.lm_head.weight.detach().numpy()
    yes, no = (qwen_tokenizer().encode(word).ids[0] for word in ("yes", "no"))
    task = "Given a search query, retrieve relevant candidates that answer the query."

    def wanted(query: str, document: str, pictures: list[Any]) -> float:
        judge = f'<|im_start|>system\n{JUDGE} Note that the answer can only be "yes" or "no".<|im_end|>\n'
        text = f"<|im_start|>user\n<Instruct>: {task}<Query>:{query}\n<Document>:{document}"
        last = reference.states(judge + text + ANSWER, pictures)[-1]
        return float(1 / (1 + np.exp(-(last @ (weights[yes] - weights[no])))))

    with Engine(str(folder), dtype="float32", device="cpu") as engine:
        first, second = engine.score("a page", [PICTURES[0], "a text"])
        (both,) = engine.score(PICTURES[0], [PICTURES[1]])
    assert first == pytest.approx(wanted("a page", IMAGE_TEXT, PICTURES[:1]), abs=1e-3)
    assert second == pytest.approx(wanted("a page", "a text", []), abs=1e-5)
    assert both == pytest.approx(wanted(IMAGE_TEXT, IMAGE_TEXT, PICTURES), abs=1e-3)


def test_token_vectors_of_a_page_are_those_of_all_its_tokens(tmp_path: Path) -> None:
    retriever = native_layout(tmp_path / "model")
    with Engine(str(tmp_path / "model"), dtype="float32", device="cpu") as engine:
        page, text = engine.token_embed([PICTURES[0], "a text"])
    states = torch.from_numpy(Reference(retriever.model).states(PAGE, PICTURES[:1]))
    with torch.inference_mode():
        wanted = torch.nn.functional.normalize(retriever.projection(states), dim=-1).numpy()
    assert page.shape == wanted.shape
    assert (page * wanted).sum(axis=1).min() > 0.9999
    assert len(text) == len(qwen_tokenizer().encode("a text").ids)


def test_a_model_of_fewer_positions_than_a_usual_image_has_tokens_loads(tmp_path: Path) -> None:
    options: dict[str, Any] = {"pooler_config": {"pooling_type": "last"}, "enable_generation": False}
    vectors = []
    for positions in (512, 64):
        folder = write_model(
            tmp_path / str(positions), make_model("qwen2_vl", max_position_embeddings=positions)
        )
        with Engine(str(folder), device="cpu", dtype="float32", **options) as engine:
            vectors.append(engine.embed(images=[noise(32, 32)]))
            if positions == 64:
                with pytest.raises(BadValue, match="at most 64 are possible"):
                    engine.embed(images=[noise(200, 200)])
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)

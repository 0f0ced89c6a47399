"""Texts and images in one request: rows of a Qwen-VL model, from inputs to vectors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import Engine
from penstock.errors import BadValue
from penstock.inputs.images.loader import ImageLoader
from penstock.types import Content, PoolingParams, PreparedImage, Task
from tests.inputs.images.pictures import noise
from tests.parity.qwen_vl import make_model, write_model

PICTURES = [noise(30, 22), noise(17, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("content") / "model", make_model("qwen3_vl"))


def test_vectors_of_texts_with_images_are_those_of_transformers(folder: Path) -> None:
    import transformers

    model = make_model("qwen3_vl")
    image_processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    with Engine(str(folder), dtype="float32", device="cpu", enable_generation=True) as engine:
        spec, text = engine.spec, engine.local.text
        assert spec.images is not None
        images = ImageLoader().prepare_now(PICTURES, spec.images)
        inputs = ["plain words", images[0], Content(("first ", images[1], " then ", images[0]))]
        from penstock.tasks.embed import Embed

        task = Embed(inputs=inputs, params=PoolingParams(Task.EMBED))
        prepared = asyncio.run(task.prepare(text, "r"))
        got = engine.local.engine.submit(prepared.request).result().values
        request = prepared.request
    rows = np.split(request.token_ids, request.starts[1:])
    expected = []
    for ids, pictures in zip(rows, ([], [0], [1, 0]), strict=True):
        given = {"input_ids": torch.tensor([ids.tolist()])}
        if pictures:
            given |= dict(image_processor([PICTURES[at] for at in pictures], return_tensors="pt"))
            given["mm_token_type_ids"] = (given["input_ids"] == model.config.image_token_id).int()
        model.model.rope_deltas = None
        with torch.inference_mode():
            state = model.model(**given).last_hidden_state[0, -1].numpy()
        expected.append(state / np.linalg.norm(state))
    assert np.abs(got - np.stack(expected)).max() < 2e-5


def test_an_input_with_an_image_is_never_cut(folder: Path) -> None:
    from penstock.checkpoint.describe import read_spec
    from penstock.inputs.processor import InputOptions
    from penstock.tasks.embed import Embed
    from penstock.tasks.model import TextModel

    spec = read_spec(folder, "model")
    text = TextModel(spec)
    assert spec.images is not None
    (image,) = ImageLoader().prepare_now([noise(120, 120)], spec.images)
    options = InputOptions(truncate_prompt_tokens=20)

    async def prepare(item: PreparedImage | Content) -> None:
        task = Embed(inputs=[item, "words"], params=PoolingParams(Task.EMBED), options=options)
        await task.prepare(text, "r")

    with pytest.raises(BadValue, match="at most 20 are possible, and an image cannot be cut"):
        asyncio.run(prepare(image))
    text.close()


def test_a_reranker_reads_query_and_document_with_images_in_its_own_prompt(tmp_path: Path) -> None:
    from penstock.checkpoint.describe import read_spec
    from penstock.inputs.pairs import prepare_pairs
    from penstock.tasks.model import TextModel
    from tests.parity.qwen_vl import qwen_tokenizer

    folder = write_model(tmp_path / "Qwen3-VL-Reranker-2B", make_model("qwen3_vl", tie_word_embeddings=False))
    spec = read_spec(folder, "Qwen3-VL-Reranker-2B")
    assert spec.images is not None and spec.score_kind == "cross"
    text = TextModel(spec)
    images = ImageLoader().prepare_now(PICTURES, spec.images)
    pairs = [("what is it?", images[0]), (Content((images[1], "this")), "words")]
    request = prepare_pairs(text.processor, "r", pairs, PoolingParams(Task.SCORE))
    text.close()

    def shown(image: PreparedImage) -> str:
        return f"<|vision_start|>{'<|image_pad|>' * image.num_tokens}<|vision_end|>"

    task = "Given a search query, retrieve relevant candidates that answer the query."
    judge = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    for row, (query, document) in enumerate(
        [("what is it?", shown(images[0])), (f"{shown(images[1])}this", "words")]
    ):
        expected = (
            f"<|im_start|>system\n{judge}<|im_end|>\n<|im_start|>user\n<Instruct>: {task}<Query>:{query}\n"
            f"<Document>:{document}<|im_end|>\n<|im_start|>assistant\n"
        )
        start, length = int(request.starts[row]), int(request.lengths[row])
        ids = request.token_ids[start : start + length].tolist()
        assert ids == qwen_tokenizer().encode(expected).ids
    assert request.images is not None and request.images.rows.tolist() == [0, 1]
    assert request.rope_positions is not None

"""Qwen3-VL-Embedding and Qwen3-VL-Reranker in the sentence-transformers layouts of their repositories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from penstock import Engine
from penstock.checkpoint import image_prompts
from tests.inputs.images.pictures import noise
from tests.parity.picture_reference import Reference
from tests.parity.qwen_vl import CHAT_TEMPLATE, HIDDEN, PAD, make_model, qwen_tokenizer, write_model
from tests.published.catalog import modules
from tests.published.qwen_vl import EMBEDDING_FILES, RERANKER_FILES

PICTURES = [noise(50, 38), noise(33, 90, seed=3)]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".'
)


def write_layout(folder: Path, files: dict[str, Any], own: dict[str, Any]) -> None:
    for name, content in (files | own).items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif name != "tokenizer_config.json":
            file.write_text(json.dumps(content))


@pytest.fixture(autouse=True)
def _pixels_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the pixel limits of the test's files. The published limits are far above these pictures."""
    monkeypatch.setattr(image_prompts, "_PUBLISHED", ())


def test_the_embedder_has_its_default_instruction_and_ends_as_its_tokenizer_says(tmp_path: Path) -> None:
    """Its tokenizer.json appends <|endoftext|> to every text, and the hidden state of this token is the
    vector (technical report, ms-swift's template, `add_special_tokens` in vLLM's example)."""
    model, folder = make_model("qwen3_vl"), tmp_path / "Qwen3-VL-Embedding-2B"
    write_model(folder, model)
    pooling = EMBEDDING_FILES["1_Pooling/config.json"] | {"embedding_dimension": HIDDEN}
    write_layout(folder, EMBEDDING_FILES, {"1_Pooling/config.json": pooling})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", PAD)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    reference, plain = Reference(model), SYSTEM.format("Represent the user's input.")
    with Engine(str(folder), dtype="float32", device="cpu", enable_generation=False) as engine:
        (text,) = engine.embed(["a page"])
        (told,) = engine.embed(["a page"], instruction="Find it.")
        (image,) = engine.embed(images=PICTURES[:1])
    end = ANSWER + "<|endoftext|>"
    for got, wanted in (
        (text, reference.vector(plain + "a page" + end, [])),
        (told, reference.vector(SYSTEM.format("Find it.") + "a page" + end, [])),
        (image, reference.vector(plain + IMAGE + end, PICTURES[:1])),
    ):
        assert float(got @ wanted) > 0.9999 and np.abs(got - wanted).max() < 1e-3


@pytest.mark.parametrize("path", ["1_LogitScore", "1_Head"])
def test_the_reranker_is_asked_by_its_template_of_that_name(path: str, tmp_path: Path) -> None:
    """modules.json of the 8B model names a missing folder (discussions/11 of its repository)."""
    model, folder = make_model("qwen3_vl"), tmp_path / "Qwen3-VL-Reranker-2B"
    write_model(folder, model)
    yes, no = (qwen_tokenizer().encode(word).ids[0] for word in ("yes", "no"))
    own: dict[str, Any] = {"1_LogitScore/config.json": {"true_token_id": yes, "false_token_id": no}}
    own["modules.json"] = modules("Transformer", "LogitScore", LogitScore=path)
    write_layout(folder, RERANKER_FILES, own)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)  # for chats, without queries
    reference, weights = Reference(model), model.lm_head.weight.detach().numpy()
    default = RERANKER_FILES["config_sentence_transformers.json"]["prompts"]["query"]

    def wanted(query: str, document: str, pictures: list[Any], task: str = default) -> float:
        text = SYSTEM.format(JUDGE) + f"<Instruct>: {task}<Query>:{query}\n<Document>:{document}" + ANSWER
        return float(reference.states(text, pictures)[-1] @ (weights[yes] - weights[no]))

    with Engine(str(folder), dtype="float32", device="cpu") as engine:
        first, second = engine.score("a page", [PICTURES[0], "a text"])
        (both,) = engine.score(PICTURES[0], [PICTURES[1]])
        (told,) = engine.score("a page", ["a text"], instruction="Find it")
    assert first == pytest.approx(wanted("a page", IMAGE, PICTURES[:1]), abs=2e-3)
    assert second == pytest.approx(wanted("a page", "a text", []), abs=1e-4)
    assert both == pytest.approx(wanted(IMAGE, IMAGE, PICTURES), abs=2e-3)
    assert told == pytest.approx(wanted("a page", "a text", [], "Find it"), abs=1e-4)

"""Published embedders and rerankers based on Qwen-VL: the prompts around their texts, and their scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Engine
from penstock.checkpoint.describe import read_spec
from penstock.errors import BadValue, ModelLoadError
from penstock.inputs.chat import part_texts
from penstock.types import PoolingParams, Task
from tests.parity.qwen_vl import (
    CHAT_TEMPLATE,
    VISION_END,
    VISION_START,
    Row,
    as_published,
    flat_config,
    make_model,
    make_row,
    qwen_tokenizer,
    reference_states,
    request_of,
    write_model,
)
from tests.parity.reference import Vectors

TEXT = "the page of the book"
SYSTEM = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n"
ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".'
)
PLAIN = "Represent the user's input."
DEFAULT_TASK = "Given a search query, retrieve relevant candidates that answer the query."


def ids_of(text: str) -> list[int]:
    ids: list[int] = qwen_tokenizer().encode(text).ids
    return ids


def vector_of(model: Any, text: str) -> Vectors:
    """The normalised hidden state of the last token of a text, without a prompt."""
    last = reference_states(model, Row(ids_of(text)))[-1]
    return last / np.linalg.norm(last)


def test_gme_in_the_layout_of_its_files_reads_texts_as_it_was_trained(tmp_path: Path) -> None:
    model, folder = make_model("qwen2_vl"), tmp_path / "gme-Qwen2-VL-2B-Instruct"
    write_model(folder, model)
    renamed = {"model.language_model.": "model.", "model.visual.": "visual."}
    as_published(folder, renamed, flat_config("qwen2_vl", folder))
    with Engine(str(folder), dtype="float32", device="cpu", enable_generation=False) as engine:
        for options, prompt in (
            ({}, "You are a helpful assistant."),
            ({"input_type": "document"}, "You are a helpful assistant."),
            ({"instruction": "Find a page."}, "Find a page."),
        ):
            wanted = vector_of(model, SYSTEM.format(prompt) + TEXT + ANSWER + "<|endoftext|>")
            assert np.abs(engine.embed([TEXT], **options)[0] - wanted).max() < 1e-5


def test_the_class_of_gme_says_what_its_name_says(tmp_path: Path) -> None:
    """Prompt, pixel limits and positions follow from the class, whatever the folder's name."""
    write_model(tmp_path / "mine", make_model("qwen2_vl"))
    config = json.loads((tmp_path / "mine/config.json").read_text()) | {"architectures": ["GmeQwen2VL"]}
    (tmp_path / "mine/config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path / "mine", "mine")
    assert spec.frame.begin == SYSTEM.format("You are a helpful assistant.")
    assert spec.images is not None and spec.images.geometry.min_pixels == 256 * 28 * 28  # type: ignore[union-attr]
    assert spec.image_prompt is not None and spec.image_prompt.has_plain_positions


def test_qwen3_vl_embedding_ends_an_instruction_as_its_published_code_does(tmp_path: Path) -> None:
    model, folder = make_model("qwen3_vl"), tmp_path / "Qwen3-VL-Embedding-2B"
    write_model(folder, model)
    with Engine(str(folder), dtype="float32", device="cpu", enable_generation=False) as engine:
        for given, prompt in ((None, PLAIN), ("Find it ", "Find it."), ("So?", "So?"), (" \n", PLAIN)):
            wanted = vector_of(model, SYSTEM.format(prompt) + TEXT + ANSWER)
            assert np.abs(engine.embed([TEXT], instruction=given)[0] - wanted).max() < 1e-5


def test_a_layout_of_messages_writes_texts_by_its_chat_template(tmp_path: Path) -> None:
    model = make_model("qwen2_5_vl", "Model")
    write_model(tmp_path, model)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(modules)
    ]
    pooling = {"word_embedding_dimension": 48, "pooling_mode_lasttoken": True}
    transformer = {
        "modality_config": {
            "text": {"method": "forward"},
            "message": {"method": "forward", "format": "structured"},
        },
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    for name, values in (
        ("modules.json", listed),
        ("1_Pooling/config.json", pooling),
        ("2_Normalize/config.json", {}),
        ("sentence_bert_config.json", transformer),
        ("config_sentence_transformers.json", {"prompts": {"query": "Find a page."}}),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(values))
    user = "<|im_start|>user\n" + TEXT + ANSWER
    with Engine(str(tmp_path), dtype="float32", device="cpu") as engine:
        plain, prompted = engine.embed([TEXT]), engine.embed([TEXT], prompt_name="query")
        free = engine.embed([TEXT], prompt="Look.")
    assert np.abs(plain[0] - vector_of(model, user)).max() < 1e-5
    for got, prompt in ((prompted, "Find a page."), (free, "Look.")):
        wanted = vector_of(model, f"<|im_start|>system\n{prompt}<|im_end|>\n" + user)
        assert np.abs(got[0] - wanted).max() < 1e-5


def test_a_chat_template_that_changes_texts_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, make_model("qwen2_vl", "Model"))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = CHAT_TEMPLATE.replace("part.text", "part.text | trim")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    kinds = ["Transformer", "Pooling"]
    listed = [
        {"idx": n, "name": str(n), "path": "1_Pooling" if n else "", "type": k} for n, k in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"modality_config": {"message": {}}}))
    with pytest.raises(ModelLoadError, match="changes the texts"):
        read_spec(tmp_path, "changes")


def test_the_reranker_scores_by_the_weights_of_its_two_answers(tmp_path: Path) -> None:
    model, folder = make_model("qwen3_vl", tie_word_embeddings=False), tmp_path / "Qwen3-VL-Reranker-2B"
    write_model(folder, model)
    weights = model.lm_head.weight.detach()
    direction = (weights[ids_of("yes")[0]] - weights[ids_of("no")[0]]).numpy()
    assert len(ids_of("yes")) == len(ids_of("no")) == 1

    def score(row: Row) -> float:
        return float(torch.sigmoid(torch.tensor(reference_states(model, row)[-1] @ direction)))

    def prompt(query: str, document: str, task: str = DEFAULT_TASK) -> str:
        return SYSTEM.format(JUDGE) + f"<Instruct>: {task}<Query>:{query}\n<Document>:{document}" + ANSWER

    with Engine(str(folder), dtype="float32", device="cpu") as engine:
        assert engine.spec.tasks[0] is Task.SCORE and not engine.spec.generates
        for options, text in (({}, prompt("a", TEXT)), ({"instruction": "Do."}, prompt("a", TEXT, "Do."))):
            (got,) = engine.score("a", [TEXT], **options)
            assert got == pytest.approx(score(Row(ids_of(text))), abs=1e-5)
        before, after = (ids_of(part) for part in prompt("a", "\0").split("\0"))
        page = make_row((6, 4))
        assert (page.ids[0], page.ids[-1]) == (VISION_START, VISION_END)
        row = Row([*before, *page.ids, *after], page.grids, page.seed)
        output = engine.local.engine.submit(request_of("page", [row], PoolingParams(Task.SCORE))).result()
        assert float(output.values.reshape(-1)[0]) == pytest.approx(score(row), abs=1e-5)


ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("qwen2_vl", {"rms_norm_eps": 0.1}),
        ("qwen2_vl", {"hidden_act": "gelu"}),
        ("qwen2_vl", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("qwen2_vl", {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}),
        ("qwen2_5_vl", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 3.0}}),
        ("qwen3_vl", {"rope_parameters": ROPE | {"rope_theta": 100.0, "mrope_section": [6, 1, 1]}}),
        ("qwen3_vl", {"attention_bias": True}),
    ],
    ids=str,
)
def test_a_key_changes_the_states_as_it_does_in_transformers(
    kind: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    model, row = make_model(kind, "Model", **keys), make_row(4, (6, 4), 6)
    folder = write_model(tmp_path, model)
    with Engine(str(folder), dtype="float32", device="cpu") as engine:
        params = PoolingParams(Task.TOKEN_EMBED, normalize=False)
        got = engine.local.engine.submit(request_of("row", [row], params)).result().values
    expected = reference_states(model, row)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    usual = reference_states(make_model(kind, "Model"), row)
    assert "attention_bias" in keys or np.abs(got - usual).max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "keys", "named"),
    [
        ("qwen2_vl", {"rope_parameters": ROPE | {"mrope_section": [4, 2, 1]}}, "mrope_section"),
        ("qwen2_vl", {"rope_parameters": ROPE | {"mrope_interleaved": True}}, "mrope_interleaved"),
        ("qwen3_vl", {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}, "mrope_section"),
        ("qwen3_vl", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_vl", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("qwen2_5_vl", {"final_logit_softcapping": 3.0}, "final_logit_softcapping"),
        ("qwen2_5_vl", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
    ids=str,
)
def test_a_key_that_would_be_computed_otherwise_is_refused_by_name(
    kind: str, keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, make_model(kind, "Model"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= keys
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=named):
        Engine(str(folder), dtype="float32", device="cpu").close()


def test_an_image_processor_that_does_not_fit_the_tower_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, make_model("qwen2_vl", "Model"))
    values = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(values | {"merge_size": 4}))
    with pytest.raises(ModelLoadError, match="merge_size"):
        Engine(str(folder), dtype="float32", device="cpu").close()


@pytest.mark.parametrize("kind", ["video", "video_url", "input_video"])
def test_videos_are_refused_in_words(kind: str) -> None:
    with pytest.raises(BadValue, match="no model here reads videos"):
        part_texts([{"type": "text", "text": "a"}, {"type": kind, kind: "file.mp4"}], 0)

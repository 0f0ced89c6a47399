"""What `huggingface_hub` posts to the server, compared with the pipelines of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from starlette.testclient import TestClient

from penstock.api.app import build_app
from penstock.inputs.tokenizer import Tokenizer
from tests.api.local_app import local_app
from tests.api.scripted_app import make_state
from tests.checkpoints import write_bert, write_cross_encoder, write_late, write_token_classifier
from tests.text_models import ScriptedEngine, continue_with, write_text_model

TEXTS = ["the water was long", "find a word with the people"]
NLI = {"0": "entailment", "1": "neutral", "2": "contradiction"}
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def folder_of(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp("models") / name


@pytest.fixture(scope="module")
def nli_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(
        folder_of(tmp_path_factory, "nli"),
        labels=3,
        id2label=NLI,
        label2id={name: int(at) for at, name in NLI.items()},
    )


@pytest.fixture(scope="module")
def tags_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_token_classifier(folder_of(tmp_path_factory, "tags"), TAGS)


@pytest.fixture(scope="module")
def nli(nli_folder: Path) -> Iterator[TestClient]:
    with local_app(nli_folder) as (client, _):
        yield client


@pytest.fixture(scope="module")
def tags(tags_folder: Path) -> Iterator[TestClient]:
    with local_app(tags_folder) as (client, _):
        yield client


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with local_app(write_bert(folder_of(tmp_path_factory, "bert"))) as (client, _):
        yield client


def pipeline(task: str, model: Any, folder: Path) -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), model_max_length=64
    )
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    tokenizer.add_special_tokens(names)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.pipeline(task, model=model.from_pretrained(folder).eval(), tokenizer=tokenizer)


def ask(http: TestClient, path: str = "/", **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(http: TestClient, status: int, path: str = "/", **body: Any) -> str:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error", "error_type"}
    message: str = answer.json()["error"]
    return message


def test_features_are_the_vectors_of_embed(bert: TestClient) -> None:
    expected = ask(bert, "/embed", inputs=TEXTS)
    assert ask(bert, inputs=TEXTS) == ask(bert, inputs=TEXTS, parameters={"normalize": True}) == expected
    assert ask(bert, inputs=TEXTS[0]) == expected[:1]
    raw = ask(bert, "/embed", inputs=TEXTS, normalize=False)
    for body in ({"normalize": False}, {"parameters": {"normalize": False}}):
        assert ask(bert, inputs=TEXTS, **body) == raw
    paths = ("/models/model", "/models/model/pipeline/feature-extraction")
    for path in (*paths, "/pipeline/feature-extraction/model", "/pipeline/feature-extraction"):
        np.testing.assert_allclose(ask(bert, path, inputs=TEXTS), expected, atol=1e-6)
    assert "base64" in refused(bert, 413, inputs="a", encoding_format="base64")
    assert ask(bert, inputs=TEXTS, options={"wait_for_model": True}) == expected


def test_similarity_and_ranking_are_recognised_by_their_fields(bert: TestClient) -> None:
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    assert ask(bert, inputs=inputs, parameters={}) == ask(bert, "/similarity", inputs=inputs)
    assert ask(bert, query="a", texts=TEXTS) == ask(bert, "/rerank", query="a", texts=TEXTS)


def test_a_late_interaction_model_gives_the_vectors_of_tokens(tmp_path: Path) -> None:
    with local_app(write_late(tmp_path)) as (http, _):
        (matrix,) = ask(http, inputs=TEXTS[0])
        assert len(matrix) > 4 and len(matrix[0]) == 16


@pytest.mark.parametrize("function", [None, "softmax", "sigmoid", "none"])
@pytest.mark.parametrize("top_k", [None, 1, 2])
def test_labels_equal_those_of_the_pipeline(
    nli: TestClient, nli_folder: Path, function: str | None, top_k: int | None
) -> None:
    pipe = pipeline("text-classification", transformers.BertForSequenceClassification, nli_folder)
    given = {"function_to_apply": function} if function else {}
    expected = pipe(TEXTS, top_k=top_k, **given)
    parameters = given | ({"top_k": top_k} if top_k else {})
    found = ask(nli, inputs=TEXTS, parameters=parameters)
    assert ask(nli, inputs=TEXTS[0], parameters=parameters) == found[:1]
    for row, wanted in zip(found, expected, strict=True):
        assert [each["label"] for each in row] == [each["label"] for each in wanted]
        np.testing.assert_allclose(
            [each["score"] for each in row], [each["score"] for each in wanted], atol=1e-4
        )


def test_a_pair_to_classify_is_an_object(nli: TestClient) -> None:
    inputs = {"text": TEXTS[0], "text_pair": TEXTS[1]}
    assert ask(nli, inputs=inputs, parameters={}) == [ask(nli, "/predict", inputs=TEXTS)]
    assert ask(nli, inputs=TEXTS[0]) == ask(nli, "/predict", inputs=TEXTS[0])  # TEI's body


@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_equals_the_pipeline(nli: TestClient, nli_folder: Path, multi_label: bool) -> None:
    pipe = pipeline("zero-shot-classification", transformers.BertForSequenceClassification, nli_folder)
    labels, template = ["water", "oil", "people"], "the word is {}."
    given = {"candidate_labels": labels, "hypothesis_template": template, "multi_label": multi_label}
    expected = pipe(TEXTS, **given)
    found = ask(nli, inputs=TEXTS, parameters=given)
    assert ask(nli, inputs=TEXTS[0], parameters=given) == found[0]
    for row, wanted in zip(found, expected, strict=True):
        assert [each["label"] for each in row] == wanted["labels"]
        np.testing.assert_allclose([each["score"] for each in row], wanted["scores"], atol=1e-4)
    joined = given | {"candidate_labels": "water, oil,people"}
    assert ask(nli, inputs=TEXTS, parameters=joined) == found


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("ignored", [None, [], ["O", "B-LOC", "LOC"]])
def test_entities_equal_those_of_the_pipeline(
    tags: TestClient, tags_folder: Path, strategy: str, ignored: list[str] | None
) -> None:
    pipe = pipeline("token-classification", transformers.BertForTokenClassification, tags_folder)
    given: dict[str, Any] = {"aggregation_strategy": strategy}
    if ignored is not None:
        given["ignore_labels"] = ignored
    for text in (*TEXTS, "Wateré, peopleless findings"):
        expected = pipe(text, **given)
        found = ask(tags, inputs=text, parameters=given)
        for row, wanted in zip(found, expected, strict=True):
            assert row.pop("score") == pytest.approx(float(wanted.pop("score")), abs=1e-4)
            assert row == wanted
    assert ask(tags, inputs=TEXTS, parameters=given)[0] == ask(tags, inputs=TEXTS[0], parameters=given)


def test_entities_are_merged_by_default(tags: TestClient) -> None:
    expected = ask(tags, inputs=TEXTS[0], parameters={"aggregation_strategy": "simple"})
    assert ask(tags, inputs=TEXTS[0]) == ask(tags, inputs=TEXTS[0], parameters={}) == expected


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"inputs": {"question": "a", "context": "b"}, "parameters": {}}, 424, "question answering"),
        ({"inputs": "a [MASK]", "parameters": {"targets": ["b"]}}, 413, "fill-mask"),
        ({"inputs": "a [MASK]", "parameters": {"top_k": 2}}, 413, "does not apply to feature-extraction"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 2}}, 413, "does not apply"),
        ({"inputs": "a", "parameters": {"aggregation_strategy": "simple"}}, 413, "does not apply"),
        ({"inputs": "a", "stream": True}, 424, "does not generate"),
        ({"inputs": "a", "parameters": {"candidate_labels": ["b"]}}, 424, "no zero-shot classifier"),
        ({"inputs": "a", "parameters": {"truncate": 5}}, 422, "use true or false"),
        ({"inputs": {"image": "a"}}, 422, "inputs must be"),
        ({"inputs": [["a", "b"]]}, 422, "inputs must be"),
        ({"parameters": {}}, 422, "inputs"),
        ({"query": "a"}, 422, "texts"),
        ({"inputs": ""}, 400, "empty"),
        ({"inputs": []}, 400, "empty"),
        ({"inputs": 5}, 422, "inputs"),
    ],
)
def test_what_an_embedder_cannot_do_is_refused(
    bert: TestClient, body: dict[str, Any], status: int, message: str
) -> None:
    assert message in refused(bert, status, **body)


def test_other_tasks_are_refused_by_name(bert: TestClient) -> None:
    assert "fill-mask" in refused(bert, 424, "/pipeline/fill-mask", inputs="a")
    assert "no-such" in refused(bert, 404, "/models/no-such", inputs="a")
    assert "parts" in refused(
        bert, 413, "/pipeline/token-classification", inputs="a", parameters={"stride": 2}
    )


# --- generation ---------------------------------------------------------------------------------------------

SAID = "the water was long 日本語🙂 end"


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture
def engine(text_folder: Path) -> ScriptedEngine:
    return ScriptedEngine(continue_with(Tokenizer(text_folder), SAID))


@pytest.fixture
def writer(text_folder: Path, engine: ScriptedEngine) -> Iterator[TestClient]:
    with TestClient(build_app(make_state(text_folder, engine))) as client:
        yield client


def test_a_text_is_continued(writer: TestClient) -> None:
    assert ask(writer, inputs="find", parameters={}) == [{"generated_text": SAID}]
    assert ask(writer, inputs="find") == [{"generated_text": SAID}]
    assert ask(writer, "/generate", inputs="find") == {"generated_text": SAID}
    (full,) = ask(writer, inputs="find", parameters={"return_full_text": True})
    assert full["generated_text"] == "find" + SAID


def test_details_name_every_token(writer: TestClient) -> None:
    given = {"details": True, "decoder_input_details": True, "top_n_tokens": 2}
    answer = ask(writer, "/generate", inputs="find the water", parameters=given)
    details = answer["details"]
    assert details["finish_reason"] == "eos_token" and details["seed"] is None
    assert details["generated_tokens"] == len(details["tokens"]) == len(details["top_tokens"])
    assert details["tokens"][-1]["special"] and all(row["logprob"] <= 0 for row in details["tokens"])
    assert details["prefill"][0]["logprob"] is None and details["prefill"][1]["logprob"] < 0
    assert {len(row) for row in details["top_tokens"]} == {2}
    assert "details" not in ask(writer, "/generate", inputs="find")


def events_of(http: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(path, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return [json.loads(line[5:]) for line in answer.text.split("\n") if line.startswith("data:")]


@pytest.mark.parametrize(("path", "stream"), [("/", True), ("/generate_stream", None)])
def test_every_token_is_an_event_of_a_stream(writer: TestClient, path: str, stream: bool | None) -> None:
    events = events_of(writer, path, inputs="find", stream=stream)
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert "".join(event["token"]["text"] for event in events) == SAID
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    assert events[-1]["generated_text"] == SAID
    assert events[-1]["details"]["finish_reason"] == "eos_token"
    assert events[-1]["details"]["generated_tokens"] == len(events)
    assert events[-1]["details"]["input_length"] >= 1


def test_a_stream_that_is_declined_is_a_text_as_the_document_says(writer: TestClient) -> None:
    assert ask(writer, "/generate_stream", inputs="find", stream=False)["generated_text"] == SAID
    operation = writer.get("/openapi.json").json()["paths"]["/generate_stream"]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


def test_a_stop_sequence_ends_the_text_and_stays_in_it(writer: TestClient) -> None:
    given = {"stop": ["was"], "details": True}
    answer = ask(writer, "/generate", inputs="find", parameters=given)
    assert answer["generated_text"] == "the water was"
    assert answer["details"]["finish_reason"] == "stop_sequence"
    short = ask(writer, "/generate", inputs="find", parameters={"max_new_tokens": 2, "details": True})
    assert short["details"]["finish_reason"] == "length"
    assert short["details"]["generated_tokens"] == 2


def test_sampling_needs_to_be_asked_for(writer: TestClient, engine: ScriptedEngine) -> None:
    def sampling(**parameters: Any) -> Any:
        ask(writer, inputs="find", parameters=parameters)
        return engine.requests[-1].sampling

    plain = sampling()
    assert plain.temperature == 0 and plain.max_tokens == 100 and plain.seed is None
    assert sampling(temperature=1.0, top_p=1.0).temperature == 0
    drawn = sampling(do_sample=True, seed=7)
    assert drawn.temperature == 1 and drawn.top_p == 1 and drawn.seed == 7
    shaped = sampling(temperature=0.5, top_k=3, top_p=0.9, repetition_penalty=1.2)
    assert (shaped.temperature, shaped.top_k, shaped.top_p) == (0.5, 3, 0.9)
    assert shaped.repetition_penalty == pytest.approx(1.2)
    assert sampling(top_k=3).temperature == 1
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for grammar in (
        {"type": "json", "value": schema},
        {"type": "json_schema", "value": {"name": "a", "schema": schema}},
        {"type": "regex", "value": "[a-z]+"},
    ):
        assert sampling(grammar=grammar).grammar is not None


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"watermark": True}, "watermark"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"best_of": 2}, "best_of"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 10**6}, "max_new_tokens is 1000000"),
        ({"grammar": {"type": "regex", "value": 5}}, "regular expression"),
        ({"top_n_tokens": 2}, "details"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    writer: TestClient, parameters: dict[str, Any], message: str
) -> None:
    for path in ("/", "/generate"):
        answer = writer.post(path, json={"inputs": "find", "parameters": parameters})
        assert 400 <= answer.status_code < 500 and message in answer.json()["error"], answer.text
        assert answer.json()["error_type"] in ("validation", "Validation")


def test_parameters_without_effect_are_accepted(writer: TestClient) -> None:
    given = {"watermark": False, "best_of": 1, "typical_p": 1.0, "frequency_penalty": 0, "use_cache": True}
    assert ask(writer, inputs="find", parameters=given) == [{"generated_text": SAID}]


def test_a_failure_during_a_stream_is_an_event(writer: TestClient, engine: ScriptedEngine) -> None:
    engine.fail_after = 3
    answer = writer.post("/", json={"inputs": "find", "stream": True})
    (failure,) = [json.loads(line[5:]) for line in answer.text.split("\n") if '"error"' in line]
    assert failure["error_type"] == "generation" and "could not compute" in failure["error"]


def test_an_embedder_does_not_generate(bert: TestClient) -> None:
    answer = bert.post("/generate", json={"inputs": "find"})
    assert answer.status_code == 424 and answer.json()["error_type"] == "generation"


def test_the_name_that_huggingface_hub_sends_for_none_is_the_first_model(writer: TestClient) -> None:
    body = {"model": "dummy", "messages": [{"role": "user", "content": "find"}]}
    assert ask(writer, "/v1/chat/completions", **body)["choices"][0]["message"]["content"] == SAID


def test_a_schema_of_a_chat_is_kept(writer: TestClient, engine: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    def grammar(**response_format: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "find"}], "response_format": response_format}
        ask(writer, "/v1/chat/completions", **body)
        sampling = engine.requests[-1].sampling
        assert sampling is not None and sampling.grammar is not None
        return sampling.grammar.text

    expected = grammar(type="json_schema", json_schema={"name": "a", "schema": schema})
    assert grammar(type="json_object", value=schema) == expected != grammar(type="json_object")

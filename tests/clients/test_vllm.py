"""Requests of vLLM's clients: the `openai` package with vLLM's fields, and plain HTTP."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.checkpoints import write_cross_encoder
from tests.clients.conftest import LABELS, Start
from tests.e2e.llama import write_llama
from tests.e2e.server import Server

openai = pytest.importorskip("openai")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TALK = [{"role": "user", "content": "What feeds a turbine?"}, {"role": "assistant", "content": "A penstock."}]
RENDERED = "user: What feeds a turbine?\nassistant: A penstock.\n"


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def chat_embedder(servers: object) -> Server:
    """all-MiniLM-L6-v2 with a chat template and vLLM's flags."""
    flags = ("--device", "cpu", "--threads", "1", "--chat-template", TEMPLATE)
    pooler = ("--pooler-config.enable_chunked_processing", "true", "--gpu_memory_utilization", "0.5")
    return servers.get(*flags, *pooler)  # type: ignore[attr-defined,no-any-return]


def test_messages_are_embedded_as_the_reference_embeds_their_rendering(chat_embedder: Server) -> None:
    from sentence_transformers import SentenceTransformer

    from penstock.checkpoint.find import find

    reference = SentenceTransformer(str(find(None)))
    tokens = reference.tokenizer(RENDERED, add_special_tokens=False)["input_ids"]
    client = client_of(chat_embedder)
    name = client.models.list().data[0].id
    answer = client.post(
        "/embeddings",
        cast_to=openai.types.CreateEmbeddingResponse,
        body={"model": name, "messages": TALK, "encoding_format": "float"},
    )
    assert answer.usage.prompt_tokens == len(tokens)
    whole = client.post(
        "/embeddings",
        cast_to=openai.types.CreateEmbeddingResponse,
        body={"model": name, "messages": TALK, "encoding_format": "float", "add_special_tokens": True},
    )
    expected = reference.encode([RENDERED])[0]
    np.testing.assert_allclose(whole.data[0].embedding, expected, atol=1e-5)


def test_chunked_processing_embeds_long_texts(chat_embedder: Server) -> None:
    client = client_of(chat_embedder)
    name = client.models.list().data[0].id
    answer = client.embeddings.create(model=name, input=["water " * 2000], encoding_format="float")
    assert answer.usage.prompt_tokens > 2000
    assert np.linalg.norm(answer.data[0].embedding) == pytest.approx(1, abs=1e-4)


def test_bytes_are_read_as_vllm_s_client_reads_them(embedder: Server) -> None:
    body = {"input": ["a", "b"], "embed_dtype": "float16", "endianness": "little"}
    answer = embedder.post("/v1/embeddings", **body, encoding_format="bytes")
    items = json.loads(answer.headers["metadata"])["data"]
    rows = [np.frombuffer(answer.content[item["start"] : item["end"]], "<f2") for item in items]
    plain = embedder.post("/v1/embeddings", input=["a", "b"]).json()["data"]
    np.testing.assert_allclose(rows, [row["embedding"] for row in plain], atol=1e-3)
    only = embedder.post("/v1/embeddings", **body, encoding_format="bytes_only")
    assert only.content == answer.content and "metadata" not in only.headers


def test_rankings_have_the_fields_that_vllm_s_clients_require(start: Start) -> None:
    reranker = start("tiny-reranker", write_cross_encoder)
    documents = ["A pipe that feeds water to a turbine.", "A kind of bread."]
    answer = reranker.post("/rerank", query="What is a penstock?", documents=documents, top_n=0).json()
    assert {"id", "model", "usage", "results"} <= set(answer)
    assert all(row["document"]["text"] == documents[row["index"]] for row in answer["results"])
    invoked = reranker.post("/invocations", query="What is a penstock?", documents=documents).json()
    assert invoked["results"] == answer["results"]


def test_a_classifier_is_invoked_like_its_route(classifier: Server) -> None:
    (row,) = classifier.post("/invocations", input="fine").json()["data"]
    assert row["label"] in LABELS and row["num_classes"] == len(row["probs"]) == len(LABELS)
    assert classifier.http.post("/ping").status_code == 200


def test_token_ids_of_a_chat(generator: Server, start: Start) -> None:
    assert start("smollm2", write_llama) is generator
    client = client_of(generator)
    name = client.models.list().data[0].id
    options = {"max_tokens": 4, "temperature": 0, "extra_body": {"return_token_ids": True}}
    answer = client.chat.completions.create(model=name, messages=TALK[:1], **options)
    prompt = generator.post("/tokenize", messages=TALK[:1]).json()["tokens"]
    assert answer.prompt_token_ids == prompt and len(answer.choices[0].token_ids) <= 4
    stream = client.chat.completions.create(model=name, messages=TALK[:1], stream=True, **options)
    ids = [i for event in stream for i in getattr(event.choices[0], "token_ids", None) or ()]
    assert ids == answer.choices[0].token_ids


def test_tools_are_refused_by_name(generator: Server) -> None:
    client = client_of(generator)
    name = client.models.list().data[0].id
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=name, messages=TALK[:1], tools=[tool], max_tokens=2)
    assert refused.value.param == "tools"
    answer = client.chat.completions.create(
        model=name, messages=TALK[:1], tools=[tool], tool_choice="none", max_tokens=2
    )
    assert answer.choices[0].message.tool_calls is None

"""The unmodified `ollama` package."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.e2e.server import Server

ollama = pytest.importorskip("ollama")
TEXTS = ["Water finds its level.", "A penstock feeds the turbine."]
LONG = "water " * 1000


def client_of(server: Server, **options: Any) -> Any:
    return ollama.Client(host=server.url, **options)


@pytest.fixture(scope="module")
def name(embedder: Server) -> str:
    return str(client_of(embedder).list().models[0].model)


def test_embeddings_equal_the_reference(embedder: Server, name: str, reference: Any) -> None:
    answer = client_of(embedder).embed(model=name, input=TEXTS)
    np.testing.assert_allclose(answer.embeddings, reference.encode(TEXTS), atol=1e-5)
    assert answer.model == name and answer.total_duration > 0
    assert answer.prompt_eval_count == sum(len(row) for row in reference.tokenizer(TEXTS)["input_ids"])
    one = client_of(embedder).embed(model=name.removesuffix(":latest"), input=TEXTS[0])
    np.testing.assert_allclose(one["embeddings"], answer.embeddings[:1], atol=1e-6)


def test_options_that_clients_send(embedder: Server, name: str, reference: Any) -> None:
    client = client_of(embedder)
    options = ollama.Options(num_ctx=4096, temperature=0.0, num_gpu=1)
    answer = client.embed(model=name, input=TEXTS, options=options, keep_alive="5m", dimensions=64)
    short = reference.encode(TEXTS)[:, :64]
    short /= np.linalg.norm(short, axis=1, keepdims=True)
    np.testing.assert_allclose(answer.embeddings, short, atol=1e-5)
    assert client.embed(model=name).embeddings == []


def test_long_texts_are_cut_unless_the_client_declines(embedder: Server, name: str, reference: Any) -> None:
    client = client_of(embedder)
    answer = client.embed(model=name, input=LONG)
    np.testing.assert_allclose(answer.embeddings, reference.encode([LONG]), atol=1e-5)
    with pytest.raises(ollama.ResponseError, match="truncate: true") as refused:
        client.embed(model=name, input=LONG, truncate=False)
    assert refused.value.status_code == 400


def test_the_older_method_gives_one_vector_of_any_length(embedder: Server, name: str, reference: Any) -> None:
    vector = np.array(client_of(embedder).embeddings(model=name, prompt=TEXTS[0]).embedding)
    raw = reference.encode(TEXTS[:1], output_value="token_embeddings")[0].numpy().mean(axis=0)
    np.testing.assert_allclose(vector, raw, atol=1e-5)


def test_models_are_listed_and_described(embedder: Server, name: str) -> None:
    client = client_of(embedder)
    (entry,) = client.list().models
    assert entry.model == name and name.endswith(":latest")
    assert entry.size > 80_000_000 and entry.modified_at.tzinfo is not None
    assert (entry.details.family, entry.details.parameter_size) == ("bert", "22.7M")
    shown = client.show(name)
    assert shown.modelinfo["bert.embedding_length"] == 384
    assert shown.capabilities == ["embedding"] and shown.details == entry.details
    (running,) = client.ps().models
    assert running.model == name and running.context_length == 256


def test_wrong_requests_raise_what_the_package_promises(embedder: Server, name: str) -> None:
    client = client_of(embedder)
    for call in (
        lambda: client.embed(model="no-such", input="a"),
        lambda: client.embeddings(model="no-such", prompt="a"),
        lambda: client.show("no-such"),
    ):
        with pytest.raises(ollama.ResponseError, match="not found") as missing:
            call()
        assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="use 1 to 384"):
        client.embed(model=name, input="a", dimensions=4096)


def test_models_cannot_be_changed(embedder: Server, name: str) -> None:
    client = client_of(embedder)
    for call in (
        lambda: client.pull(name),
        lambda: client.push(name),
        lambda: client.create(model="new", from_=name),
        lambda: client.copy(name, "new"),
        lambda: client.delete(name),
        lambda: list(client.pull(name, stream=True)),
    ):
        with pytest.raises(ollama.ResponseError, match="penstock serve MODEL") as refused:
            call()
        assert refused.value.status_code == 501


def test_the_asynchronous_client(embedder: Server, name: str) -> None:
    async def ask() -> Any:
        client = ollama.AsyncClient(host=embedder.url)
        found = (await client.embed(model=name, input=TEXTS)).embeddings
        with pytest.raises(ollama.ResponseError):
            await client.embed(model="no-such", input="a")
        return found, [entry.model for entry in (await client.list()).models]

    embeddings, names = asyncio.run(ask())
    np.testing.assert_allclose(embeddings, client_of(embedder).embed(model=name, input=TEXTS).embeddings)
    assert names == [name]


TALK = [{"role": "user", "content": "What feeds a turbine? Answer in one sentence."}]
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def said(generator: Server) -> str:
    """The model's answer through OpenAI's chat route."""
    body = {"messages": TALK, "temperature": 0, "max_tokens": GREEDY["num_predict"]}
    answer = generator.post("/v1/chat/completions", **body)
    return str(answer.json()["choices"][0]["message"]["content"])


def test_chat_says_what_other_routes_say(generator: Server, said: str) -> None:
    client = client_of(generator)
    answer = client.chat(model="smollm2", messages=TALK, options=GREEDY)
    assert answer.message.content == said and answer.message.role == "assistant"
    assert answer.done and answer.eval_count > 0 and answer.prompt_eval_count > 0
    pieces = list(client.chat(model="smollm2:latest", messages=TALK, options=GREEDY, stream=True))
    assert "".join(piece.message.content for piece in pieces) == said
    assert pieces[-1].done and not pieces[0].done


def test_generate_says_what_chat_says(generator: Server, said: str) -> None:
    client = client_of(generator)
    prompt = TALK[0]["content"]
    assert client.generate(model="smollm2", prompt=prompt, options=GREEDY).response == said
    pieces = list(client.generate(model="smollm2", prompt=prompt, options=GREEDY, stream=True))
    assert "".join(piece.response for piece in pieces) == said
    raw = client.generate(model="smollm2", prompt="The water", raw=True, options=GREEDY)
    body = {"prompt": "The water", "temperature": 0, "max_tokens": GREEDY["num_predict"]}
    assert raw.response == generator.post("/v1/completions", **body).json()["choices"][0]["text"]


def test_a_model_that_generates_says_so(generator: Server) -> None:
    assert "completion" in client_of(generator).show("smollm2").capabilities


def test_wrong_conversations_raise_what_the_package_promises(generator: Server, embedder: Server) -> None:
    client = client_of(generator)
    with pytest.raises(ollama.ResponseError, match="not found") as missing:
        client.chat(model="no-such", messages=TALK)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not found"):
        list(client.chat(model="no-such", messages=TALK, stream=True))
    with pytest.raises(ollama.ResponseError, match="mirostat"):
        client.generate(model="smollm2", prompt="a", options={"mirostat": 2})
    name = str(client_of(embedder).list().models[0].model)
    with pytest.raises(ollama.ResponseError, match="does not generate"):
        client_of(embedder).chat(model=name, messages=TALK)


def test_a_conversation_with_the_asynchronous_client(generator: Server, said: str) -> None:
    async def ask() -> str:
        client = ollama.AsyncClient(host=generator.url)
        stream = await client.chat(model="smollm2", messages=TALK, options=GREEDY, stream=True)
        return "".join([piece.message.content async for piece in stream])

    assert asyncio.run(ask()) == said

"""Vector stores and agent frameworks, unmodified: only the address changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import real_model
from tests.clients.reference import NAME, QUERY, TEXTS, chat_answer, check_vector, check_vectors, name_of
from tests.e2e.server import Server


@pytest.mark.parametrize(
    ("function", "address", "more"),
    [
        ("OpenAIEmbeddingFunction", "api_base=/v1", {"api_key": "none", "model_name": NAME}),
        ("HuggingFaceEmbeddingServer", "url=/embed", {}),
        ("OllamaEmbeddingFunction", "url=", {"model_name": NAME}),
    ],
)
def test_chroma(embedder: Server, function: str, address: str, more: dict[str, Any]) -> None:
    pytest.importorskip("chromadb")
    from chromadb.utils import embedding_functions

    field, _, path = address.partition("=")
    embed = getattr(embedding_functions, function)(**{field: embedder.url + path}, **more)
    check_vectors(embed(TEXTS))


def test_infinity_client(embedder: Server) -> None:
    infinity = pytest.importorskip("infinity_client")
    from infinity_client.api.default import embeddings
    from infinity_client.models import OpenAIEmbeddingInputText

    body = OpenAIEmbeddingInputText(input_=TEXTS, model=NAME)
    answer = embeddings.sync(client=infinity.Client(base_url=embedder.url), body=body)
    check_vectors([row.embedding for row in answer.data])


def test_dspy_embedder(embedder: Server) -> None:
    dspy = pytest.importorskip("dspy")
    check_vectors(dspy.Embedder(f"openai/{NAME}", api_base=f"{embedder.url}/v1", api_key="none")(TEXTS))


def test_dspy_language_model(generator: Server) -> None:
    dspy = pytest.importorskip("dspy")
    model = dspy.LM(
        f"openai/{name_of(generator)}",
        api_base=f"{generator.url}/v1",
        api_key="none",
        max_tokens=8,
        temperature=0,
        cache=False,
    )
    (answer,) = model("Say hello.")
    text = answer if isinstance(answer, str) else answer["text"]
    assert text == chat_answer(generator, "Say hello.", 8)


def test_txtai(embedder: Server) -> None:
    txtai = pytest.importorskip("txtai")
    vectors = {"api_base": f"{embedder.url}/v1", "api_key": "none"}
    client = txtai.Embeddings({"path": f"openai/{NAME}", "method": "litellm", "vectors": vectors})
    check_vector(client.transform(QUERY))


def test_semantic_kernel(embedder: Server) -> None:
    pytest.importorskip("semantic_kernel")
    from openai import AsyncOpenAI
    from semantic_kernel.connectors.ai.open_ai import OpenAITextEmbedding

    async def embed() -> Any:
        client = AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="none")
        return await OpenAITextEmbedding(ai_model_id=NAME, async_client=client).generate_embeddings(TEXTS)

    check_vectors(asyncio.run(embed()))


def test_pydantic_ai(generator: Server) -> None:
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{generator.url}/v1", api_key="none")
    agent = ai.Agent(
        OpenAIChatModel(name_of(generator), provider=provider),
        model_settings={"max_tokens": 8, "temperature": 0.0},
    )
    assert agent.run_sync("Say hello.").output == chat_answer(generator, "Say hello.", 8)


@pytest.mark.skipif(real_model("smollm2") is None, reason="needs a model that ends its answers")
def test_instructor(generator: Server) -> None:
    instructor = pytest.importorskip("instructor")
    pytest.importorskip("llguidance")
    from openai import OpenAI
    from pydantic import BaseModel

    class Answer(BaseModel):
        is_open: bool

    client = OpenAI(base_url=f"{generator.url}/v1", api_key="none")
    found = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create(
        model=name_of(generator),
        response_model=Answer,
        messages=[{"role": "user", "content": "Is it open?"}],
        max_tokens=64,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(found, Answer)

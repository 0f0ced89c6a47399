"""Haystack's components, unmodified: only the address changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.reference import (
    NAME,
    QUERY,
    TEXTS,
    chat_answer,
    check_ranking,
    check_vector,
    check_vectors,
    name_of,
    reachable,
)
from tests.e2e.server import Server

pytest.importorskip("haystack")
__all__ = ["reachable"]  # a fixture


def secret() -> Any:
    from haystack.utils import Secret

    return Secret.from_token("none")


def documents() -> list[Any]:
    from haystack import Document

    return [Document(content=text) for text in TEXTS]


def check_embedders(of_texts: Any, of_documents: Any) -> None:
    check_vector(of_texts.run(QUERY)["embedding"])
    check_vectors([document.embedding for document in of_documents.run(documents())["documents"]])


def check_ranker(ranker: Any, server: Server) -> None:
    found = ranker.run(query=QUERY, documents=documents())["documents"]
    check_ranking([(TEXTS.index(document.content), document.score) for document in found], server)


def test_openai_embedders(embedder: Server) -> None:
    from haystack.components import embedders

    flags = {"api_key": secret(), "model": NAME, "api_base_url": f"{embedder.url}/v1"}
    check_embedders(embedders.OpenAITextEmbedder(**flags), embedders.OpenAIDocumentEmbedder(**flags))


@pytest.mark.usefixtures("reachable")
def test_embedders_of_text_embeddings_inference(embedder: Server) -> None:
    module = pytest.importorskip("haystack_integrations.components.embedders.huggingface_api")
    flags = {
        "api_type": "text_embeddings_inference",
        "api_params": {"url": embedder.url},
        "token": secret(),
        "normalize": True,
    }
    check_embedders(
        module.HuggingFaceAPITextEmbedder(**flags), module.HuggingFaceAPIDocumentEmbedder(**flags)
    )


def test_ranker_of_text_embeddings_inference(reranker: Server) -> None:
    module = pytest.importorskip("haystack_integrations.components.rankers.huggingface_api")
    check_ranker(module.HuggingFaceTEIRanker(url=reranker.url, token=secret(), top_k=2), reranker)


def test_cohere_embedders(embedder: Server) -> None:
    module = pytest.importorskip("haystack_integrations.components.embedders.cohere")
    flags = {"api_key": secret(), "model": NAME, "api_base_url": embedder.url}
    check_embedders(module.CohereTextEmbedder(**flags), module.CohereDocumentEmbedder(**flags))


def test_cohere_ranker(reranker: Server) -> None:
    module = pytest.importorskip("haystack_integrations.components.rankers.cohere")
    ranker = module.CohereRanker(
        api_key=secret(), model=name_of(reranker), api_base_url=reranker.url, top_k=2
    )
    check_ranker(ranker, reranker)


def test_ollama_embedders(embedder: Server) -> None:
    module = pytest.importorskip("haystack_integrations.components.embedders.ollama")
    flags = {"model": NAME, "url": embedder.url}
    check_embedders(module.OllamaTextEmbedder(**flags), module.OllamaDocumentEmbedder(**flags))


def test_jina_embedders(embedder: Server) -> None:
    module = pytest.importorskip("haystack_integrations.components.embedders.jina")
    flags = {"api_key": secret(), "model": NAME, "base_url": f"{embedder.url}/v1/embeddings"}
    check_embedders(module.JinaTextEmbedder(**flags), module.JinaDocumentEmbedder(**flags))


def test_jina_ranker(reranker: Server) -> None:
    module = pytest.importorskip("haystack_integrations.components.rankers.jina")
    ranker = module.JinaRanker(
        api_key=secret(), model=name_of(reranker), base_url=f"{reranker.url}/v1/rerank", top_k=2
    )
    check_ranker(ranker, reranker)


def test_openai_chat_generator(generator: Server) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage

    model = OpenAIChatGenerator(
        api_key=secret(),
        model=name_of(generator),
        api_base_url=f"{generator.url}/v1",
        generation_kwargs={"max_tokens": 8, "temperature": 0},
    )
    (reply,) = model.run([ChatMessage.from_user("Say hello.")])["replies"]
    assert reply.text == chat_answer(generator, "Say hello.", 8)

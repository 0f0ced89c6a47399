"""LlamaIndex's packages, unmodified: only the address changes."""

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
)
from tests.e2e.server import Server

pytest.importorskip("llama_index.core")


@pytest.fixture(scope="session")
def any_name(servers: Any) -> Server:
    """A server of the default model under every name, for clients that accept only names they know."""
    return servers.get("--device", "cpu", "--threads", "1", "--any-model-name")


def check_embeddings(client: Any) -> None:
    check_vectors(client.get_text_embedding_batch(TEXTS))
    check_vector(client.get_query_embedding(QUERY))


def check_reranker(client: Any, server: Server) -> None:
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
    found = client.postprocess_nodes(nodes, query_str=QUERY)
    check_ranking([(TEXTS.index(node.text), node.score) for node in found], server)


def test_openai_like(embedder: Server) -> None:
    module = pytest.importorskip("llama_index.embeddings.openai_like")
    client = module.OpenAILikeEmbedding(model_name=NAME, api_base=f"{embedder.url}/v1", api_key="none")
    check_embeddings(client)


def test_text_embeddings_inference(embedder: Server) -> None:
    module = pytest.importorskip("llama_index.embeddings.text_embeddings_inference")
    check_embeddings(module.TextEmbeddingsInference(model_name=NAME, base_url=embedder.url))


def test_cohere(any_name: Server) -> None:
    module = pytest.importorskip("llama_index.embeddings.cohere")
    client = module.CohereEmbedding(model_name="embed-english-v3.0", api_key="none", base_url=any_name.url)
    check_embeddings(client)


def test_ollama(embedder: Server) -> None:
    module = pytest.importorskip("llama_index.embeddings.ollama")
    check_embeddings(module.OllamaEmbedding(model_name=NAME, base_url=embedder.url))


def test_cohere_rerank(reranker: Server) -> None:
    module = pytest.importorskip("llama_index.postprocessor.cohere_rerank")
    client = module.CohereRerank(model=name_of(reranker), api_key="none", top_n=2, base_url=reranker.url)
    check_reranker(client, reranker)


def test_tei_rerank(reranker: Server) -> None:
    module = pytest.importorskip("llama_index.postprocessor.tei_rerank")
    client = module.TextEmbeddingInference(model_name=name_of(reranker), base_url=reranker.url, top_n=2)
    check_reranker(client, reranker)


def test_jina_rerank(reranker: Server) -> None:
    module = pytest.importorskip("llama_index.postprocessor.jinaai_rerank")
    client = module.JinaRerank(
        api_key="none", model=name_of(reranker), top_n=2, base_url=f"{reranker.url}/v1"
    )
    check_reranker(client, reranker)


def test_openai_like_chat(generator: Server) -> None:
    module = pytest.importorskip("llama_index.llms.openai_like")
    model = module.OpenAILike(
        model=name_of(generator),
        api_base=f"{generator.url}/v1",
        api_key="none",
        is_chat_model=True,
        max_tokens=8,
        temperature=0,
    )
    assert model.complete("Say hello.").text == chat_answer(generator, "Say hello.", 8)


def test_ollama_chat(generator: Server) -> None:
    module = pytest.importorskip("llama_index.llms.ollama")
    model = module.Ollama(
        model=name_of(generator),
        base_url=generator.url,
        temperature=0,
        additional_kwargs={"num_predict": 8},
        context_window=128,
    )
    assert model.complete("Say hello.").text == chat_answer(generator, "Say hello.", 8)

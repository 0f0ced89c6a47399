"""LangChain's packages, unmodified: only the address changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import real_model
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

pytest.importorskip("langchain_core")
__all__ = ["reachable"]  # a fixture


def check_embeddings(client: Any) -> None:
    check_vectors(client.embed_documents(TEXTS))
    check_vector(client.embed_query(QUERY))


def documents() -> list[Any]:
    from langchain_core.documents import Document

    return [Document(text) for text in TEXTS]


def ranked(found: list[Any]) -> list[tuple[int, float]]:
    return [(TEXTS.index(each.page_content), each.metadata["relevance_score"]) for each in found]


def test_openai_embeddings(embedder: Server) -> None:
    module = pytest.importorskip("langchain_openai")
    client = module.OpenAIEmbeddings(
        base_url=f"{embedder.url}/v1", api_key="none", model=NAME, check_embedding_ctx_length=False
    )
    check_embeddings(client)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_chat_openai(generator: Server, is_streamed: bool) -> None:
    module = pytest.importorskip("langchain_openai")
    model = module.ChatOpenAI(
        base_url=f"{generator.url}/v1", api_key="none", model=name_of(generator), max_tokens=8, temperature=0
    )
    parts = model.stream("Say hello.") if is_streamed else [model.invoke("Say hello.")]
    assert "".join(part.content for part in parts) == chat_answer(generator, "Say hello.", 8)


@pytest.mark.skipif(real_model("smollm2") is None, reason="needs a model that ends its answers")
def test_structured_output_of_chat_openai(generator: Server) -> None:
    module = pytest.importorskip("langchain_openai")
    pytest.importorskip("llguidance")
    from pydantic import BaseModel

    class Answer(BaseModel):
        is_open: bool

    model = module.ChatOpenAI(
        base_url=f"{generator.url}/v1", api_key="none", model=name_of(generator), temperature=0
    )
    assert isinstance(model.with_structured_output(Answer).invoke("Is it open?"), Answer)


@pytest.mark.usefixtures("reachable")
def test_huggingface_endpoint_embeddings(embedder: Server) -> None:
    module = pytest.importorskip("langchain_huggingface")
    from huggingface_hub import InferenceClient

    client = module.HuggingFaceEndpointEmbeddings(model=NAME, huggingfacehub_api_token="none")
    client.client = InferenceClient(base_url=embedder.url)
    check_embeddings(client)


def test_huggingface_inference_api_embeddings(embedder: Server) -> None:
    pytest.importorskip("langchain_community")
    from langchain_community.embeddings import HuggingFaceInferenceAPIEmbeddings

    check_embeddings(HuggingFaceInferenceAPIEmbeddings(api_key="none", api_url=embedder.url))


def test_cohere_embeddings(embedder: Server) -> None:
    module = pytest.importorskip("langchain_cohere")
    check_embeddings(module.CohereEmbeddings(base_url=embedder.url, cohere_api_key="none", model=NAME))


def test_cohere_rerank(reranker: Server) -> None:
    module = pytest.importorskip("langchain_cohere")
    client = module.CohereRerank(
        base_url=reranker.url, cohere_api_key="none", model=name_of(reranker), top_n=2
    )
    check_ranking(ranked(client.compress_documents(documents(), QUERY)), reranker)


def test_ollama_embeddings(embedder: Server) -> None:
    module = pytest.importorskip("langchain_ollama")
    check_embeddings(module.OllamaEmbeddings(base_url=embedder.url, model=NAME))


def test_chat_ollama(generator: Server) -> None:
    module = pytest.importorskip("langchain_ollama")
    model = module.ChatOllama(base_url=generator.url, model=name_of(generator), num_predict=8, temperature=0)
    assert model.invoke("Say hello.").content == chat_answer(generator, "Say hello.", 8)


def test_infinity_embeddings(embedder: Server) -> None:
    pytest.importorskip("langchain_community")
    from langchain_community.embeddings import InfinityEmbeddings

    check_embeddings(InfinityEmbeddings(model=NAME, infinity_api_url=embedder.url))


def test_infinity_rerank(reranker: Server) -> None:
    pytest.importorskip("langchain_community")
    infinity = pytest.importorskip("infinity_client")
    from langchain_community.document_compressors.infinity_rerank import InfinityRerank

    client = InfinityRerank(client=infinity.Client(base_url=reranker.url), model=name_of(reranker), top_n=2)
    check_ranking(ranked(client.compress_documents(documents(), QUERY)), reranker)


def test_jina_rerank(reranker: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("langchain_community")
    from langchain_community.document_compressors import jina_rerank

    monkeypatch.setattr(jina_rerank, "JINA_API_URL", f"{reranker.url}/v1/rerank")
    client = jina_rerank.JinaRerank(jina_api_key="none", model=name_of(reranker), top_n=2)
    check_ranking(ranked(client.compress_documents(documents(), QUERY)), reranker)


def test_vllm_completions(generator: Server) -> None:
    pytest.importorskip("langchain_community")
    from langchain_community.llms import VLLMOpenAI

    name = name_of(generator)
    model = VLLMOpenAI(
        openai_api_base=f"{generator.url}/v1",
        openai_api_key="none",
        model_name=name,
        max_tokens=8,
        temperature=0,
    )
    answer = generator.post("/v1/completions", prompt="Once upon", max_tokens=8, temperature=0)
    assert model.invoke("Once upon") == answer.json()["choices"][0]["text"]

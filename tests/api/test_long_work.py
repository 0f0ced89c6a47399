"""Work whose duration grows with the input leaves the event loop's thread, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api import tokens as decoding_of_ids
from penstock.api.app import build_app
from penstock.api.conversations import MAX_MESSAGES
from penstock.api.dialects.vllm import pooling
from penstock.inputs import processor
from penstock.inputs.chat import ChatTemplate
from tests.api.local_app import local_app
from tests.api.loop_threads import LoopThreads
from tests.api.scripted_app import make_state
from tests.checkpoints import write_bert, write_cross_encoder
from tests.text_models import ScriptedEngine, write_text_model


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("bert")
    write_bert(folder)
    with local_app(folder) as (client, _):
        yield client


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> LoopThreads:
    return LoopThreads(monkeypatch)


def test_many_ids_are_decoded_off_the_event_loop(http: TestClient, threads: LoopThreads) -> None:
    threads.watch(decoding_of_ids, "_decoded")
    short = http.post("/detokenize", json={"tokens": [5] * 10}).json()
    assert threads.ran_on_loop("_decoded") == {True}
    long = http.post("/detokenize", json={"tokens": [5] * 100_000}).json()
    assert threads.ran_on_loop("_decoded") == {False}
    assert len(long["prompt"]) > 9000 * len(short["prompt"]) > 0


@pytest.mark.parametrize("nested", [False, True])
def test_more_ids_than_the_limit_are_refused(http: TestClient, nested: bool) -> None:
    tokens: list[Any] = [5] * (decoding_of_ids.MAX_DECODED_IDS // 2 + 1)
    tokens = [tokens, tokens] if nested else tokens * 2
    answer = http.post("/detokenize", json={"tokens": tokens})
    assert answer.status_code == 413 and answer.json()["error"]["param"] == "tokens"
    answer = http.post("/detokenize", json={"tokens": [[5]] * 2049})
    assert answer.status_code == 400 and "2049 rows" in answer.json()["error"]["message"]


def test_long_token_lists_are_written_off_the_event_loop(http: TestClient, threads: LoopThreads) -> None:
    threads.watch(pooling, "_tokenize_reply")
    text = "the water " * 40_000
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert threads.ran_on_loop("_tokenize_reply") == {False}
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 80_002
    short = http.post("/tokenize", json={"prompt": "the water", "return_token_strs": True}).json()
    assert threads.ran_on_loop("_tokenize_reply") == {True}
    assert (
        answer["tokens"][:3] == short["tokens"][:3] and answer["token_strs"][-3:] == short["token_strs"][-3:]
    )


def test_many_token_ids_are_converted_off_the_event_loop(http: TestClient, threads: LoopThreads) -> None:
    threads.watch(processor, "_id_slice")
    body = {"input": [5] * 200_000, "truncate_prompt_tokens": 8}
    assert http.post("/v1/embeddings", json=body).json()["usage"]["prompt_tokens"] == 8
    assert threads.ran_on_loop("_id_slice") == {False}
    body["input"][150_000] = "text"  # type: ignore[index]
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400 and "input 0 is neither a text" in answer.json()["error"]["message"]


def test_too_many_documents_are_refused_before_they_are_read(tmp_path: Path, threads: LoopThreads) -> None:
    from penstock.api import pipelines, ranking
    from penstock.api.dialects.vllm import scoring

    write_cross_encoder(tmp_path)
    with local_app(tmp_path) as (http, _):
        for owner in (ranking, pipelines, scoring):
            threads.watch(owner, "make_pairs")
        for route, body in {
            "/rerank": {"query": "a", "documents": ["b"] * 2049},
            "/v2/rerank": {"query": "a", "documents": ["b"] * 2049},
            "/score": {"text_1": "a", "text_2": ["b"] * 2049},
        }.items():
            answer = http.post(route, json=body)
            assert answer.status_code == 400 and "2049 rows" in answer.text, route
        answer = http.post("/rerank", json={"query": "a", "texts": ["b"] * 2049})
        assert answer.status_code == 413 and "2049 rows" in answer.text
        assert not threads.calls


def test_chat_templates_run_off_the_event_loop(tmp_path: Path, threads: LoopThreads) -> None:
    engine = ScriptedEngine(lambda prompt, copy: [5])
    threads.watch(ChatTemplate, "render")
    with TestClient(build_app(make_state(write_text_model(tmp_path), engine))) as http:
        message = {"role": "user", "content": "Hello"}
        answer = http.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        assert threads.ran_on_loop("render") == {False}
        answer = http.post("/v1/chat/completions", json={"messages": [message] * (MAX_MESSAGES + 1)})
        assert answer.status_code == 400 and "at most 4096" in answer.text
        text = "Hello " * 400_000
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})
        assert answer.status_code == 400 and "prompt 0 has more than 128 tokens" in answer.text

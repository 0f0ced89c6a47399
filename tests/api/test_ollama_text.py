"""Ollama's `/api/chat` and `/api/generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api.app import build_app
from penstock.api.dialects.ollama.text import OllamaChatAnswer, OllamaGenerateAnswer
from penstock.api.state import ServerState
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import Task
from tests.api.answers import checked
from tests.api.scripted_app import make_state
from tests.text_models import ScriptedEngine, continue_with, write_text_model

SAID = "the water was long 日本語🙂 end"
TALK = [{"role": "user", "content": "find the water"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> ScriptedEngine:
    return ScriptedEngine(continue_with(Tokenizer(folder), SAID))


@pytest.fixture
def state(folder: Path, engine: ScriptedEngine) -> ServerState:
    return make_state(folder, engine)


@pytest.fixture
def http(state: ServerState, engine: ScriptedEngine) -> Iterator[TestClient]:
    with TestClient(build_app(state)) as client:
        yield client
    assert engine.open == 0 and state.in_flight == 0, "something was left running"


def chat(http: TestClient, **body: Any) -> dict[str, Any]:
    answer = http.post("/api/chat", json={"messages": TALK, "stream": False, **body})
    return checked(answer, OllamaChatAnswer)  # type: ignore[no-any-return]


def generate(http: TestClient, **body: Any) -> dict[str, Any]:
    answer = http.post("/api/generate", json={"prompt": "find the water", "stream": False, **body})
    return checked(answer, OllamaGenerateAnswer)  # type: ignore[no-any-return]


def refused(http: TestClient, path: str, **body: Any) -> str:
    given = {"messages": TALK} if path == "/api/chat" else {"prompt": "water"}
    answer = http.post(path, json={**given, **body})
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"]
    return str(answer.json()["error"])


def prompt_of(engine: ScriptedEngine) -> list[int]:
    return engine.requests[-1].token_ids.tolist()  # type: ignore[no-any-return]


def sampling_of(engine: ScriptedEngine) -> Any:
    return engine.requests[-1].sampling


def test_a_conversation_is_answered(http: TestClient, engine: ScriptedEngine) -> None:
    answer = chat(http, model="writer:latest")
    assert answer["message"] == {"role": "assistant", "content": SAID} and answer["done"]
    assert (answer["done_reason"], answer["model"]) == ("stop", "writer:latest")
    assert answer["prompt_eval_count"] == len(prompt_of(engine)) and answer["eval_count"] > 5
    assert answer["total_duration"] >= answer["eval_duration"] >= 0
    body = {"messages": TALK, "max_tokens": 4}
    asked = prompt_of(engine)
    http.post("/v1/chat/completions", json=body)
    assert prompt_of(engine) == asked


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_the_answer_is_streamed_by_default(http: TestClient, path: str) -> None:
    given = {"messages": TALK} if path == "/api/chat" else {"prompt": "find the water"}
    answer = http.post(path, json=given)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    texts = [line["message"]["content"] if path == "/api/chat" else line["response"] for line in lines]
    assert len(lines) > 3 and "".join(texts) == SAID
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["done_reason"] == "stop" and lines[-1]["eval_count"] > 5
    assert "total_duration" not in lines[0]


def test_a_prompt_is_a_message_unless_it_is_raw(
    http: TestClient, engine: ScriptedEngine, folder: Path
) -> None:
    assert generate(http)["response"] == SAID
    asked = prompt_of(engine)
    chat(http)
    assert prompt_of(engine) == asked
    generate(http, system="be short")
    told = prompt_of(engine)
    chat(http, messages=[{"role": "System", "content": "be short"}, *TALK])
    assert prompt_of(engine) == told
    generate(http, raw=True)
    assert prompt_of(engine) == Tokenizer(folder).encode(["find the water"])[0].tolist()
    assert "raw" in refused(http, "/api/generate", raw=True, system="be short")


def test_options_are_those_of_the_sampler(http: TestClient, engine: ScriptedEngine) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "num_predict": 4}
    answer = chat(http, options={**options, "repeat_penalty": 1.2, "num_ctx": 2048, "num_gpu": 1})
    found = sampling_of(engine)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.5, 7, 0.9, 0.1)
    assert (found.seed, found.max_tokens, found.repetition_penalty) == (3, 4, 1.2)
    assert answer["done_reason"] == "length" and answer["eval_count"] == 4
    assert chat(http, options={"stop": ["was"]})["message"]["content"] == "the water "
    chat(http, options={"seed": -1, "num_predict": -1, "repeat_penalty": 1.3, "repeat_last_n": 0})
    found = sampling_of(engine)
    assert found.seed is None and found.repetition_penalty == 1.0 and found.max_tokens > 50


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mirostat": 1}, "mirostat is not supported"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"num_predict": 0}, "num_predict is 0"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_options_that_cannot_be_followed_are_refused(
    http: TestClient, path: str, options: dict[str, Any], words: str
) -> None:
    assert words in refused(http, path, options=options)


def test_options_that_change_nothing_are_accepted(http: TestClient) -> None:
    options = {"mirostat": 0, "typical_p": 1.0, "repeat_last_n": 64, "repeat_penalty": 1.0, "num_thread": 4}
    assert chat(http, options=options, keep_alive=-1, think=False, tools=[], format="")["done"]


def test_the_format_constrains_the_answer(http: TestClient, engine: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given in ("json", schema):
        http.post("/api/chat", json={"messages": TALK, "stream": False, "format": given})
        assert sampling_of(engine).grammar.kind == "json"
    assert "JSON schema" in refused(http, "/api/chat", format="yaml")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/chat", {"tools": [{"type": "function"}]}, "does not generate tool calls"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a", "images": ["x"]}]},
            "parts of type image_url",
        ),
        ("/api/chat", {"messages": [{"role": "tool", "content": "a"}]}, "does not generate tool calls"),
        ("/api/chat", {"think": True}, "does not separate reasoning"),
        ("/api/chat", {"logprobs": True}, "log probabilities"),
        ("/api/generate", {"images": ["x"]}, "parts of type image_url"),
        ("/api/generate", {"suffix": "end"}, "at their end"),
        ("/api/generate", {"context": [1]}, "/api/chat"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "--chat-template"),
        ("/api/generate", {"prompt": "water " * 400, "raw": True}, "tokens"),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    http: TestClient, path: str, body: dict[str, Any], words: str
) -> None:
    assert words in refused(http, path, **body)


def test_nothing_to_say_loads_the_model(http: TestClient) -> None:
    for answer in (chat(http, messages=[]), generate(http, prompt="")):
        assert answer["done_reason"] == "load" and "eval_count" not in answer
    missing = http.post("/api/chat", json={"model": "no-such"})
    assert missing.status_code == 404 and "not found" in missing.json()["error"]


def test_a_failure_in_a_stream_is_its_last_line(http: TestClient, engine: ScriptedEngine) -> None:
    engine.fail_after = 4
    lines = [json.loads(line) for line in http.post("/api/chat", json={"messages": TALK}).text.splitlines()]
    assert len(lines) > 1 and list(lines[-1]) == ["error"]


def test_a_model_that_does_not_generate_is_a_bad_request(folder: Path, engine: ScriptedEngine) -> None:
    with TestClient(build_app(make_state(folder, engine, tasks=(Task.EMBED,)))) as http:
        assert "does not generate" in refused(http, "/api/chat")
        assert "does not generate" in refused(http, "/api/chat", messages=[])

"""Bad requests to the generating routes get a clear error, and none of them leaks memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "the water was"
LIMIT = 256
HELD = ("penstock_kv_blocks", "penstock_running_rows", "penstock_requests_in_flight")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

CHAINED_RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2900)) + 'r2900: "a"'
CHAINED_ARRAYS = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2000)},
}


def messages(role: str = "user", content: Any = "hi") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


@pytest.fixture(scope="module")
def server(llama_server: Server) -> Server:
    return llama_server


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    yield server.http
    check_nothing_is_held(server)


def check_nothing_is_held(server: Server) -> None:
    for name in HELD:
        server.wait_for_metric(name, 0)


def check_refused(answer: httpx.Response, status: int, param: str | None, words: str) -> None:
    """Check an error of OpenAI's shape: message, type, field and code."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert words in error["message"] and error["param"] == param, error
    assert error["type"] and error["code"]


BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -1}, "max_tokens", "at least 1"),
    ({"max_tokens": 10_000}, "max_tokens", f"at most {LIMIT}"),
    ({"max_tokens": "many"}, "max_tokens", "Expected"),
    ({"max_tokens": 1.5}, "max_tokens", "Expected"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "above max_tokens"),
    ({"min_tokens": -1}, "min_tokens", "use 0 or more"),
    ({"stop": ""}, "stop", "empty text"),
    ({"stop": ["x", ""]}, "stop", "empty text"),
    ({"stop": [str(i) for i in range(70)]}, "stop", "70 texts"),
    ({"stop": [1]}, "stop", "Expected"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"ignore_eos": True, "guided_regex": "a+"}, "ignore_eos", "contradict"),
    ({"guided_json": SCHEMA, "guided_regex": "a+"}, "guided_regex", "contradict"),
    ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "response_format", "contradict"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "contradict"),
    ({"guided_regex": "(["}, "guided_regex", "cannot be used"),
    ({"guided_json": {"type": "nonsense"}}, "guided_json", "cannot be used"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": [1]}, "guided_json", "Expected"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar", "cannot be used"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", ""),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_choice": [""]}, "guided_choice", "empty"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "300000 characters"),
    ({"guided_grammar": CHAINED_RULES}, "guided_grammar", "in a chain"),
    ({"structured_outputs": {"json": CHAINED_ARRAYS}}, "structured_outputs", "in a chain"),
    ({"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000}, "guided_json", "nests"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format", ""),
    ({"n": 0}, "n", "at least 1"),
    ({"n": -3}, "n", "at least 1"),
    ({"n": 100_000}, "n", "sequences"),
    ({"temperature": -0.5}, "temperature", "use 0 to 1000"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.5}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "1 or more"),
    ({"top_k": 2**64}, "top_k", "1 or more"),
    ({"temperature": 1e308}, "temperature", "0 to 1000"),
    ({"repetition_penalty": 1e308}, "repetition_penalty", "1e-06 to 1e+06"),
    ({"repetition_penalty": 1e-308}, "repetition_penalty", "1e-06 to 1e+06"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
    ({"min_p": 2}, "min_p", "use 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "use 1e-06"),
    ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    ({"seed": 2**70}, "seed", ""),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias", "1000000"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "is empty"),
    ({"bad_words": [" "]}, "bad_words", "empty text"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ""),
    ({"timeout": -1}, "timeout", "above 0"),
]  # fmt: skip
COMPLETIONS_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", ""),
    ({"prompt": [[1], "a"]}, "prompt", ""),
    ({"prompt": [10**6]}, "prompt", "1000000"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": None}, "prompt", "Expected"),
    ({"prompt": [1] * LIMIT}, "prompt", f"the prompt has {LIMIT}"),
    ({"prompt": [1] * 250, "max_tokens": 20}, "max_tokens", "together 270"),
    ({"prompt": [[1], [1] * LIMIT]}, "prompt", f"the prompt has {LIMIT}"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"logprobs": -1}, "logprobs", "0 to 20"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"max_tokens": -1, "echo": True}, "max_tokens", "at least 1"),
]  # fmt: skip
CHAT_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hi"}, "messages", "Expected"),
    ({"messages": messages("system")}, "messages", "no system message, please"),
    ({"messages": messages("tool")}, "messages", "failed on these messages"),
    ({"messages": messages(content=[{"type": "image_url"}])}, "messages", "image without one"),
    ({"messages": messages(content="water " * 400)}, "prompt", f"at most {LIMIT}"),
    ({"messages": messages(content="hi"), "max_tokens": 250}, "max_tokens", f"at most {LIMIT}"),
    ({"max_completion_tokens": -4}, "max_completion_tokens", "at least 1"),
    ({"echo": True, "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not"),
]  # fmt: skip
CASES = [
    *((COMPLETIONS, *case) for case in (*BOTH, *COMPLETIONS_ONLY)),
    *((CHAT, *case) for case in (*BOTH, *CHAT_ONLY)),
]


@pytest.mark.parametrize(
    ("route", "body", "param", "words"), CASES, ids=[f"{c[0][4:8]}-{str(c[1])[:60]}" for c in CASES]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_value_is_a_400_with_the_field_and_a_reason(
    server: Server, route: str, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    if {"response_format", "structured_outputs"} & body.keys() or any(
        name.startswith("guided") for name in body
    ):
        pytest.importorskip("llguidance")
    plain = {"prompt": PROMPT} if route == COMPLETIONS else {"messages": messages()}
    answer = server.http.post(route, json=plain | {"stream": stream} | body)
    check_refused(answer, 400, param, words)


def test_after_every_refusal_no_memory_is_held_and_text_is_generated(
    http: httpx.Client, server: Server
) -> None:
    check_nothing_is_held(server)
    for route, asked in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": messages()})):
        answer = http.post(route, json=asked | {"max_tokens": 8, "ignore_eos": True})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8


def test_infinity_and_nan_are_refused(http: httpx.Client) -> None:
    """JSON has no infinity, but 1e999 is too large for a float."""
    for text in ("1e999", "NaN", "-Infinity"):
        body = f'{{"prompt": "a", "temperature": {text}}}'
        answer = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_echo_with_max_tokens_0_returns_only_the_prompt(http: httpx.Client) -> None:
    for more in ({}, {"logprobs": 1}, {"prompt_logprobs": 1}, {"n": 2}):
        answer = http.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 0, "echo": True} | more)
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == 0


def test_all_choices_come_in_one_stream(http: httpx.Client) -> None:
    body = {"prompt": [PROMPT, "deep"], "max_tokens": 12, "n": 3, "seed": 3, "ignore_eos": True}
    whole = http.post(COMPLETIONS, json=body).json()["choices"]
    texts, ends = [""] * 6, [0] * 6
    with http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
                    ends[choice["index"]] += choice["finish_reason"] is not None
    assert texts == [choice["text"] for choice in whole] and ends == [1] * 6


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 4, "seed": 2},
        {"logprobs": 3, "echo": True},
        {"stop": ["never in this text"]},
        {"prompt": [[5] * 100, [6] * 3, [7]]},
    ],
    ids=["plain", "copies", "scored", "stop", "rows"],
)
def test_a_client_that_disconnects_in_a_stream_leaves_nothing_behind(
    http: httpx.Client, more: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "stream": True} | more
    for events in (0, 3):
        with http.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            for _ in range(events):
                next(lines)


def test_a_client_that_disconnects_from_constrained_output_leaves_nothing_behind(http: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    fields = {f"field{i}": {"enum": [f"value {i} {j}" for j in range(30)]} for i in range(60)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    for events in (0, 2):
        body = {"messages": messages(), "stream": True, "guided_json": schema | {"title": str(events)}}
        with http.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            for _ in range(events):
                next(lines)


def test_the_engine_refuses_a_grammar_that_needs_an_unknown_token(http: httpx.Client) -> None:
    """The grammar is valid. Only the engine has the vocabulary, so only the engine can refuse it."""
    pytest.importorskip("llguidance")
    for stream in (False, True):
        body = {"prompt": PROMPT, "guided_grammar": "start: <|no_such_token|>", "stream": stream}
        answer = http.post(COMPLETIONS, json=body)
        assert answer.status_code == 400, answer.text
        assert "no_such_token" in answer.json()["error"]["message"]


def test_a_request_past_its_deadline_gets_408_and_leaves_nothing_behind(http: httpx.Client) -> None:
    body = {"prompt": [PROMPT] * 40, "max_tokens": 200, "ignore_eos": True, "timeout": 0.05}
    check_refused(http.post(COMPLETIONS, json=body), 408, None, "not finished")

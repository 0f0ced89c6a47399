"""`/v1/completions` and `/v1/chat/completions`, as OpenAI's client and lm_eval use them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from starlette.testclient import TestClient

from penstock.api.app import build_app
from penstock.api.state import ServerState
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import Task
from tests.api.scripted_app import listening, make_state
from tests.text_models import LIMIT, ScriptedEngine, continue_with, fake_logprob, write_text_model
from tests.waiting import wait_until

SAID = "the water was long 日本語🙂 end"
TALK = [{"role": "user", "content": "find the water"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(continue_with(tokenizer, SAID, "another", "a third"))


@pytest.fixture
def state(folder: Path, engine: ScriptedEngine) -> ServerState:
    return make_state(folder, engine)


@pytest.fixture
def http(state: ServerState, engine: ScriptedEngine) -> Iterator[TestClient]:
    with TestClient(build_app(state)) as client:
        yield client
    assert engine.open == 0 and state.in_flight == 0, "something was left running"


@pytest.fixture
def url(state: ServerState, engine: ScriptedEngine) -> Iterator[str]:
    with listening(state) as address:
        yield address
    assert engine.open == 0 and state.in_flight == 0, "something was left running"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(http: TestClient, path: str = "/v1/completions", **body: Any) -> Any:
    plain = {"prompt": "find"} if path == "/v1/completions" else {"messages": TALK}
    answer = http.post(path, json={**plain, "max_tokens": 60, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(http: TestClient, path: str = "/v1/completions", **body: Any) -> tuple[int, dict[str, Any]]:
    plain = {"prompt": "find"} if path == "/v1/completions" else {"messages": TALK}
    answer = http.post(path, json={**plain, **body})
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json()["error"]


def chunks(http: TestClient, path: str = "/v1/completions", **body: Any) -> list[Any]:
    plain = {"prompt": "find"} if path == "/v1/completions" else {"messages": TALK}
    answer = http.post(path, json={**plain, "max_tokens": 60, "stream": True, **body})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


class TestOpenAI:
    def test_a_completion(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(
            model="writer", prompt="find", max_tokens=60, n=2, logprobs=2, seed=7
        )
        assert [choice.text for choice in answer.choices] == [SAID, SAID]
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) and logprobs.tokens[-1] == "<|im_end|>"
        assert answer.usage is not None and answer.usage.completion_tokens == 2 * len(logprobs.tokens)

    def test_a_completion_in_a_stream(self, client: openai.OpenAI) -> None:
        stream = client.completions.create(
            model="writer", prompt="find", max_tokens=60, stream=True, stream_options={"include_usage": True}
        )
        got = list(stream)
        assert "".join(chunk.choices[0].text for chunk in got if chunk.choices) == SAID
        assert got[-2].choices[0].finish_reason == "stop" and not got[-1].choices
        assert got[-1].usage is not None and got[-1].usage.prompt_tokens > 0
        assert all("\N{REPLACEMENT CHARACTER}" not in chunk.choices[0].text for chunk in got if chunk.choices)

    def test_a_chat(self, client: openai.OpenAI, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
        answer = client.chat.completions.create(model="writer", messages=TALK, logprobs=True, top_logprobs=3)  # type: ignore[call-overload]
        choice = answer.choices[0]
        assert (choice.message.role, choice.message.content, choice.finish_reason) == (
            "assistant",
            SAID,
            "stop",
        )
        content = choice.logprobs.content
        raw = b"".join(bytes(token.bytes) for token in content[:-1])
        assert raw.decode() == SAID and all(len(token.top_logprobs) == 3 for token in content)
        prompt = tokenizer.decode(engine.requests[0].token_ids.tolist())
        assert prompt == "<|im_start|>user\nfind the water<|im_end|>\n<|im_start|>assistant\n"
        sampling = engine.requests[0].sampling
        assert sampling is not None and sampling.max_tokens == LIMIT - engine.requests[0].num_tokens

    def test_a_chat_in_a_stream(self, client: openai.OpenAI) -> None:
        stream = client.chat.completions.create(model="writer", messages=TALK, stream=True, n=2)  # type: ignore[call-overload]
        texts, roles, ends = {0: "", 1: ""}, [], []
        for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            ends += [choice.finish_reason] if choice.finish_reason else []
        assert texts == {0: SAID, 1: "another"} and roles == ["assistant"] * 2 and ends == ["stop"] * 2

    def test_an_error_has_its_class(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="max_tokens is 0"):
            client.completions.create(model="writer", prompt="find", max_tokens=0)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="find")

    def test_an_error_in_a_stream_reaches_the_client(
        self, client: openai.OpenAI, engine: ScriptedEngine
    ) -> None:
        engine.fail_after = 3
        stream = client.completions.create(model="writer", prompt="find", max_tokens=60, stream=True)
        with pytest.raises(openai.APIError, match="could not compute this row"):
            list(stream)


class TestEvaluation:
    """The request bodies of lm_eval's local-completions, and the fields that it reads from the answers."""

    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_given_tokens_have_log_probabilities(
        self, http: TestClient, tokenizer: Tokenizer, max_tokens: int
    ) -> None:
        rows = [ids.tolist() for ids in tokenizer.encode(["the water was long", "see it"])]
        answer = ask(
            http,
            prompt=rows,
            max_tokens=max_tokens,
            logprobs=1,
            echo=True,
            temperature=0,
            seed=1234,
            model="writer",
        )
        for ids, choice in zip(rows, answer["choices"], strict=True):
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == len(ids) + max_tokens
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            made = logprobs["token_logprobs"][1 : len(ids)]
            assert made == pytest.approx([fake_logprob(token, 0) for token in ids[1:]])
            tops = logprobs["top_logprobs"][1 : len(ids)]
            assert [max(top.values()) for top in tops] == made  # lm_eval treats these tokens as greedy
            assert choice["text"].startswith(tokenizer.decode(ids))
            assert logprobs["text_offset"][2] == len("".join(logprobs["tokens"][:2]))
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens
        assert answer["usage"]["prompt_tokens"] == sum(map(len, rows))

    def test_text_ends_before_a_stop_string(self, http: TestClient) -> None:
        answer = ask(
            http, prompt=["find", "see"], max_tokens=50, temperature=0, stop=["日本", "\n\n"], seed=1234
        )
        assert [choice["text"] for choice in answer["choices"]] == ["the water was long "] * 2
        assert [choice["stop_reason"] for choice in answer["choices"]] == ["日本"] * 2


class TestCompletions:
    def test_a_prompt_may_be_a_text_or_token_ids_alone_or_in_a_list(
        self, http: TestClient, tokenizer: Tokenizer
    ) -> None:
        ids = tokenizer.encode(["find"])[0].tolist()
        for prompt, count in (("find", 1), (["find", "see"], 2), (ids, 1), ([ids, ids], 2)):
            answer = ask(http, prompt=prompt)
            assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")

    def test_each_choice_has_its_own_seed(self, http: TestClient, engine: ScriptedEngine) -> None:
        ask(http, n=3, seed=5)
        assert [request.sampling.seed for request in engine.requests] == [5, 6, 7]  # type: ignore[union-attr]

    @pytest.mark.parametrize("stream", [False, True])
    def test_echo_gives_the_prompt_first(self, http: TestClient, stream: bool) -> None:
        if stream:
            got = chunks(http, echo=True, logprobs=0)
            assert "".join(chunk["choices"][0]["text"] for chunk in got) == "find" + SAID
            tokens = [
                token
                for chunk in got
                for token in (chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]
            ]
            offsets = [
                at
                for chunk in got
                for at in (chunk["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
            ]
            assert tokens[0] in "find" and offsets == sorted(offsets)
        else:
            assert ask(http, echo=True)["choices"][0]["text"] == "find" + SAID

    def test_prompt_logprobs_have_the_shape_of_vllm(self, http: TestClient, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode(["the water was"])[0].tolist()
        scores = ask(http, prompt=ids, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
        assert scores[0] is None and len(scores) == len(ids)
        entry = scores[1][str(ids[1])]
        assert entry == {
            "logprob": pytest.approx(fake_logprob(ids[1], 0)),
            "rank": 1,
            "decoded_token": tokenizer.token_text(ids[1]),
        }
        assert len(scores[1]) == 2  # the chosen token is also the likeliest

    def test_tokens_can_be_returned_as_ids(self, http: TestClient, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode([SAID], add_special_tokens=False)[0].tolist()
        logprobs = ask(http, logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
        assert logprobs["tokens"][:-1] == [f"token_id:{number}" for number in ids]

    def test_a_stream_reports_usage_once_or_with_every_event(self, http: TestClient) -> None:
        plain = chunks(http)
        assert all("usage" not in chunk for chunk in plain)
        some = chunks(http, stream_options={"include_usage": True})
        assert (
            all(chunk["usage"] is None for chunk in some[:-1]) and some[-1]["usage"]["completion_tokens"] > 3
        )
        every = chunks(http, stream_options={"include_usage": True, "continuous_usage_stats": True})
        counts = [chunk["usage"]["completion_tokens"] for chunk in every]
        assert counts == sorted(counts) and counts[0] >= 1

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_every_event_of_a_stream_has_the_same_form(self, http: TestClient, path: str) -> None:
        """Text-only events are written from a template; events with usage are encoded whole."""
        framed = chunks(http, path, stream_options={"include_usage": True}, request_id='a"b')
        options = {"include_usage": True, "continuous_usage_stats": True}
        whole = chunks(http, path, stream_options=options, request_id='a"b')
        assert len(framed) > 5
        for one, other in zip(framed, whole, strict=True):
            assert one["usage"] is None or not one["choices"]
            assert list(one) == list(other)
            assert one | {"usage": 0, "created": 0} == other | {"usage": 0, "created": 0}

    @pytest.mark.parametrize("burst", [1, 4])
    def test_a_stream_is_the_answer_in_pieces(
        self, http: TestClient, engine: ScriptedEngine, burst: int
    ) -> None:
        engine.burst = burst
        for body in (
            {"logprobs": 1},
            {"stop": "end"},
            {"stop": ["日本語"], "n": 2, "seed": 3},
            {"max_tokens": 5},
        ):
            whole = ask(http, **body)["choices"]
            got = chunks(http, **body)
            for choice in whole:
                own = [
                    chunk["choices"][0] for chunk in got if chunk["choices"][0]["index"] == choice["index"]
                ]
                assert "".join(part["text"] for part in own) == choice["text"]
                assert [part["finish_reason"] for part in own if part["finish_reason"]] == [
                    choice["finish_reason"]
                ]
                assert own[-1]["stop_reason"] == choice["stop_reason"]
                if choice["logprobs"]:
                    tokens = [
                        token for part in own if part["logprobs"] for token in part["logprobs"]["tokens"]
                    ]
                    assert tokens == choice["logprobs"]["tokens"]

    def test_headers_carry_the_request_id_and_timings(self, http: TestClient) -> None:
        answer = http.post(
            "/v1/completions", json={"prompt": "find", "request_id": "mine", "user": "me", "priority": 3}
        )
        text = http.get("/metrics").text
        assert (
            'penstock_generated_tokens_total{model="writer"}' in text and "first_token_seconds_count" in text
        )
        assert answer.json()["id"] == "cmpl-mine" and answer.headers["x-request-id"] == "mine"
        assert float(answer.headers["x-device-ms"]) == 500

    def test_parameters_reach_the_engine(self, http: TestClient, engine: ScriptedEngine) -> None:
        ask(
            http,
            temperature=0.25,
            top_k=4,
            logit_bias={"3": 1},
            bad_words=["water"],
            priority=2,
            timeout=9,
            cache_salt="s",
        )
        (request,) = engine.requests
        assert request.sampling is not None and request.params.task is Task.GENERATE
        assert (request.sampling.temperature, request.sampling.top_k) == (0.25, 4)
        assert request.sampling.bad_token_ids and request.sampling.logit_bias == {3: 1.0}
        assert (request.priority, request.cache_salt) == (2, "s")
        assert request.deadline_s == pytest.approx(request.arrival_s + 9)


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/completions", {"max_tokens": 0}, "max_tokens", "at least 1"),
    ("/v1/completions", {"max_tokens": 500}, "max_tokens", f"at most {LIMIT} tokens"),
    ("/v1/completions", {"prompt": [1] * LIMIT}, "prompt", f"the prompt has {LIMIT}"),
    ("/v1/completions", {"prompt": []}, "prompt", "empty"),
    ("/v1/completions", {"best_of": 3}, "best_of", "not supported"),
    ("/v1/completions", {"suffix": "x"}, "suffix", "not supported"),
    ("/v1/completions", {"stop": ["a", ""]}, "stop", "empty text"),
    ("/v1/completions", {"logprobs": 21}, "logprobs", "0 to 20"),
    ("/v1/completions", {"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ("/v1/completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
    ("/v1/completions", {"temperature": "hot"}, "temperature", "Expected"),
    ("/v1/completions", {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "above max_tokens"),
    ("/v1/completions", {"priority": 10**9}, "priority", "priority is"),
    ("/v1/completions", {"timeout": 0}, "timeout", "above 0"),
    ("/v1/completions", {"n": 4000}, "n", "4000 sequences"),
    ("/v1/chat/completions", {"messages": []}, "messages", "empty"),
    ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages", "no role"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages", "no content"),
    ("/v1/chat/completions", {"messages": [{"role": "u", "content": [{"type": "x"}]}]}, "messages", "'x'"),
    ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
    ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens", "tokens is 0; it"),
    ("/v1/chat/completions", {"continue_final_message": True}, "continue_final_message", "contradict"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "must"),
]  # fmt: skip


class TestBadInput:
    @pytest.mark.parametrize(("path", "body", "param", "words"), BAD)
    def test_a_bad_value_is_refused_with_a_reason(
        self,
        http: TestClient,
        engine: ScriptedEngine,
        path: str,
        body: dict[str, Any],
        param: str,
        words: str,
    ) -> None:
        for stream in (
            ({}, {"stream": True}) if "stream_options" not in body and "stream" not in body else ({},)
        ):
            status, error = refused(http, path, **body, **stream)
            assert (status, error["type"], error["param"]) == (400, "BadRequestError", param), error
            assert words in error["message"]
        assert engine.requests == []

    def test_a_grammar_beyond_the_bounds_is_refused_without_the_engine(
        self, http: TestClient, engine: ScriptedEngine
    ) -> None:
        pytest.importorskip("llguidance")
        rules = "".join(f"r{i}: r{i + 1}\n" for i in range(2900))
        arrays = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2000)}
        schema = {"$ref": "#/$defs/d0", "$defs": arrays}
        for body in (
            {"guided_grammar": f"start: r0\n{rules}"},
            {"structured_outputs": {"grammar": f"start: r0\n{rules}"}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        ):
            status, error = refused(http, "/v1/chat/completions", **body)
            assert status == 400 and error["param"] in body and "in a chain" in error["message"]
        assert engine.requests == []

    def test_a_choice_reaches_the_engine_as_a_grammar(self, http: TestClient, engine: ScriptedEngine) -> None:
        pytest.importorskip("llguidance")
        ask(http, guided_choice=["yes", "no"])
        sampling = engine.requests[0].sampling
        assert (
            sampling is not None and sampling.grammar is not None and '"yes" | "no"' in sampling.grammar.text
        )

    def test_a_model_that_does_not_generate_lists_its_tasks(
        self, folder: Path, engine: ScriptedEngine
    ) -> None:
        with TestClient(build_app(make_state(folder, engine, tasks=(Task.EMBED,)))) as http:
            for path in ("/v1/completions", "/v1/chat/completions"):
                status, error = refused(http, path)
                assert status == 422 and "its tasks are: embed" in error["message"]

    def test_the_pooling_route_does_not_generate(self, http: TestClient) -> None:
        for task in ("generate", ["embed", "generate"]):
            answer = http.post("/pooling", json={"input": "a", "task": task})
            assert answer.status_code == 400 and "use /v1/completions" in answer.json()["error"]["message"]

    def test_a_failure_before_the_first_token_has_an_error_status(
        self, http: TestClient, engine: ScriptedEngine
    ) -> None:
        engine.fail_after = 0
        for stream in (False, True):
            status, error = refused(http, stream=stream)
            assert status == 500 and error["reason"] == "row_failed"

    def test_a_failure_in_a_stream_is_an_error_event(self, http: TestClient, engine: ScriptedEngine) -> None:
        engine.fail_after = 2
        got = chunks(http)
        assert "error" not in got[0] and got[-1]["error"]["reason"] == "row_failed"

    def test_a_request_past_its_deadline_gets_408(self, http: TestClient, engine: ScriptedEngine) -> None:
        engine.pause = asyncio.Event()  # never set
        status, error = refused(http, timeout=0.05)
        assert status == 408 and error["reason"] == "deadline_exceeded"

    def test_a_stream_past_its_deadline_ends_with_an_error_event(
        self, http: TestClient, engine: ScriptedEngine
    ) -> None:
        engine.pause = asyncio.Event()  # never set
        body = {"prompt": "find", "max_tokens": 60, "stream": True}
        for timeout_s in (0.1, 1, 10):  # a busy machine may need longer than the first to begin the stream
            answer = http.post("/v1/completions", json=body | {"timeout": timeout_s})
            if answer.status_code == 200:
                break
        *_, last, done = answer.text.removesuffix("\n\n").split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["reason"] == "deadline_exceeded"
        assert done == "data: [DONE]"


class TestChat:
    def test_parts_templates_and_continuations(
        self, http: TestClient, engine: ScriptedEngine, tokenizer: Tokenizer
    ) -> None:
        talk = [*TALK, {"role": "assistant", "content": [{"type": "text", "text": "It was"}]}]
        answer = ask(
            http,
            "/v1/chat/completions",
            messages=talk,
            add_generation_prompt=False,
            continue_final_message=True,
            echo=True,
        )
        assert tokenizer.decode(engine.requests[0].token_ids.tolist()).endswith("assistant\nIt was")
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "It was" + SAID}
        got = chunks(
            http,
            "/v1/chat/completions",
            messages=talk,
            add_generation_prompt=False,
            continue_final_message=True,
            echo=True,
        )
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in got) == "It was" + SAID

    def test_messages_that_a_client_serialised_are_accepted(
        self, http: TestClient, engine: ScriptedEngine
    ) -> None:
        talk = [
            *TALK,
            {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None},
            *TALK,
        ]
        ask(http, "/v1/chat/completions", messages=talk)
        assert engine.requests

    def test_a_chat_without_a_template_is_refused_with_a_reason(
        self, tmp_path: Path, engine: ScriptedEngine
    ) -> None:
        folder = write_text_model(tmp_path / "bare", template=None)
        with TestClient(build_app(make_state(folder, engine))) as http:
            status, error = refused(http, "/v1/chat/completions")
            assert status == 400 and "--chat-template" in error["message"]
            ask(http)
        given = {"chat_template": "{{ messages[0].content }}!"}
        with TestClient(build_app(make_state(folder, engine, given))) as http:
            ask(http, "/v1/chat/completions")
        assert Tokenizer(folder).decode(engine.requests[-1].token_ids.tolist()) == "find the water!"

    def test_the_refusal_of_a_template_reaches_the_client(
        self, tmp_path: Path, engine: ScriptedEngine
    ) -> None:
        folder = write_text_model(tmp_path / "strict", template="{{ raise_exception('users only') }}")
        with TestClient(build_app(make_state(folder, engine))) as http:
            status, error = refused(http, "/v1/chat/completions")
        assert status == 400 and "users only" in error["message"]

    def test_prompt_logprobs_are_outside_the_choices(self, http: TestClient) -> None:
        answer = ask(http, "/v1/chat/completions", prompt_logprobs=0)
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


class TestLeaving:
    def test_a_client_that_disconnects_from_a_stream_ends_its_sequences(
        self, url: str, engine: ScriptedEngine, state: ServerState, tokenizer: Tokenizer
    ) -> None:
        engine.script = lambda prompt, copy: tokenizer.encode(["the water "])[0].tolist() * 100
        engine.pause = asyncio.Event()  # never set
        with httpx.Client() as http:
            body = {"messages": TALK, "stream": True, "ignore_eos": True}
            with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                pieces = answer.iter_bytes()  # a reference keeps the answer open
                next(pieces)
                assert engine.open == 1 and state.in_flight == 1
        wait_until(lambda: engine.open == 0 and state.in_flight == 0)
        assert engine.cancelled and 'status="499"' in httpx.get(f"{url}/metrics").text

    def test_a_client_that_disconnects_before_the_answer_ends_its_sequences(
        self, url: str, engine: ScriptedEngine
    ) -> None:
        engine.pause = asyncio.Event()  # never set
        for number, stream in enumerate((True, False)):
            body = json.dumps({"prompt": "find", "max_tokens": 60, "stream": stream}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as connection:
                connection.sendall(head.encode() + body)
                wait_until(lambda: engine.open == 1)
            wait_until(lambda: engine.open == 0)
            assert len(engine.cancelled) == number + 1

    def test_a_client_that_does_not_read_makes_the_stream_wait(
        self, state: ServerState, engine: ScriptedEngine
    ) -> None:
        """While the transport is full, nothing is written. Then all pending text leaves in one event."""
        body = json.dumps({"prompt": "find", "max_tokens": 60, "stream": True}).encode()
        sent: list[bytes] = []

        async def talk() -> None:
            room, inbox = asyncio.Event(), asyncio.Queue[dict[str, Any]]()
            inbox.put_nowait({"type": "http.request", "body": body})

            async def send(message: Any) -> None:
                if message["type"] == "http.response.body":
                    sent.append(message["body"])
                    if len(sent) == 2:
                        await room.wait()

            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
            app = build_app(state)
            answering = asyncio.create_task(app(scope, inbox.get, send))  # type: ignore[arg-type]
            while engine.open or not engine.requests:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert len(sent) == 2 and state.in_flight == 1
            room.set()
            await answering

        asyncio.run(talk())
        events = b"".join(sent).decode().split("\n\n")
        texts = [
            json.loads(event[6:])["choices"][0]["text"] for event in events if event.startswith("data: {")
        ]
        assert "".join(texts) == SAID and len(sent) < engine.steps and state.in_flight == 0

    def test_a_full_server_answers_429(self, folder: Path, engine: ScriptedEngine) -> None:
        engine.pause = asyncio.Event()  # never set
        state = make_state(folder, engine, {"max_concurrent_requests": 1})
        with listening(state) as url, httpx.Client() as http:
            with http.stream(
                "POST", f"{url}/v1/completions", json={"prompt": "find", "stream": True}
            ) as answer:
                pieces = answer.iter_bytes()  # a reference keeps the answer open
                next(pieces)
                second = httpx.post(f"{url}/v1/completions", json={"prompt": "find"})
                assert second.status_code == 429
            wait_until(lambda: state.in_flight == 0)


def test_the_schema_describes_the_routes(http: TestClient) -> None:
    schema = http.get("/openapi.json").json()
    for path, name in (("/v1/completions", "CompletionRequest"), ("/v1/chat/completions", "ChatRequest")):
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["$ref"].endswith(name)
        assert {"temperature", "stop", "stream", "guided_json"} <= schema["components"]["schemas"][name][
            "properties"
        ].keys()

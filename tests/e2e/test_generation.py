"""A server with a small Llama generates the same text as transformers, read with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from penstock import Engine, SamplingParams
from penstock.inputs.tokenizer import Tokenizer
from tests.e2e.server import Server

PROMPT = "the water was"


@pytest.fixture(scope="module")
def folder(llama_folder: Path) -> Path:
    return llama_folder


@pytest.fixture(scope="module")
def server(llama_server: Server) -> Server:
    return llama_server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def expected(folder: Path, count: int) -> str:
    tokenizer = Tokenizer(folder)
    ids = torch.tensor([tokenizer.encode([PROMPT])[0].tolist()])
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    new = model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(new.tolist(), skip_special_tokens=True)


def test_greedy_text_equals_that_of_transformers_whole_and_streamed(
    client: openai.OpenAI, folder: Path
) -> None:
    whole = client.completions.create(model="llama", prompt=PROMPT, max_tokens=40, temperature=0)
    stream = client.completions.create(
        model="llama",
        prompt=PROMPT,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert whole.choices[0].text == text == expected(folder, 40)
    assert chunks[-1].usage is not None and chunks[-1].usage == whole.usage


def test_greedy_text_equals_that_of_the_offline_engine(client: openai.OpenAI, folder: Path) -> None:
    whole = client.completions.create(model="llama", prompt=PROMPT, max_tokens=40, temperature=0)
    with Engine(str(folder), device="cpu") as engine:
        (alone,) = engine.generate([PROMPT], SamplingParams(max_tokens=40, temperature=0))
    assert whole.choices[0].text == alone.text and len(alone.token_ids) > 0


def test_embeddings_and_streams_share_the_engine(client: openai.OpenAI, folder: Path) -> None:
    """Both run concurrently, and neither changes the other's answers."""
    texts = ["the water was", "deep and cold", "a turbine " * 20]

    def embed() -> list[list[float]]:
        answer = client.embeddings.create(model="llama", input=texts, encoding_format="float")
        return [row.embedding for row in answer.data]

    alone, whole, between = embed(), expected(folder, 100), 0
    stream = client.completions.create(
        model="llama",
        prompt=PROMPT,
        max_tokens=100,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces = []
    for chunk in stream:
        pieces.append(chunk.choices[0].text)
        if len(pieces) in (2, 10, 20):
            assert embed() == alone
            between += 1
    assert "".join(pieces).startswith(whole) and between == 3


def test_prompt_log_probabilities_equal_those_of_transformers(client: openai.OpenAI, folder: Path) -> None:
    """lm_eval's local-completions sends this request."""
    answer = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    scores = answer.choices[0].logprobs
    assert scores is not None and scores.token_logprobs is not None
    ids = torch.tensor([Tokenizer(folder).encode([PROMPT])[0].tolist()])
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        likely = model(ids).logits[0].log_softmax(dim=-1)
    wanted = [float(likely[at, token]) for at, token in enumerate(ids[0, 1:].tolist())]
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[1 : len(wanted) + 1] == pytest.approx(wanted, abs=1e-4)


def test_constrained_and_free_answers_share_a_batch(client: openai.OpenAI, folder: Path) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"good": {"type": "boolean"}, "way": {"enum": ["up", "down"]}},
        "required": ["good", "way"],
        "additionalProperties": False,
    }

    def constrained(seed: int) -> str:
        answer = client.chat.completions.create(
            model="llama",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=60,
            seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content or ""

    def free(_: int) -> str:
        answer = client.completions.create(model="llama", prompt=PROMPT, max_tokens=40, temperature=0)
        return answer.choices[0].text

    with ThreadPoolExecutor(6) as many:
        texts, others = many.map(constrained, range(4)), many.map(free, range(3))
        for value in map(json.loads, texts):
            assert value.keys() == {"good", "way"}
            assert isinstance(value["good"], bool) and value["way"] in ("up", "down")
        assert set(others) == {expected(folder, 40)}


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 10_000}, 400, "256"),
        ({"logit_bias": {"99999": 1.0}}, 400, "99999"),
        ({"allowed_token_ids": [99_999]}, 400, "99999"),
        ({"temperature": -1}, 400, "temperature"),
        ({"min_tokens": 9, "max_tokens": 4}, 400, "min_tokens"),
        ({"guided_regex": "(["}, 400, "regular expression"),
    ],
)
def test_a_refusal_names_the_bad_field(
    server: Server, fields: dict[str, Any], status: int, words: str
) -> None:
    if "guided_regex" in fields:
        pytest.importorskip("llguidance")
    answer = server.http.post("/v1/completions", json={"prompt": PROMPT} | fields)
    assert answer.status_code == status and words in answer.json()["error"]["message"]


def test_a_seed_repeats_all_choices_and_each_choice_differs(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.chat.completions.create(
            model="llama", messages=[{"role": "user", "content": "hi"}], max_tokens=12, n=3, seed=5
        )
        return [choice.message.content or "" for choice in answer.choices]

    first = ask()
    assert first == ask() and len(set(first)) == 3


def test_a_stop_string_cuts_the_greedy_text(client: openai.OpenAI, folder: Path) -> None:
    text = expected(folder, 40)
    stop = text[6:9]
    answer = client.completions.create(model="llama", prompt=PROMPT, max_tokens=40, temperature=0, stop=stop)
    assert answer.choices[0].text == text[: text.index(stop)] and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens < 40


def test_the_greedy_token_has_the_highest_log_probability(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="llama",
        prompt=PROMPT,
        max_tokens=8,
        temperature=0,
        logprobs=3,
        extra_body={"return_tokens_as_token_ids": True},
    )
    scores = answer.choices[0].logprobs
    assert scores is not None and scores.token_logprobs is not None and scores.top_logprobs is not None
    for chosen, top in zip(scores.token_logprobs, scores.top_logprobs, strict=True):
        assert chosen == max(top.values()) and len(top) == 3


def test_a_client_that_disconnects_frees_its_sequences(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
    for name in ("penstock_running_rows", "penstock_requests_in_flight", "penstock_kv_blocks"):
        server.wait_for_metric(name, 0)

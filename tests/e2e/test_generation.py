"""A real server with a small Llama continues texts as transformers does, for OpenAI's client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

from penstock.engine.client import EngineClient
from penstock.inputs.tokenizer import Tokenizer
from tests.e2e.server import Server, serving
from tests.writing import write_model

pytestmark = pytest.mark.skipif(not hasattr(EngineClient, "generate"), reason="this engine does not generate")
PROMPT = "the water was"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("llama"))
    tokenizer = Tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.highest_id + 4,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.token_id("<|im_end|>"),
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(str(folder), "--device", "cpu", "--threads", "1", "--served-model-name", "llama") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def expected(folder: Path, count: int) -> str:
    tokenizer = Tokenizer(folder)
    ids = torch.tensor([tokenizer.encode([PROMPT])[0].tolist()])
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    new = model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(new.tolist(), skip_special_tokens=True)


def test_greedy_text_is_that_of_transformers_whole_and_streamed(client: openai.OpenAI, folder: Path) -> None:
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


def test_seeds_give_the_same_copies_and_different_ones(client: openai.OpenAI) -> None:
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


def test_the_greedy_token_is_the_likeliest(client: openai.OpenAI) -> None:
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
        assert chosen == max(top.values()) and len(top) == 3  # greedy: the chosen one is the first of three


def test_a_client_that_leaves_frees_its_rows(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=server.url) as http:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.iter_bytes()
            next(pieces)
        deadline = time.monotonic() + 10
        while server.metric("penstock_running_rows") or server.metric("penstock_requests_in_flight"):
            assert time.monotonic() < deadline
            time.sleep(0.05)

"""Replays lm_eval's requests and reads the answers as it does. Also runs lm_eval, if installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.inputs.tokenizer import Tokenizer
from tests.e2e.server import Server

CONTEXTS = ["the water was", "Question: what feeds a turbine?\nAnswer:", "see 日本"]
ENDINGS = [" long", " the water", "語のテキスト"]
Scored = tuple[float, bool]


@pytest.fixture(scope="module")
def folder(llama_folder: Path) -> Path:
    return llama_folder


@pytest.fixture(scope="module")
def server(llama_server: Server) -> Server:
    return llama_server


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def send(server: Server, route: str, body: dict[str, Any]) -> Any:
    answer = server.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scoring(prompt: Any) -> dict[str, Any]:
    """The body that lm_eval sends for every kind of log-likelihood."""
    options = {"model": "llama", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    return options | {"prompt": prompt}


def read_scores(answer: Any, contexts: list[int]) -> list[Scored]:
    """Read scores as lm_eval's `parse_logprobs` does. The last token was generated and does not count."""
    out = []
    for choice, begin in zip(sorted(answer["choices"], key=itemgetter("index")), contexts, strict=True):
        own = choice["logprobs"]["token_logprobs"][begin:-1]
        tops = choice["logprobs"]["top_logprobs"][begin:-1]
        out.append((sum(own), all(x == max(top.values()) for x, top in zip(own, tops, strict=True))))
    return out


@torch.inference_mode()
def expected(model: Any, context: list[int], ending: list[int]) -> Scored:
    likely = model(torch.tensor([context + ending])).logits[0, len(context) - 1 : -1].log_softmax(dim=-1)
    own = likely.gather(1, torch.tensor(ending)[:, None])[:, 0]
    return float(own.sum()), likely.argmax(dim=-1).tolist() == ending


def pairs(model: Any, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Contexts with endings of several tokens; the last ending is the greedy continuation."""
    contexts = [row.tolist() for row in tokenizer.encode(CONTEXTS, add_special_tokens=False)]
    endings = [row.tolist() for row in tokenizer.encode(ENDINGS, add_special_tokens=False)]
    greedy = model.generate(torch.tensor([contexts[0]]), max_new_tokens=3, do_sample=False, min_new_tokens=3)
    return [*zip(contexts, endings, strict=True), (contexts[0], greedy[0, len(contexts[0]) :].tolist())]


@pytest.mark.parametrize("batch", [1, 4])
def test_log_likelihoods_equal_those_of_transformers(
    server: Server, model: Any, tokenizer: Tokenizer, batch: int
) -> None:
    asked = pairs(model, tokenizer)
    wanted = [expected(model, *pair) for pair in asked]
    got: list[Scored] = []
    for at in range(0, len(asked), batch):
        window = asked[at : at + batch]
        answer = send(server, "/v1/completions", scoring([context + ending for context, ending in window]))
        got += read_scores(answer, [len(context) for context, _ in window])
    assert [value for value, _ in got] == pytest.approx([value for value, _ in wanted], abs=1e-3)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted] == [False, False, False, True]


def test_an_end_token_after_the_prompt_does_not_change_its_log_likelihood(
    server: Server, model: Any, tokenizer: Tokenizer
) -> None:
    """lm_eval drops the generated token, which may be the end token; the scores treat it like any other."""
    context, ending = pairs(model, tokenizer)[1]
    end = str(tokenizer.token_id("<|im_end|>"))
    for more in ({}, {"logit_bias": {end: 100.0}}):
        answer = send(server, "/v1/completions", scoring([context + ending]) | more)
        (got,) = read_scores(answer, [len(context)])
        assert got == (pytest.approx(expected(model, context, ending)[0], abs=1e-3), False)
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(context + ending) + 1
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_texts_and_token_ids_have_the_same_scores(server: Server, tokenizer: Tokenizer) -> None:
    """lm_eval sends one text or several with `tokenized_requests=False`."""
    texts = [context + ending for context, ending in zip(CONTEXTS, ENDINGS, strict=True)]
    rows = [row.tolist() for row in tokenizer.encode(texts, add_special_tokens=False)]
    by_ids = read_scores(send(server, "/v1/completions", scoring(rows)), [1, 1, 1])
    assert read_scores(send(server, "/v1/completions", scoring(texts)), [1, 1, 1]) == by_ids
    assert read_scores(send(server, "/v1/completions", scoring(texts[0])), [1]) == by_ids[:1]


def test_generation_ends_at_a_stop_string(server: Server, model: Any, tokenizer: Tokenizer) -> None:
    rows = [row.tolist() for row in tokenizer.encode(CONTEXTS, add_special_tokens=False)]
    body = {
        "prompt": rows,
        "model": "llama",
        "max_tokens": 24,
        "temperature": 0.0,
        "stop": ["\n\n", "<|im_end|>"],
        "seed": 1234,
    }
    whole = _texts(send(server, "/v1/completions", body))
    for row, text in zip(rows, whole, strict=True):
        new = model.generate(torch.tensor([row]), max_new_tokens=24, do_sample=False)[0, len(row) :]
        assert text == tokenizer.decode(new.tolist(), skip_special_tokens=True)
    stop = whole[0][4:7]
    cut = _texts(send(server, "/v1/completions", body | {"stop": [stop]}))
    assert cut == [text.split(stop)[0] for text in whole]


def test_a_chat_request_is_answered(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "2 + 3 ="}],
        "model": "llama",
        "max_tokens": 16,
        "temperature": 0.0,
        "stop": ["\n", "="],
        "seed": 1234,
    }
    (choice,) = send(server, "/v1/chat/completions", body)["choices"]
    assert choice["index"] == 0 and isinstance(choice["message"]["content"], str)
    assert not {"\n", "="} & set(choice["message"]["content"])


def _texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in sorted(answer["choices"], key=itemgetter("index"))]


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install 'lm_eval[api]'"
)
def test_lm_eval_finds_the_log_likelihoods_of_transformers(
    server: Server, folder: Path, model: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tasks = Path(__file__).resolve().parents[2] / "benchmarks" / "lm_eval_tasks"
    own = tmp_path / "tokenizer"  # transformers needs the end token as a plain string
    own.mkdir()
    (own / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    arguments = f"model=llama,base_url={server.url}/v1/completions,tokenizer={own},max_length=250"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--include_path", str(tasks)]
    command += [
        "--model_args",
        f"{arguments},tokenizer_backend=huggingface,num_concurrent=2",
        "--batch_size",
        "4",
    ]
    command += ["--tasks", "penstock_choices,penstock_sums", "--limit", "6", "--log_samples"]
    done = subprocess.run(
        [*command, "--output_path", str(tmp_path)], cwd=tasks, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (choices,) = tmp_path.rglob("samples_penstock_choices_*.jsonl")
    items = [json.loads(line) for line in choices.read_text().splitlines()]
    assert len(items) == 6
    for item in items:
        for (answer,), asked in zip(item["resps"], item["arguments"].values(), strict=True):
            whole = asked["arg_0"] + asked["arg_1"]
            ids, context = (
                tokenizer.encode([text], add_special_tokens=False)[0].tolist()
                for text in (whole, asked["arg_0"])
            )
            wanted = expected(model, ids[: len(context)], ids[len(context) :])
            assert float(answer[0]) == pytest.approx(wanted[0], abs=1e-3)
    (sums,) = tmp_path.rglob("samples_penstock_sums_*.jsonl")
    assert all(isinstance(json.loads(line)["resps"][0][0], str) for line in sums.read_text().splitlines())

"""Bad embedding requests: the status, and the field that the error names."""

from __future__ import annotations

import httpx
import pytest

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
LONG = " ".join(["word"] * 400)

CASES = {
    "empty list": ({"input": []}, "input", "empty"),
    "empty token ids": ({"input": [[]]}, "input", "no tokens"),
    "too many rows": ({"input": ["a"] * 513}, "input", "513"),
    "over-length": ({"input": LONG}, "input", "402 tokens, but the model takes at most 256"),
    "cut to zero": ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
    "cut beyond the limit": ({"input": "a", "truncate_prompt_tokens": 999}, "truncate_prompt_tokens", "256"),
    "token id too large": ({"input": [30522]}, "input", "30522"),
    "token id negative": ({"input": [-1, 5]}, "input", "-1"),
    "token id beyond 32 bits": ({"input": [2**40]}, "input", "32 bits"),
    "negative dimensions": ({"input": "a", "dimensions": -4}, "dimensions", "-4"),
    "zero dimensions": ({"input": "a", "dimensions": 0}, "dimensions", "0"),
    "dimensions above the model's": ({"input": "a", "dimensions": 385}, "dimensions", "384"),
    "dimensions as text": ({"input": "a", "dimensions": "64"}, "dimensions", "int"),
    "input as number": ({"input": 3}, "input", "input"),
    "texts and ids mixed": ({"input": ["a", [1, 2]]}, "input", "input 1"),
    "missing input": ({}, "input", "input"),
    "unknown encoding": ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
    "unknown dtype": ({"input": "a", "embed_dtype": "int4"}, "embed_dtype", "int4"),
    "fractional priority": ({"input": "a", "priority": 0.5}, "priority", "int"),
    "huge priority": ({"input": "a", "priority": 10**9}, "priority", "priority"),
    "negative timeout": ({"input": "a", "timeout": -1}, "timeout", "-1"),
    "unknown prompt": ({"input": "a", "prompt_name": "query"}, "prompt_name", "query"),
    "unknown input type": ({"input": "a", "input_type": "poem"}, "input_type", "poem"),
    "two prompts": ({"input": "a", "prompt": "x", "input_type": "query"}, "input_type", "exclude"),
    "contradiction": ({"input": "a", "normalize": True, "use_activation": False}, "use_activation", "contra"),
    "unknown side": ({"input": "a", "truncation_side": "middle"}, "truncation_side", "middle"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_value_is_a_400_that_names_the_field(http: httpx.Client, name: str) -> None:
    body, param, words = CASES[name]
    response = http.post("/v1/embeddings", json={"model": MODEL, **body})
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["param"] == param
    assert error["type"] == "BadRequestError"
    assert words in error["message"]


RAW = {
    "not JSON": b"{input: nope",
    "empty body": b"",
    "a list": b"[1, 2]",
    "NaN in priority": b'{"input": "a", "priority": NaN}',
    "infinite timeout": b'{"input": "a", "timeout": Infinity}',
    "invalid UTF-8": b'{"input": "\xff\xfe"}',
    "half a surrogate": b'{"input": "\\ud800"}',
    "deep nesting": b'{"input": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("name", RAW)
def test_a_malformed_body_is_a_400(http: httpx.Client, name: str) -> None:
    response = http.post("/v1/embeddings", content=RAW[name])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert "Traceback" not in response.text


def test_an_unknown_model_is_a_404_that_lists_the_served_models(http: httpx.Client) -> None:
    response = http.post("/v1/embeddings", json={"model": "other", "input": "a"})
    assert response.status_code == 404
    assert response.json()["error"]["reason"] == "model_not_found"
    assert MODEL in response.json()["error"]["message"]


def test_an_unknown_route_is_a_404_and_a_wrong_method_a_405(http: httpx.Client) -> None:
    assert http.get("/nothing").status_code == 404
    assert "error" in http.get("/nothing").json()
    assert http.get("/v1/embeddings").status_code == 405
    assert http.post("/v1/models", json={}).status_code == 405


def test_an_instruction_without_a_template_is_a_422(http: httpx.Client) -> None:
    response = http.post("/v1/embeddings", json={"input": "a", "instruction": "find"})
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "instruction"


def test_a_body_of_100_mb_is_a_413_with_or_without_a_content_length(http: httpx.Client) -> None:
    response = http.post("/v1/embeddings", content=b"x" * 100_000_000)
    assert response.status_code == 413
    assert response.json()["error"]["reason"] == "body_too_large"

    def chunks() -> object:
        for _ in range(100):
            yield b"x" * 1_000_000

    try:
        assert http.post("/v1/embeddings", content=chunks()).status_code == 413
    except httpx.WriteError:
        pass  # the server may close the connection after it refuses the body


def test_detokenize_reverses_tokenize(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "hello world", "return_token_strs": True}).json()
    assert answer["tokens"] == [101, 7592, 2088, 102]
    assert answer["token_strs"] == ["[CLS]", "hello", "world", "[SEP]"]
    assert answer["count"] == 4 and answer["max_model_len"] == 256
    back = http.post("/detokenize", json={"tokens": answer["tokens"], "skip_special_tokens": True}).json()
    assert back == {"prompt": "hello world"}
    several = http.post("/tokenize", json={"input": ["a", "b c"]}).json()
    assert [row["count"] for row in several["data"]] == [3, 4]
    texts = http.post("/detokenize", json={"tokens": [[7592], [2088]]}).json()
    assert [row["prompt"] for row in texts["data"]] == ["hello", "world"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "input": "b"}),
        ("/tokenize", {"input": []}),
        ("/detokenize", {"tokens": [99999999]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {"tokens": [[1], 2]}),
    ],
)
def test_the_tokenizer_routes_refuse_bad_values(
    http: httpx.Client, route: str, body: dict[str, object]
) -> None:
    response = http.post(route, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"]


def test_the_server_still_answers_after_every_bad_request(http: httpx.Client) -> None:
    assert http.post("/v1/embeddings", json={"input": "still here"}).status_code == 200

"""Log probabilities in OpenAI's two formats and in vLLM's."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.outputs.logprobs import (
    LOWEST,
    CompletionLogprobs,
    chat_content,
    concat_logprobs,
    prompt_entries,
)

IDS = np.array([[5, 5, 7], [8, 9, 6]], dtype=np.int32)
VALUES = np.array([[-0.1, -0.1, -2.5], [-np.inf, -0.3, -1.0]], dtype=np.float32)


def name(number: int) -> str:
    return {5: "a", 6: "�", 7: "bc", 8: "�", 9: "d"}[number]


def test_a_completion_gets_four_lists() -> None:
    scores = CompletionLogprobs(name)
    lists = concat_logprobs([scores.unscored(7), scores.scored(IDS, VALUES)])
    assert lists["tokens"] == ["bc", "a", "�"] and lists["text_offset"] == [0, 2, 3]
    assert lists["token_logprobs"] == [None, -0.1, LOWEST]  # the digits of a float32
    assert lists["top_logprobs"] == [None, {"a": -0.1, "bc": -2.5}, {"�": -1.0, "d": -0.3}]
    assert scores.scored(IDS[:1], VALUES[:1])["text_offset"] == [4]  # offsets continue over calls


def test_no_tokens_give_empty_lists() -> None:
    none = CompletionLogprobs(name).scored(IDS[:0], VALUES[:0])
    assert set(map(len, none.values())) == {0}


@pytest.mark.parametrize("top", [0, 1, 2])
def test_a_chat_gets_one_object_per_token(top: int) -> None:
    first, second = chat_content(IDS, VALUES, name, lambda number: bytes([number]), top)
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -0.1, [5])
    assert [entry["token"] for entry in first["top_logprobs"]] == ["a", "bc"][:top]
    assert [entry["bytes"] for entry in second["top_logprobs"]] == [[9], [6]][:top]


def test_a_prompt_gets_one_entry_per_token() -> None:
    nothing, first, second = prompt_entries(IDS, VALUES, np.array([1, 40], dtype=np.int32), name)
    assert nothing is None and first is not None and second is not None
    assert first == {
        "5": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
        "7": {"logprob": -2.5, "rank": 2, "decoded_token": "bc"},
    }
    assert [entry["rank"] for entry in second.values()] == [40, 1, 2]

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadValue
from penstock.inputs.truncation import Side, truncate_rows, truncation_limit
from penstock.types import Ints
from tests.checkpoints import WORDS, wordpiece_tokenizer
from tests.helpers import ints

FRAME = (1, 1)
TOKENIZER = wordpiece_tokenizer()


def rows_of(*lengths: int) -> list[Ints]:
    return [ints([101, *range(1, length - 1), 102]) for length in lengths]


def test_rows_within_the_limit_are_not_changed() -> None:
    rows = rows_of(3, 10)
    assert truncate_rows(rows, None, 10, FRAME) is rows


def test_a_row_over_the_limit_is_rejected_with_both_lengths_and_its_index() -> None:
    with pytest.raises(BadValue, match="input 1 has 11 tokens, but the model takes at most 10") as caught:
        truncate_rows(rows_of(3, 11, 12), None, 10, FRAME)
    assert caught.value.param == "input"


def test_truncation_on_the_right_keeps_the_start_and_the_special_tokens() -> None:
    short, cut = truncate_rows(rows_of(3, 8), 5, 10, FRAME, "right")
    assert cut.tolist() == [101, 1, 2, 3, 102]
    assert short.tolist() == [101, 1, 102]


def test_truncation_on_the_left_keeps_the_end_and_the_special_tokens() -> None:
    (cut,) = truncate_rows(rows_of(8), 5, 10, FRAME, "left")
    assert cut.tolist() == [101, 4, 5, 6, 102]


def test_rows_without_special_tokens_are_truncated_at_the_limit() -> None:
    assert truncate_rows([ints(range(8))], 3, 10, (0, 0), "right")[0].tolist() == [0, 1, 2]
    assert truncate_rows([ints(range(8))], 3, 10, (0, 0), "left")[0].tolist() == [5, 6, 7]


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_with_no_room_for_text_gives_a_row_of_that_length(limit: int) -> None:
    (cut,) = truncate_rows(rows_of(8), limit, 10, FRAME)
    assert len(cut) == limit


@pytest.mark.parametrize(("asked", "limit"), [(None, None), (-1, 512), (7, 7), (512, 512)])
def test_the_truncation_limit_follows_the_request(asked: int | None, limit: int | None) -> None:
    assert truncation_limit(asked, 512) == limit


@pytest.mark.parametrize("asked", [0, -2, 513])
def test_a_truncation_limit_out_of_range_is_rejected_with_the_value(asked: int) -> None:
    with pytest.raises(BadValue, match=rf"truncate_prompt_tokens is {asked}.*512") as caught:
        truncation_limit(asked, 512)
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=wordpiece_tokenizer(), cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )


@given(st.lists(st.sampled_from(WORDS), max_size=30), st.integers(3, 20), st.sampled_from(["left", "right"]))
@settings(max_examples=100, deadline=None)
def test_truncation_equals_that_of_transformers(
    reference: Any, words: list[str], limit: int, side: Side
) -> None:
    text = " ".join(words)
    row = ints(TOKENIZER.encode(text).ids)
    (ours,) = truncate_rows([row], limit, 64, FRAME, side)
    reference.truncation_side = side
    theirs = reference(text, truncation=True, max_length=limit)["input_ids"]
    assert ours.tolist() == theirs

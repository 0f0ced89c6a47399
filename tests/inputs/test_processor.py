from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint.pooling import PoolingSpec
from penstock.errors import BadValue, NotPossible
from penstock.inputs.processor import InputOptions, InputProcessor, split_inputs
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import PoolingParams, Request, Task
from tests.checkpoints import wordpiece_tokenizer, wordpiece_vocabulary
from tests.helpers import make_spec

VOCABULARY = len(wordpiece_vocabulary())
RUST = wordpiece_tokenizer()
CLS, SEP = RUST.token_to_id("[CLS]"), RUST.token_to_id("[SEP]")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture
def processor(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(make_spec(vocab_size=VOCABULARY), tokenizer)


def prepare(processor: InputProcessor, inputs: Any, **options: Any) -> Request:
    return processor.prepare("id", inputs, PoolingParams(), InputOptions(**options))


def rows(request: Request) -> list[list[int]]:
    return [row.tolist() for row in np.split(request.token_ids, np.cumsum(request.lengths)[:-1])]


def test_texts_become_one_request_with_a_row_each(processor: InputProcessor) -> None:
    texts = ["the water", "", "people go to the water now"]
    request = prepare(processor, texts)
    assert rows(request) == [RUST.encode(text).ids for text in texts]
    assert request.id == "id"
    assert request.token_ids.dtype == request.lengths.dtype == np.int32
    assert request.skip is None and request.type_ids is None


@pytest.mark.parametrize("inputs", ["the water", ["the water"], ("the water",), np.array(["the water"])])
def test_one_text_may_be_given_bare_or_in_any_sequence(processor: InputProcessor, inputs: Any) -> None:
    assert rows(prepare(processor, inputs)) == [RUST.encode("the water").ids]


def test_special_tokens_may_be_left_out(processor: InputProcessor) -> None:
    (row,) = rows(prepare(processor, "the water", add_special_tokens=False))
    assert row == RUST.encode("the water").ids[1:-1]


def test_a_text_without_tokens_is_rejected_with_its_index(processor: InputProcessor) -> None:
    with pytest.raises(BadValue, match="input 1 has no tokens"):
        prepare(processor, ["the", ""], add_special_tokens=False)


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ((5, 6), [[5, 6]]),
        (np.array([5, 6]), [[5, 6]]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([np.array([5]), [np.int64(6)]], [[5], [6]]),
    ],
)
def test_token_ids_are_not_changed(processor: InputProcessor, inputs: Any, wanted: Any) -> None:
    request = prepare(processor, inputs)
    assert rows(request) == wanted
    assert request.token_ids.dtype == np.int32


@pytest.mark.parametrize("inputs", [[-1], [[5], [VOCABULARY]], [2**31 - 1]])
def test_token_ids_out_of_range_are_rejected_with_the_range(processor: InputProcessor, inputs: Any) -> None:
    with pytest.raises(BadValue, match=rf"token ids are 0 to {VOCABULARY - 1}") as caught:
        prepare(processor, inputs)
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    "inputs",
    [
        [2**31],
        [[5], [2**40]],
        [-(2**40)],
        [10**30],
        np.array([2**32 + 5]),
        [np.array([2**32 + 5])],
        [[np.int64(2**32 + 5)]],
        np.array([2**63 + 5], dtype=np.uint64),
    ],
)
def test_token_ids_beyond_32_bits_are_rejected_and_do_not_wrap(
    processor: InputProcessor, inputs: Any
) -> None:
    with pytest.raises(BadValue, match=r"32 bits|out of range"):
        prepare(processor, inputs)


@pytest.mark.parametrize(
    "inputs",
    [
        ["a", 1],
        ["a", None],
        ["a", ["b"]],
        [1, "a"],
        [[1], "a"],
        [[1, "a"]],
        [[1, 2.0]],
        [1.5],
        [True],
        [[True, False]],
        [None],
        [{}],
        {"a": 1},
        None,
        5,
        b"bytes",
        np.array([1.5]),
        np.array("text"),
        np.array(5),
        [[[1]]],
    ],
)
def test_inputs_of_the_wrong_type_are_rejected(processor: InputProcessor, inputs: Any) -> None:
    with pytest.raises(BadValue) as caught:
        prepare(processor, inputs)
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("inputs", "message"), [([], "empty"), ([[]], "no tokens"), ([[1], []], "no tokens")]
)
def test_empty_inputs_are_rejected(processor: InputProcessor, inputs: Any, message: str) -> None:
    with pytest.raises(BadValue, match=message):
        prepare(processor, inputs)


def test_an_empty_text_is_rejected_if_the_caller_disallows_it() -> None:
    assert split_inputs(["a", ""]) == (["a", ""], [])
    with pytest.raises(BadValue, match="input 1 is an empty text"):
        split_inputs(["a", ""], allow_empty_text=False)


def test_a_text_that_is_not_valid_unicode_is_rejected(processor: InputProcessor) -> None:
    with pytest.raises(BadValue, match="cannot be encoded"):
        prepare(processor, ["fine", "half a \ud83d"])


def test_a_text_over_the_limit_is_rejected_with_both_lengths(processor: InputProcessor) -> None:
    with pytest.raises(BadValue, match="input 1 has 22 tokens, but the model takes at most 16"):
        prepare(processor, ["the", "the " * 20])


@pytest.mark.parametrize(("side", "kept"), [("right", slice(0, 8)), ("left", slice(-8, None))])
def test_a_truncated_text_keeps_its_special_tokens(processor: InputProcessor, side: str, kept: slice) -> None:
    text = "one two can go see the first people now or many"
    (row,) = rows(prepare(processor, text, truncate_prompt_tokens=10, truncation_side=side))
    assert row == [CLS, *RUST.encode(text).ids[1:-1][kept], SEP]


def test_minus_one_truncates_to_the_models_limit(processor: InputProcessor) -> None:
    (row,) = rows(prepare(processor, "the " * 20, truncate_prompt_tokens=-1))
    assert len(row) == 16 and row[-1] == SEP


def test_token_ids_are_truncated_without_regard_to_special_tokens(processor: InputProcessor) -> None:
    ids = list(range(5, 30))
    assert rows(prepare(processor, ids, truncate_prompt_tokens=4)) == [ids[:4]]
    assert rows(prepare(processor, ids, truncate_prompt_tokens=4, truncation_side="left")) == [ids[-4:]]


def test_a_prompt_precedes_every_text_but_no_token_ids(tokenizer: Tokenizer) -> None:
    spec = make_spec(vocab_size=VOCABULARY, prompts={"q": "query: "}, default_prompt_name="q")
    processor = InputProcessor(spec, tokenizer)
    assert rows(prepare(processor, ["the", "water"])) == [
        RUST.encode("query: the").ids,
        RUST.encode("query: water").ids,
    ]
    assert rows(prepare(processor, [7, 8])) == [[7, 8]]


def test_lower_casing_models_get_lower_case_text(tmp_path: Path) -> None:
    wordpiece_tokenizer(lowercase=False).save(str(tmp_path / "tokenizer.json"))
    spec = make_spec(vocab_size=VOCABULARY, lower_case=True)
    processor = InputProcessor(spec, Tokenizer(tmp_path))
    assert rows(prepare(processor, "THE Water", prompt="Query: ")) == [RUST.encode("query: the water").ids]


def excluding(tokenizer: Tokenizer, **changes: Any) -> InputProcessor:
    pooling = PoolingSpec(methods=("mean",), include_prompt=False)
    return InputProcessor(make_spec(vocab_size=VOCABULARY, pooling=pooling, **changes), tokenizer)


def test_a_model_that_leaves_the_prompt_out_skips_it_and_the_tokens_before(
    tokenizer: Tokenizer,
) -> None:
    processor = excluding(tokenizer)
    request = prepare(processor, ["the water", "people"], prompt="search query: ")
    before = RUST.encode("search query: ").ids[:-1]
    assert request.skip is not None and request.skip.tolist() == [len(before)] * 2
    for row in rows(request):
        assert row[: len(before)] == before
    request = prepare(processor, ["the water"], prompt="search query: ", add_special_tokens=False)
    assert request.skip is not None and request.skip.tolist() == [len(before) - 1]


def test_nothing_is_skipped_without_a_prompt_or_with_token_ids(tokenizer: Tokenizer) -> None:
    assert prepare(excluding(tokenizer), ["the"]).skip is None
    with_default = excluding(tokenizer, prompts={"q": "query: "}, default_prompt_name="q")
    assert prepare(with_default, ["the"]).skip is not None
    assert prepare(with_default, [5, 6, 7]).skip is None


def test_at_least_one_token_of_a_row_is_pooled(tokenizer: Tokenizer) -> None:
    request = prepare(excluding(tokenizer), ["the"], prompt="one two three: ", truncate_prompt_tokens=3)
    assert request.skip is not None and request.skip.tolist() == [2]


def test_the_skipped_prompt_is_counted_after_lower_casing(tmp_path: Path) -> None:
    wordpiece_tokenizer(lowercase=False).save(str(tmp_path / "tokenizer.json"))
    processor = excluding(Tokenizer(tmp_path), lower_case=True)
    request = prepare(processor, ["the"], prompt="Searching Query: ")
    assert request.skip is not None
    assert request.skip.tolist() == [len(RUST.encode("searching query: ").ids) - 1]


def test_a_task_that_the_model_lacks_is_not_possible(processor: InputProcessor) -> None:
    with pytest.raises(NotPossible, match="no task 'classify'; its tasks are: embed"):
        processor.prepare("id", "the", PoolingParams(task=Task.CLASSIFY))


@pytest.mark.parametrize("dimensions", [0, -4, 9])
def test_dimensions_beyond_the_models_are_rejected(processor: InputProcessor, dimensions: int) -> None:
    with pytest.raises(BadValue, match=f"dimensions is {dimensions}") as caught:
        processor.prepare("id", "the", PoolingParams(dimensions=dimensions))
    assert caught.value.param == "dimensions"


def test_a_model_whose_smaller_vectors_are_not_slices_takes_only_its_own_size(tokenizer: Tokenizer) -> None:
    why = "smaller vectors need a projection"
    sized = InputProcessor(make_spec(vocab_size=VOCABULARY, why_not_sliced=why), tokenizer)
    assert sized.prepare("id", "the", PoolingParams(dimensions=8)).params.dimensions == 8
    with pytest.raises(NotPossible, match=f"dimensions is 4, but {why}; use 8 or leave it out"):
        sized.prepare("id", "the", PoolingParams(dimensions=4))


@pytest.mark.parametrize("dimensions", [1, 8])
def test_dimensions_up_to_the_models_are_accepted(processor: InputProcessor, dimensions: int) -> None:
    request = processor.prepare("id", "the", PoolingParams(dimensions=dimensions))
    assert request.params.dimensions == dimensions

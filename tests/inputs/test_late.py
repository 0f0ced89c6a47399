"""Rows of late-interaction models, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.checkpoint.dense import DenseSpec
from penstock.checkpoint.late import LateSpec
from penstock.errors import BadValue, ModelLoadError
from penstock.inputs.late import LateInputs, LateRows
from penstock.inputs.processor import InputOptions, InputProcessor
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import PoolingParams, Task
from tests.checkpoints import wordpiece_tokenizer, wordpiece_vocabulary
from tests.helpers import make_spec

RUST = wordpiece_tokenizer()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    RUST.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def late_spec(**changes: Any) -> LateSpec:
    values: dict[str, Any] = {
        "dense": (DenseSpec("", 8, 4, False, "identity"),),
        "query_length": 8,
        "document_length": 7,
        "query_marker": "query",
        "document_marker": "document",
        "dim": 4,
        "expand_to": 8,
        "attend": False,
        "expansion_token": "[MASK]",
        "unknown_token": "[UNK]",
        "skip_words": (",", "."),
    }
    return LateSpec(**(values | changes))


def model(tokenizer: Tokenizer, prompts: dict[str, str] | None = None, **changes: Any) -> InputProcessor:
    spec = make_spec(
        late=late_spec(**changes),
        vocab_size=len(wordpiece_vocabulary()),
        tasks=(Task.TOKEN_EMBED,),
        prompts=prompts or {},
    )
    return InputProcessor(spec, tokenizer)


def inputs(tokenizer: Tokenizer, **changes: Any) -> LateInputs:
    late = model(tokenizer, **changes).late
    assert late is not None
    return late


def words(made: LateRows) -> list[str]:
    return [" ".join(RUST.id_to_token(int(i)) for i in row) for row in made.rows]


def test_queries_are_marked_and_padded_with_mask_tokens(tokenizer: Tokenizer) -> None:
    made = inputs(tokenizer).queries(["the water", " the oil was first, now ", ""])
    assert words(made) == [
        "[CLS] query the water [SEP] [MASK] [MASK] [MASK]",
        "[CLS] query the oil was first , [SEP]",
        "[CLS] query [SEP] [MASK] [MASK] [MASK] [MASK] [MASK]",
    ]
    assert made.key_limits is not None and made.key_limits.tolist() == [5, 8, 3]
    assert made.token_mask is None


def test_attended_mask_tokens_need_no_key_limit(tokenizer: Tokenizer) -> None:
    made = inputs(tokenizer, attend=True).queries(["the water"])
    assert made.key_limits is None and made.lengths.tolist() == [8]


def test_queries_without_expansion_are_only_truncated(tokenizer: Tokenizer) -> None:
    made = inputs(tokenizer, expand_to=None).queries(["the water", "the oil was first, now"])
    assert words(made) == ["[CLS] query the water [SEP]", "[CLS] query the oil was first , [SEP]"]
    assert made.key_limits is None


def test_expansion_may_be_shorter_than_the_query_length(tokenizer: Tokenizer) -> None:
    made = inputs(tokenizer, expand_to=5, query_length=7).queries(
        ["", "oil was first", "the oil was first, now"]
    )
    assert words(made) == [
        "[CLS] query [SEP] [MASK] [MASK]",
        "[CLS] query oil was first [SEP]",
        "[CLS] query the oil was first [SEP]",
    ]
    assert made.key_limits is not None and made.key_limits.tolist() == [3, 6, 7]


def test_the_skip_list_may_apply_to_queries(tokenizer: Tokenizer) -> None:
    made = inputs(tokenizer, skip_queries=True, expand_to=None).queries(["oil, now"])
    assert made.token_mask is not None and made.token_mask.tolist() == [1, 1, 1, 0, 1, 1]


def test_documents_are_marked_truncated_and_masked_by_the_skip_list(tokenizer: Tokenizer) -> None:
    made = inputs(tokenizer).documents(["oil, water.", "the oil was first there now"])
    assert words(made) == [
        "[CLS] document oil , water . [SEP]",
        "[CLS] document the oil was first [SEP]",
    ]
    assert made.token_mask is not None
    assert np.split(made.token_mask, [7])[0].tolist() == [1, 1, 1, 0, 1, 0, 1]
    assert made.token_mask[7:].all()
    assert inputs(tokenizer).documents(["oil"]).token_mask is None


def test_the_caller_may_truncate_documents_to_another_length(tokenizer: Tokenizer) -> None:
    late, text = inputs(tokenizer), "the oil was first there now"
    assert words(late.documents([text], 5)) == ["[CLS] document the oil [SEP]"]
    assert words(late.documents([text], -1)) == ["[CLS] document the oil was first there now [SEP]"]
    with pytest.raises(BadValue, match="use -1, or 1 to 16"):
        late.documents([text], 17)


def test_long_documents_are_rejected_if_the_model_names_no_length(tokenizer: Tokenizer) -> None:
    late = inputs(tokenizer, document_length=None)
    assert late.documents(["oil " * 13]).lengths.tolist() == [16]
    with pytest.raises(BadValue, match="input 1 has 17 tokens, but the model takes at most 16"):
        late.documents(["oil", "oil " * 14])
    assert late.documents(["oil " * 14], -1).lengths.tolist() == [16]


def test_models_without_markers_add_none(tokenizer: Tokenizer) -> None:
    late = inputs(tokenizer, query_marker="", document_marker="", query_length=5, expand_to=5)
    assert words(late.queries(["oil", "the oil was first"])) == [
        "[CLS] oil [SEP] [MASK] [MASK]",
        "[CLS] the oil was [SEP]",
    ]
    assert words(late.documents(["oil"])) == ["[CLS] oil [SEP]"]


def test_prompts_from_the_prompt_table_precede_the_text(tokenizer: Tokenizer) -> None:
    late = model(tokenizer, prompts={"query": "find ", "document": "passage "}).late
    assert late is not None
    assert words(late.queries(["oil"]))[0].startswith("[CLS] query find oil [SEP] [MASK]")
    assert words(late.documents(["oil"])) == ["[CLS] document passage oil [SEP]"]


def test_a_skip_word_that_is_no_token_becomes_the_unknown_token(tokenizer: Tokenizer) -> None:
    made = inputs(tokenizer, skip_words=("nosuchword",)).documents(["oil ☃"])
    assert made.token_mask is not None and made.token_mask.tolist() == [1, 1, 1, 0, 1]
    assert (
        inputs(tokenizer, skip_words=("nosuchword",), unknown_token=None).documents(["☃"]).token_mask is None
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_marker": "[Q] "}, r"marker '\[Q\] ' is not a token"),
        ({"expansion_token": None}, "expands queries with a mask token"),
        ({"expansion_token": "<mask>"}, "expands queries with <mask>"),
    ],
)
def test_the_error_names_a_token_that_the_tokenizer_lacks(
    tokenizer: Tokenizer, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        inputs(tokenizer, **changes)


def test_the_input_type_selects_query_or_document_rows(tokenizer: Tokenizer) -> None:
    processor = model(tokenizer, prompts={"query": "find ", "document": "passage "})
    params = PoolingParams(Task.TOKEN_EMBED)

    def tokens(text: str, **options: Any) -> str:
        request = processor.prepare("id", text, params, InputOptions(**options))
        return " ".join(RUST.id_to_token(int(i)) for i in request.token_ids)

    assert tokens("oil", input_type="query").startswith("[CLS] query find oil [SEP] [MASK]")
    assert tokens("oil", prompt_name="query").startswith("[CLS] query find oil [SEP] [MASK]")
    assert tokens("oil", input_type="search_document") == "[CLS] document passage oil [SEP]"
    assert tokens("oil") == "[CLS] document passage oil [SEP]"
    assert tokens("oil", prompt="now ") == "[CLS] document now oil [SEP]"
    assert tokens("oil", add_special_tokens=False, prompt="") == "oil document"


def test_token_ids_are_not_changed(tokenizer: Tokenizer) -> None:
    request = model(tokenizer).prepare("id", [[5, 6, 7]], PoolingParams(Task.TOKEN_EMBED))
    assert (
        request.token_ids.tolist() == [5, 6, 7] and request.token_mask is None and request.key_limits is None
    )


def test_a_request_carries_key_limits_and_the_token_mask(tokenizer: Tokenizer) -> None:
    processor, params = model(tokenizer), PoolingParams(Task.TOKEN_EMBED)
    query = processor.prepare("q", ["oil"], params, InputOptions(input_type="query"))
    assert query.key_limits is not None and query.key_limits.tolist() == [4]
    document = processor.prepare("d", ["oil, water"], params)
    assert document.token_mask is not None and document.token_mask.tolist() == [1, 1, 1, 0, 1, 1]

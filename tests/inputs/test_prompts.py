from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import BadValue, NotPossible
from penstock.inputs.prompts import choose_adapter, choose_prompt
from tests.helpers import make_spec

PROMPTS = {"query": "query: ", "passage": "passage: ", "empty": ""}
INSTRUCT = {"web": "Instruct: Given a web search query, find passages\nQuery: "}


def test_a_model_without_prompts_adds_none() -> None:
    assert choose_prompt(make_spec()) == ""


def test_the_default_prompt_is_used_when_none_is_named() -> None:
    assert choose_prompt(make_spec(prompts=PROMPTS, default_prompt_name="query")) == "query: "
    assert choose_prompt(make_spec(prompts=PROMPTS)) == ""


@pytest.mark.parametrize(("name", "text"), PROMPTS.items())
def test_a_prompt_is_chosen_by_name(name: str, text: str) -> None:
    spec = make_spec(prompts=PROMPTS, default_prompt_name="query")
    assert choose_prompt(spec, prompt_name=name) == text


def test_an_unknown_prompt_name_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(BadValue, match="'qurey'; it has: empty, passage, query") as caught:
        choose_prompt(make_spec(prompts=PROMPTS), prompt_name="qurey")
    assert caught.value.param == "prompt_name"
    with pytest.raises(BadValue, match="it has none"):
        choose_prompt(make_spec(), prompt_name="query")


@pytest.mark.parametrize("text", ["find: ", ""])
def test_a_prompt_from_the_caller_replaces_the_default(text: str) -> None:
    spec = make_spec(prompts=PROMPTS, default_prompt_name="query")
    assert choose_prompt(spec, prompt=text) == text


def test_an_instruction_replaces_the_one_in_the_models_template() -> None:
    spec = make_spec(prompts=PROMPTS | INSTRUCT)
    assert choose_prompt(spec, instruction=r"Find \1 code") == "Instruct: Find \\1 code\nQuery: "


def test_an_instruction_is_not_possible_without_a_template() -> None:
    with pytest.raises(NotPossible, match="no instruction template") as caught:
        choose_prompt(make_spec(prompts=PROMPTS), instruction="Find code")
    assert caught.value.param == "instruction"


@pytest.mark.parametrize(
    ("prompts", "input_type", "text"),
    [
        (PROMPTS, "query", "query: "),
        (PROMPTS, "search_query", "query: "),
        (PROMPTS, "document", "passage: "),
        (PROMPTS, "search_document", "passage: "),
        ({"search_query": "sq: "}, "query", "sq: "),
        ({"web_search_query": "web: ", "sts_query": "sts: "}, "query", "web: "),
        ({"nl2code_query": "find: ", "nl2code_document": "code: "}, "search_query", "find: "),
        ({"nl2code_query": "find: ", "nl2code_document": "code: "}, "document", "code: "),
        ({"retrieval.passage": "rp: "}, "document", "rp: "),
        ({"Clustering": "c: "}, "clustering", "c: "),
        (PROMPTS, "classification", ""),
        ({}, "query", ""),
    ],
)
def test_an_input_type_selects_the_models_prompt(prompts: dict[str, str], input_type: str, text: str) -> None:
    assert choose_prompt(make_spec(prompts=prompts), input_type=input_type) == text


def test_an_unknown_input_type_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(BadValue, match="use one of query, search_query") as caught:
        choose_prompt(make_spec(prompts=PROMPTS), input_type="qurey")
    assert caught.value.param == "input_type"


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "a", "prompt_name": "query"},
        {"prompt": "", "input_type": "query"},
        {"instruction": "a", "prompt_name": "query"},
    ],
)
def test_only_one_way_of_choosing_a_prompt_may_be_used(given: dict[str, Any]) -> None:
    with pytest.raises(BadValue, match="exclude each other"):
        choose_prompt(make_spec(prompts=PROMPTS), **given)


def test_an_adapter_is_named_or_follows_from_the_prompt() -> None:
    spec = make_spec(
        prompts={"retrieval.query": "q: ", "separation": ""}, adapters=("retrieval.query", "separation")
    )
    assert choose_adapter(spec, "separation", None, None) == 1
    assert choose_adapter(spec, None, "separation", None) == 1
    assert choose_adapter(spec, None, None, "query") == 0
    assert choose_adapter(spec, None, None, "document") == -1
    assert choose_adapter(spec, None, None, None) == -1
    with pytest.raises(BadValue, match=r"adapter .poetry. is unknown; .* retrieval\.query, separation"):
        choose_adapter(spec, "poetry", None, None)
    with pytest.raises(NotPossible, match="has no adapters"):
        choose_adapter(make_spec(prompts={}), "separation", None, None)

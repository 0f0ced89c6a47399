"""Grammars that would make the compiler recurse too deeply are refused before compilation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import BadValue
from penstock.inputs import constraints
from penstock.inputs.grammar_bounds import MAX_CHAIN, MAX_CHARS, MAX_NESTING, MAX_RULES, check_bounds
from penstock.types import Grammar


def rules(names: list[str], gbnf: bool = False) -> str:
    """A chain of rules: each refers to the next."""
    sign = "::=" if gbnf else ":"
    return "\n".join(f"{a} {sign} {b}" for a, b in zip(names, [*names[1:], '"x"'], strict=True))


def arrays(count: int) -> dict[str, Any]:
    defs: dict[str, Any] = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {"type": "string"}}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


CHAIN = ["start", *(f"r{i}" for i in range(2900))]
REFUSED = [
    (Grammar("regex", "a" * (MAX_CHARS + 1)), f"at most {MAX_CHARS}"),
    (Grammar("regex", "a{200000}"), "repeats more than"),
    (Grammar("regex", "a{3," + "9" * 5000 + "}"), "repeats more than"),
    (Grammar("lark", 'start: "a"~1..1000000'), "repeats more than"),
    (Grammar("lark", rules(CHAIN)), f"more than {MAX_CHAIN} rules"),
    (Grammar("lark", "\n".join(reversed(rules(CHAIN).split("\n")))), f"more than {MAX_CHAIN} rules"),
    (Grammar("gbnf", rules(["root", *CHAIN[1:]], gbnf=True)), f"more than {MAX_CHAIN} rules"),
    (Grammar("lark", "\n".join(f'r{i}: "x"' for i in range(MAX_RULES + 1))), f"at most {MAX_RULES}"),
    (Grammar("json", json.dumps(arrays(2000))), f"more than {MAX_CHAIN} definitions"),
    (Grammar("json", json.dumps(nested(MAX_NESTING + 1))), f"more than {MAX_NESTING} levels"),
]


@pytest.mark.parametrize(("grammar", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_grammar_beyond_a_bound_is_refused_and_the_bound_named(grammar: Grammar, words: str) -> None:
    with pytest.raises(BadValue, match=words):
        check_bounds(grammar)


ACCEPTED = [
    Grammar("lark", rules(["start", *(f"r{i}" for i in range(100))])),
    Grammar("lark", 'start: "(" start ")" | other\nother: start "x" | /r1: r2/ // r1: r2'),
    Grammar("lark", "start: " + " | ".join(f'"w{i}"' for i in range(2000))),
    Grammar("gbnf", 'root ::= "(" root ")" | [a-z]{3,5}'),
    Grammar("json", json.dumps(arrays(100))),
    Grammar("json", json.dumps(nested(40))),
    Grammar("json", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}})),
    Grammar("json", json.dumps({"properties": {f"k{i}": {"$ref": "#/$defs/a"} for i in range(3000)}})),
    Grammar("json", json.dumps({"$ref": "https://example.com/other.json", "items": {"$ref": 5}})),
    Grammar("regex", "(a|b){2,1000}"),
]


@pytest.mark.parametrize("grammar", ACCEPTED, ids=[f"{g.kind} {g.text[:20]}" for g in ACCEPTED])
def test_an_ordinary_grammar_is_within_the_bounds(grammar: Grammar) -> None:
    check_bounds(grammar)


def test_a_schema_as_text_that_nests_too_deeply_is_a_bad_value() -> None:
    for levels in (MAX_NESTING + 1, 2000, 100_000):
        for text in ('{"items":' * levels + "{}" + "}" * levels, "[" * levels + "]" * levels):
            with pytest.raises(BadValue):
                constraints.json_schema(text, "guided_json")

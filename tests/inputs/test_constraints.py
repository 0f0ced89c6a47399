"""Masks allow exactly what the grammar allows, for every kind of vocabulary."""

from __future__ import annotations

import json
import random
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BadValue, NotPossible
from penstock.inputs import constraints
from penstock.inputs.constraints import Constraint, GrammarCompiler
from penstock.inputs.grammar_sandbox import GrammarSandbox
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import Grammar
from tests.text_models import KINDS, tokenizer_folder
from tests.waiting import PATIENCE_S

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}


class Model:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        self.vocabulary = self.tokenizer.max_token_id + 8
        self.eos = int(self.tokenizer.special_ids[-1])
        self.file = folder / "tokenizer.json"
        self.constraints = GrammarCompiler(self.file, self.vocabulary, [self.eos])

    def sandbox(self) -> GrammarSandbox:
        return GrammarSandbox(self.file, self.vocabulary, [self.eos])


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != "unigram"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tokenizer_folder(request.param, tmp_path_factory.mktemp("tokenizer")))


def allowed(constraint: Constraint) -> list[int]:
    bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(model: Model, grammar: Grammar, seed: int, most: int = 300) -> str:
    """A random walk through the grammar. If the text may end, it ends with probability one half."""
    draw = random.Random(seed)
    constraint, ids = model.constraints(grammar), []
    for _ in range(most):
        choices = allowed(constraint)
        assert choices, "nothing may come, and the text has not ended"
        assert max(choices) <= model.tokenizer.max_token_id, "a padding token is allowed"
        if choices == [model.eos] or (model.eos in choices and draw.random() < 0.5):
            assert constraint.complete
            constraint.accept(model.eos)
            assert constraint.done
            return model.tokenizer.decode(ids, skip_special_tokens=True)
        inked = [choice for choice in choices if not model.tokenizer.token_text(choice).isspace()]
        token = draw.choice([choice for choice in inked or choices if choice != model.eos])
        constraint.accept(token)
        ids.append(token)
    pytest.fail("the text did not end")


@pytest.mark.parametrize("seed", range(3))
def test_text_generated_under_a_schema_follows_it(model: Model, seed: int) -> None:
    text = walk(model, constraints.json_schema(SCHEMA, "x"), seed)
    value = json.loads(text)
    assert value.keys() == {"name", "count", "kind"}
    assert len(value["name"]) <= 6 and 0 <= value["count"] <= 99 and value["kind"] in ("red", "green")


def test_json_does_not_end_in_endless_white_space(model: Model) -> None:
    constraint, num_spaces = model.constraints(constraints.json_schema(SCHEMA, "x")), 0
    for _ in range(200):  # choose white space whenever it is allowed
        blank = [i for i in allowed(constraint) if model.tokenizer.token_text(i).isspace()]
        if num_spaces and not blank:
            return
        num_spaces += bool(blank)
        constraint.accept((blank or allowed(constraint))[0])
    pytest.fail("white space may come for ever")


@pytest.mark.parametrize("seed", range(3))
def test_text_follows_a_regular_expression_or_a_choice(model: Model, seed: int) -> None:
    expression = r"[A-Z]{2}-\d{3}(é|日){1,2}"
    assert re.fullmatch(expression, walk(model, Grammar("regex", expression), seed))
    options = ["yes", "no", 'a "quoted" one', "日本"]
    assert walk(model, constraints.choice(options, "x"), seed) in options


def test_grammars_are_read_in_lark_and_gbnf(model: Model) -> None:
    lark = Grammar("lark", 'start: "(" start ")" | "x"')
    gbnf = constraints.lark_or_gbnf('root ::= "(" root ")" | "x"')
    assert gbnf.kind == "gbnf"
    with closing(model.sandbox()) as sandbox:
        gbnf = Grammar("lark", sandbox.check(gbnf, PATIENCE_S).lark)
    for grammar in (lark, gbnf):
        text = walk(model, grammar, 5)
        assert text.count("(") == text.count(")") and text.strip("()") == "x"


def test_a_forbidden_token_is_an_error_and_rows_do_not_share_state(model: Model) -> None:
    grammar = constraints.choice(["yes", "no"], "x")
    first, second = model.constraints(grammar), model.constraints(grammar)
    before = allowed(second)
    token = allowed(first)[0]
    first.accept(token)
    assert allowed(second) == before
    wrong = next(i for i in range(model.vocabulary) if i not in before)
    with pytest.raises(BadValue, match=f"token {wrong} does not follow the grammar"):
        second.accept(wrong)


def test_the_mask_has_one_bit_per_token(model: Model) -> None:
    mask = model.constraints(constraints.JSON_OBJECT).mask()
    assert mask.dtype == np.uint32 and len(mask) == -(-model.vocabulary // 32)


BAD = [
    Grammar("regex", "a(b"),
    Grammar("json", '{"type": "wrong"}'),
    Grammar("json", '{"$ref": "#/nowhere"}'),
    Grammar("lark", "start: nothing"),
    Grammar("lark", "no grammar at all ("),
]


@pytest.mark.parametrize("grammar", BAD, ids=[f"{g.kind} {g.text[:20]}" for g in BAD])
def test_a_bad_grammar_is_rejected_with_a_reason(grammar: Grammar, tmp_path: Path) -> None:
    model = Model(tokenizer_folder("byte bpe", tmp_path))
    with pytest.raises(BadValue, match="cannot be used") as caught:
        model.constraints(grammar)
    assert caught.value.status == 400 and len(caught.value.message) < 700


def test_structured_output_needs_a_model_with_an_end_token(tmp_path: Path) -> None:
    folder = tokenizer_folder("byte bpe", tmp_path)
    with pytest.raises(NotPossible, match="needs an end token"):
        GrammarCompiler(folder / "tokenizer.json", 500, [])


def test_without_llguidance_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotPossible, match=r"pip install 'llguidance"):
        constraints.check(Grammar("regex", "never seen before"))

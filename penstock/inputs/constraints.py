"""Structured output: which tokens may come next, so that a text follows a schema, expression or grammar.

Everything is computed on the CPU by llguidance (the `structured` extra). An API process only checks a
grammar; whoever samples makes one `GrammarCompiler` a model and a `Constraint` a row, and asks it for a mask
a step.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadValue, NotPossible
from penstock.types import Grammar

Mask = NDArray[np.uint32]  # [ceil(vocabulary / 32)], bit i % 32 of word i // 32 allows token i
_MOST_TEXT = 256 * 1024  # characters of a grammar


class Constraint:
    """One row's way through its grammar."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self._mask = np.empty(words, dtype=np.int32)

    def mask(self) -> Mask:
        """The tokens that may come next. The array is overwritten by the next call."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        return self._mask.view(np.uint32)

    def accept(self, token: int) -> None:
        """The token that came; one that the mask forbids is an error."""
        if not self._matcher.consume_token(int(token)):
            raise BadValue(f"token {token} does not follow the grammar: {self._matcher.get_error()}")

    @property
    def done(self) -> bool:
        """Whether nothing but the end may come."""
        return bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadValue(f"the grammar cannot be followed: {self._matcher.get_error()}")


class GrammarCompiler:
    """A model's vocabulary, laid out for the search of allowed tokens."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        library = _library()
        if not eos_token_ids:
            raise NotPossible("structured output needs a token that ends a text, and the model names none")
        self._library = library
        self._words = (vocab_size + 31) // 32
        self._tokenizer = library.LLTokenizer(
            str(tokenizer_file), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )

    def __call__(self, grammar: Grammar) -> Constraint:
        return self.compile(grammar)()

    def compile(self, grammar: Grammar) -> Callable[[], Constraint]:
        """What gives each row its own way. Takes a while for a large grammar; may be called on any thread."""
        check_length(grammar)
        matcher = self._library.LLMatcher(self._tokenizer, _source(grammar), log_level=0)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return lambda: Constraint(matcher.deep_copy(), self._words)


def check(grammar: Grammar) -> None:
    """Refuse what cannot be compiled, without a vocabulary; for the process that talks to the client."""
    check_length(grammar)
    if message := _problem(grammar):
        raise _refused(grammar, message)


def check_length(grammar: Grammar) -> None:
    if len(grammar.text) > _MOST_TEXT:
        raise BadValue(f"the grammar has {len(grammar.text)} characters; at most {_MOST_TEXT} are taken")


@lru_cache(maxsize=256)
def _problem(grammar: Grammar) -> str:
    """Why it cannot be compiled; empty if it can. A large schema takes a while, so answers are kept."""
    message = str(_library().LLMatcher.validate_grammar(_source(grammar), None))
    return "" if message.startswith("WARNING") else message


_NAMES = {"json": "JSON schema", "regex": "regular expression", "lark": "grammar"}


def _refused(grammar: Grammar, message: str) -> BadValue:
    said = " ".join(message.split())[:500]
    return BadValue(f"the {_NAMES[grammar.kind]} cannot be used: {said}")


@lru_cache(maxsize=256)
def _source(grammar: Grammar) -> str:
    matcher = _library().LLMatcher
    if grammar.kind == "json":
        return str(matcher.grammar_from_json_schema(grammar.text))
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    return str(matcher.grammar_from_lark(grammar.text))


def _library() -> Any:
    if importlib.util.find_spec("llguidance") is None:
        raise NotPossible(
            "structured output needs llguidance on the server: pip install 'penstock[structured]'"
        )
    import llguidance

    return llguidance


def json_schema(schema: Any, name: str) -> Grammar:
    """A schema as an object, or as the JSON text of one."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise BadValue(f"{name} is not valid JSON: {error}", param=name) from None
    if not isinstance(schema, dict | bool):
        raise BadValue(f"{name} must be a JSON schema, not {type(schema).__name__}", param=name)
    return Grammar("json", json.dumps(schema))


JSON_OBJECT = Grammar("json", '{"type": "object"}')


def choice(options: Sequence[str], name: str) -> Grammar:
    """One of these texts, word for word."""
    if not options or not all(options):
        raise BadValue(f"{name} needs at least one text, and none that is empty", param=name)
    return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in options))


def written(text: str, name: str) -> Grammar:
    """A grammar in Lark's notation, or in GBNF, which has `::=`."""
    if "::=" not in text:
        return Grammar("lark", text)
    _library()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return Grammar("lark", any_to_lark(text))
    except Exception as error:  # whatever the converter stumbles over is the grammar's fault
        raise BadValue(f"{name} cannot be read as GBNF: {error}", param=name) from None

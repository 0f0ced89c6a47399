"""Structured output: masks of the tokens that a JSON schema, regular expression or grammar allows next.

llguidance (the `structured` extra) computes them on the CPU. An API process only checks grammars. The engine
has one `GrammarCompiler` per model and one `Constraint` per row, and asks it for a mask in each step.
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
_MAX_GRAMMAR_CHARS = 256 * 1024


class Constraint:
    """The grammar state of one row."""

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher = matcher
        self._mask = np.empty(num_words, dtype=np.int32)

    def mask(self) -> Mask:
        """The tokens that may come next. The next call overwrites the array."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        return self._mask.view(np.uint32)

    def accept(self, token: int) -> None:
        """Advance by a sampled token. A token that the mask forbids is an error."""
        if not self._matcher.consume_token(int(token)):
            raise BadValue(f"token {token} does not follow the grammar: {self._matcher.get_error()}")

    @property
    def done(self) -> bool:
        """Whether only an end token may come next."""
        return bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadValue(f"the grammar cannot be followed: {self._matcher.get_error()}")


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        library = _library()
        if not eos_token_ids:
            raise NotPossible("structured output needs an end token, but the model's files name none")
        self._library = library
        self._num_words = (vocab_size + 31) // 32
        self._tokenizer = library.LLTokenizer(
            str(tokenizer_file), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )

    def __call__(self, grammar: Grammar) -> Constraint:
        return self.compile(grammar)()

    def compile(self, grammar: Grammar) -> Callable[[], Constraint]:
        """A factory of one `Constraint` per row. Slow for a large grammar; may be called on any thread."""
        check_length(grammar)
        matcher = self._library.LLMatcher(self._tokenizer, _source(grammar), log_level=0)
        if matcher.is_error():
            raise _rejected(grammar, matcher.get_error())
        return lambda: Constraint(matcher.deep_copy(), self._num_words)


def check(grammar: Grammar) -> None:
    """Reject a grammar that cannot be compiled. Needs no vocabulary, so API processes can call it."""
    check_length(grammar)
    if message := _compile_error(grammar):
        raise _rejected(grammar, message)


def check_length(grammar: Grammar) -> None:
    if len(grammar.text) > _MAX_GRAMMAR_CHARS:
        raise BadValue(f"the grammar has {len(grammar.text)} characters; use at most {_MAX_GRAMMAR_CHARS}")


@lru_cache(maxsize=256)
def _compile_error(grammar: Grammar) -> str:
    """Why the grammar cannot be compiled; empty if it can. Cached, because a large schema is slow to
    check."""
    message = str(_library().LLMatcher.validate_grammar(_source(grammar), None))
    return "" if message.startswith("WARNING") else message


_NAMES = {"json": "JSON schema", "regex": "regular expression", "lark": "grammar"}


def _rejected(grammar: Grammar, message: str) -> BadValue:
    reason = " ".join(message.split())[:500]
    return BadValue(f"the {_NAMES[grammar.kind]} cannot be used: {reason}")


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
        raise NotPossible("structured output needs llguidance on the server: pip install 'llguidance>=1.0'")
    import llguidance

    return llguidance


def json_schema(schema: Any, name: str) -> Grammar:
    """The grammar of a JSON schema, given as an object or as JSON text."""
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
    """A grammar that accepts exactly one of these texts."""
    if not options or not all(options):
        raise BadValue(f"{name} needs at least one text and no empty ones", param=name)
    return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in options))


def lark_or_gbnf(text: str, name: str) -> Grammar:
    """A grammar in Lark notation, or in GBNF, which is recognised by its `::=`."""
    if "::=" not in text:
        return Grammar("lark", text)
    _library()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return Grammar("lark", any_to_lark(text))
    except Exception as error:  # the converter raises any exception on a bad grammar
        raise BadValue(f"{name} cannot be read as GBNF: {error}", param=name) from None

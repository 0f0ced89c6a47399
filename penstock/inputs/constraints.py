"""Structured output: masks of the tokens that a JSON schema, regular expression or grammar allows next.

llguidance (the `structured` extra) computes them on the CPU, only in the engine. An API process checks the
bounds of a grammar (`grammar_bounds`) and never compiles one. The engine has one `GrammarCompiler` per model
and one `Constraint` per row, which computes a mask in each step.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadValue, NotPossible
from penstock.inputs.grammar_bounds import MAX_CHOICES, check_bounds, check_length, check_nesting
from penstock.types import Grammar

Mask = NDArray[np.uint32]  # [ceil(vocabulary / 32)], bit i % 32 of word i // 32 allows token i


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
        """Return a factory that creates a `Constraint` for each row.

        Slow for large grammars; may be called on any thread.
        """
        matcher = self._library.LLMatcher(self._tokenizer, source(grammar), log_level=0)
        if matcher.is_error():
            raise rejected(grammar, matcher.get_error())
        return lambda: Constraint(matcher.deep_copy(), self._num_words)


def check(grammar: Grammar) -> None:
    """Reject a grammar that exceeds the bounds, without compiling it."""
    _require_library()
    check_bounds(grammar)


# Some models repeat white space in JSON until `max_tokens`. This limit leaves room for indentation.
_JSON_DEFAULTS = {"whitespace_pattern": r"[ \n\r\t]{0,40}"}
_NAMES = {"json": "JSON schema", "regex": "regular expression", "lark": "grammar", "gbnf": "grammar"}


def rejected(grammar: Grammar, message: str) -> BadValue:
    reason = " ".join(message.split())[:500]
    return BadValue(f"the {_NAMES[grammar.kind]} cannot be used: {reason}")


def source(grammar: Grammar) -> str:
    """Convert the grammar to the form that the library compiles."""
    matcher = _library().LLMatcher
    if grammar.kind == "json":
        return str(matcher.grammar_from_json_schema(grammar.text, defaults=_JSON_DEFAULTS))
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind == "gbnf":
        raise ValueError("the sandbox turns GBNF into Lark notation")
    return str(matcher.grammar_from_lark(grammar.text))


def _require_library() -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise NotPossible("structured output needs llguidance on the server: pip install 'llguidance>=1.0'")


def _library() -> Any:
    _require_library()
    import llguidance

    return llguidance


def json_schema(schema: Any, name: str) -> Grammar:
    """The grammar of a JSON schema, given as an object or as JSON text."""
    if isinstance(schema, str):
        check_length(schema)
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise BadValue(f"{name} is not valid JSON: {error}", param=name) from None
        except RecursionError:
            raise BadValue(f"{name} nests too deeply", param=name) from None
    if not isinstance(schema, dict | bool):
        raise BadValue(f"{name} must be a JSON schema, not {type(schema).__name__}", param=name)
    check_nesting(schema)
    return Grammar("json", json.dumps(schema))


JSON_OBJECT = Grammar("json", '{"type": "object"}')


def choice(options: Sequence[str], name: str) -> Grammar:
    """A grammar that accepts exactly one of these texts."""
    if not options or not all(options):
        raise BadValue(f"{name} needs at least one text and no empty ones", param=name)
    if len(options) > MAX_CHOICES:
        raise BadValue(f"{name} has {len(options)} texts; give at most {MAX_CHOICES}", param=name)
    return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in options))


def lark_or_gbnf(text: str) -> Grammar:
    """A grammar in Lark notation, or in GBNF, which is recognised by its `::=`."""
    return Grammar("gbnf" if "::=" in text else "lark", text)

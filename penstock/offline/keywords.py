"""Keyword parameters that several methods of `Engine` and `AsyncEngine` share.

Each set is declared once as a `TypedDict`. Type checkers read `Unpack[…]`. `@explicit_signature` writes the
same names into the method's signature, so that `help()`, editors and the documentation list them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack, get_args, get_type_hints

from penstock.errors import BadValue
from penstock.inputs.pair_options import PairOptions
from penstock.inputs.processor import InputOptions
from penstock.inputs.truncation import Side

F = TypeVar("F", bound=Callable[..., Any])


class InputKeywords(TypedDict, total=False):
    """How rows are made from texts: the fields of `InputOptions`."""

    prompt_name: str | None  # one of the model's prompts
    prompt: str | None  # text put before each input
    instruction: str | None  # filled into the model's instruction template
    input_type: str | None  # "query" or "document"
    adapter: str | None  # a loaded LoRA adapter, or one of the model's own task adapters
    truncate_prompt_tokens: int | None  # -1: cut at the model's limit; None: longer inputs are errors
    truncation_side: Side
    add_special_tokens: bool
    cache_salt: str  # cached prefixes are shared only between calls with the same salt


class PairKeywords(TypedDict, total=False):
    """How query–document pairs become rows: the fields of `PairOptions`."""

    instruction: str | None
    max_tokens_per_query: int | None
    max_tokens_per_doc: int | None
    truncate_prompt_tokens: int | None
    truncation_side: Side
    cache_salt: str


_DEFAULTS: dict[type, Any] = {InputKeywords: InputOptions(), PairKeywords: PairOptions()}


def input_options(keywords: InputKeywords) -> InputOptions:
    _refuse_unknown(keywords, InputKeywords)
    return InputOptions(**keywords)


def pair_options(keywords: PairKeywords) -> PairOptions:
    _refuse_unknown(keywords, PairKeywords)
    return PairOptions(**keywords)


def _refuse_unknown(keywords: Any, known: type) -> None:
    for name in keywords:
        if name not in known.__annotations__:
            raise BadValue(
                f"unknown option {name!r}; use {', '.join(sorted(known.__annotations__))}", param=name
            )


def explicit_signature(method: F) -> F:
    """Replace `**options: Unpack[Keywords]` in the method's signature with the keywords themselves."""
    signature = inspect.signature(method)
    *parameters, last = signature.parameters.values()
    (keywords,) = get_args(get_type_hints(method, include_extras=True)[last.name])
    for name, annotation in keywords.__annotations__.items():
        default = getattr(_DEFAULTS[keywords], name)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


__all__ = ["InputKeywords", "PairKeywords", "Unpack", "explicit_signature", "input_options", "pair_options"]

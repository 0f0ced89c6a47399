"""Bounds of a grammar that need no compiler, so that an API process can refuse it with a clear reason.

They bound the recursion of the compiler: nesting, and chains of rules or `$ref`. Grammars within the bounds
are still compiled in a separate process first (`grammar_sandbox`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from penstock.errors import BadValue
from penstock.types import Grammar

MAX_CHARS = 256 * 1024
MAX_NESTING = 100  # levels of a JSON schema
MAX_CHAIN = 200  # rules or definitions that lead to each other
MAX_RULES = 4000  # rules of a grammar, definitions of a schema
MAX_CHOICES = 10_000
MAX_REPEATS = 100_000  # bound of a counted repetition {n,m}
_MAX_NODES = 200_000  # values of a schema, each counted once for every definition that contains it

_COUNTED = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
# Comments, strings and expressions, which may contain text that looks like a rule.
_LITERAL = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_][A-Za-z_0-9-]*)[^\n:]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9-]*")


@lru_cache(maxsize=16)  # a request is checked before tokenising, and again when its job is created
def check_bounds(grammar: Grammar) -> None:
    """Raise `BadValue` for a grammar that is too long, nests too deeply or has too many rules."""
    check_length(grammar.text)
    if grammar.kind == "json":
        _check_schema(json.loads(grammar.text))
        return
    for counts in _COUNTED.findall(grammar.text):
        if any(len(count) > 9 or int(count) > MAX_REPEATS for count in counts if count):
            raise BadValue(f"the grammar repeats more than {MAX_REPEATS} times; use a smaller count")
    if grammar.kind in ("lark", "gbnf"):
        _check_rules(grammar.text)


def check_length(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise BadValue(f"the grammar has {len(text)} characters; use at most {MAX_CHARS}")


def check_nesting(schema: Any) -> None:
    """Raise `BadValue` for a schema that nests too deeply for recursive functions."""
    level, depth = [schema], 0
    while level:
        if depth > MAX_NESTING:
            raise BadValue(f"the JSON schema nests more than {MAX_NESTING} levels deep; use fewer")
        level = [inner for value in level for inner in _inner(value) if isinstance(inner, dict | list)]
        depth += 1


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_schema(schema: Any) -> None:
    check_nesting(schema)
    num_nodes = 0

    def references(pointer: str) -> list[str]:
        nonlocal num_nodes
        found = list(_references(schema if pointer == "#" else _resolve(schema, pointer), pointer == "#"))
        num_nodes += 1 + sum(size for _, size in found)
        if num_nodes > _MAX_NODES:
            raise BadValue(f"the JSON schema refers to more than {_MAX_NODES} values; use a simpler one")
        return [target for target, _ in found if target]

    _check_chains(["#"], references, "definitions of the JSON schema")


def _references(schema: Any, is_root: bool) -> Iterator[tuple[str, int]]:
    """Targets of `$ref`, each with the number of values since the previous one; the last target is empty."""
    pending, size = [schema], 0
    while pending:
        value = pending.pop()
        size += 1
        if isinstance(value, dict):
            target = value.get("$ref")
            if isinstance(target, str):
                yield target, size
                size = 0
            pending += [
                inner
                for name, inner in value.items()
                if not (is_root and value is schema and name in ("$defs", "definitions"))
            ]
        elif isinstance(value, list):
            pending += value
    yield "", size


def _resolve(schema: Any, pointer: str) -> Any:
    """What a local `$ref` points to; None for anything else."""
    if not pointer.startswith("#/"):
        return None
    value = schema
    for part in unquote(pointer[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isascii() and name.isdecimal() and len(name) < 7:
            value = value[int(name)] if int(name) < len(value) else None
        else:
            return None
    return value


def _check_rules(text: str) -> None:
    plain = _LITERAL.sub(" ", text)
    found = list(_RULE.finditer(plain))
    ends = [*(match.start() for match in found[1:]), len(plain)][: len(found)]
    bodies: dict[str, list[str]] = {}
    for match, end in zip(found, ends, strict=True):
        names = _NAME.findall(plain, match.end(), end)
        bodies.setdefault(match[1], []).extend(dict.fromkeys(names))
    if len(bodies) > MAX_RULES:
        raise BadValue(f"the grammar has {len(bodies)} rules; use at most {MAX_RULES}")
    _check_chains(bodies, lambda rule: bodies.get(rule, []), "rules of the grammar")


def _check_chains(roots: Iterable[str], following: Callable[[str], list[str]], noun: str) -> None:
    """Limit the number of names, and the longest chain of names that refer to each other."""
    lengths: dict[str, int] = {}  # longest chain from each name; 0 while it is being walked
    for root in roots:
        stack = [] if root in lengths else [(root, iter(following(root)))]
        lengths.setdefault(root, 0)
        while stack:
            name, others = stack[-1]
            other = next(others, None)
            if other is None:
                stack.pop()
                if stack:
                    above = stack[-1][0]
                    lengths[above] = max(lengths[above], lengths[name] + 1)
            elif other not in lengths:
                lengths[other] = 0
                stack.append((other, iter(following(other))))
            else:
                lengths[name] = max(lengths[name], lengths[other] + 1)
            if len(lengths) > MAX_RULES:
                raise BadValue(f"there are more than {MAX_RULES} {noun}; use fewer")
            if lengths[name] > MAX_CHAIN or len(stack) > MAX_CHAIN:
                raise BadValue(f"more than {MAX_CHAIN} {noun} refer to each other in a chain; use fewer")

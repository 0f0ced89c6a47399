"""Read types, defaults and field comments from classes, for tables of their fields."""

from __future__ import annotations

import ast
import enum
import inspect
import io
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Literal, TypeVar, Union

import msgspec

_REQUIRED = "required"


@dataclass(frozen=True)
class Field:
    name: str
    type: str
    default: str  # as Python source, or "required"
    comment: str  # the comment beside or above it in the source


def fields_of(cls: type) -> list[Field]:
    """The fields of a dataclass, a named tuple or a msgspec struct, base classes first."""
    hints = typing.get_type_hints(cls)
    comments = _comments(cls)
    return [
        Field(name, type_name(hints[name]), default, comments.get(name, ""))
        for name, default in _defaults(cls)
    ]


def _defaults(cls: type) -> Iterator[tuple[str, str]]:
    if issubclass(cls, tuple):
        for name in cls._fields:  # type: ignore[attr-defined]
            yield name, _default(cls._field_defaults.get(name, MISSING), MISSING, MISSING)  # type: ignore[attr-defined]
    elif issubclass(cls, msgspec.Struct):
        for field in msgspec.structs.fields(cls):
            yield field.encode_name, _default(field.default, field.default_factory, msgspec.NODEFAULT)
    else:
        for each in dataclass_fields(cls):
            yield each.name, _default(each.default, each.default_factory, MISSING)


def _default(value: Any, factory: Any, absent: Any) -> str:
    if value is not absent:
        return _literal(value)
    return _REQUIRED if factory is absent else _literal(factory())


def _literal(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return repr(value.value)
    if isinstance(value, msgspec.Struct):
        return f"{type(value).__name__}()"
    return repr(value)


def type_name(hint: Any) -> str:
    """A readable type name: aliases are expanded, enumerations show their values."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "None"
    if hint is Ellipsis:
        return "..."
    if isinstance(hint, TypeVar | str):
        return str(hint)
    if isinstance(hint, Sequence):  # the arguments of a callable
        return f"[{', '.join(map(type_name, hint))}]"
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " | ".join(map(type_name, arguments))
    if _is_array(hint, origin):
        return "ndarray"
    if origin is not None:
        return f"{_short(origin)}[{', '.join(map(type_name, arguments))}]"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " | ".join(repr(member.value) for member in hint)
    return _short(hint)


def _is_array(hint: Any, origin: Any) -> bool:
    return getattr(origin or hint, "__name__", "") == "ndarray"


def _short(hint: Any) -> str:
    return getattr(hint, "__name__", None) or str(hint).removeprefix("typing.")


def _comments(cls: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            found |= _own_comments(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return found


def _own_comments(source: str) -> dict[str, str]:
    """The comment at the end of each field's line, or the comment lines directly above it."""
    source = textwrap.dedent(source)
    comments = {
        token.start[0]: (token.string.lstrip("# ").strip(), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    tree = ast.parse(source).body[0]
    if not isinstance(tree, ast.ClassDef):
        return {}
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        beside = [
            comments[line][0] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments
        ]
        above: list[str] = []
        line = node.lineno - 1
        while line in comments and comments[line][1]:
            above.insert(0, comments[line][0])
            line -= 1
        if text := " ".join(above + beside):
            found[node.target.id] = text
    return found


def signature(function: Any, name: str, aliases: dict[Any, str]) -> str:
    """`def name(...)`, with one parameter per line if it is long.

    Annotations are expanded, except those in `aliases`, which appear under their names.
    """
    hints = _hints(function)

    def shown(hint: Any) -> str:
        names = [alias for kind, alias in aliases.items() if kind == hint]
        return names[0] if names else type_name(hint)

    parts: list[str] = []
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    star = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        star = star or each.kind is each.VAR_POSITIONAL
        default = "" if each.default is each.empty else f" = {_literal(each.default)}"
        kind = f": {shown(hints[each.name])}" if each.name in hints else ""
        parts.append(f"{prefix}{each.name}{kind}{default}")
    returned = f" -> {shown(hints['return'])}" if "return" in hints else ""
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    word = "async def" if is_async else "def"
    line = f"{word} {name}({', '.join(parts)}){returned}"
    if len(line) <= 88:
        return line
    return f"{word} {name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def _hints(function: Any) -> dict[str, Any]:
    """Annotations by parameter. Those of an explicit `__signature__` are resolved in the module that has
    them."""
    hints = typing.get_type_hints(function)
    for each in inspect.signature(function).parameters.values():
        hint = each.annotation
        if each.name in hints or hint is each.empty:
            continue
        module = sys.modules[getattr(hint, "__forward_module__", None) or function.__module__]
        text = getattr(hint, "__forward_arg__", hint)
        hints[each.name] = eval(text, dict(vars(module))) if isinstance(text, str) else hint
    return hints

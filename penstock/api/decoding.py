"""Decodes the body of a request into its type.

A body that matches its type exactly is decoded once. Otherwise unknown fields and nulls of optional fields
are removed and the rest is decoded again. Only what is still wrong is an error.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import inspect

from penstock.api.fields import Refused
from penstock.api.nesting import check_nesting
from penstock.api.routes import Variant
from penstock.errors import MAX_MESSAGE_CHARS, BadValue, MalformedBody, shortened

Names = dict[str, None]  # an ordered set
MAX_IGNORED, MAX_IGNORED_CHARS = 32, 256  # limits of reported names
UNDECODABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
_NULL = msgspec.Raw(b"null")
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(slots=True)
class Decoded:
    """A body, the fields that were ignored, and the variant that it belongs to, if any."""

    body: Any
    ignored: tuple[str, ...] = ()
    variant: Variant | None = None


class RouteDecoder:
    """Decodes the bodies of one route: its own kind, and those of its variants."""

    def __init__(
        self, body: type[msgspec.Struct], variants: Sequence[Variant] = (), *, strict_fields: bool = False
    ) -> None:
        self._own = BodyDecoder(body, strict_fields=strict_fields)
        self._decode_exact = self._own.decode_exact
        self._variants = [(each, BodyDecoder(each.body, strict_fields=strict_fields)) for each in variants]

    def variant(self, raw: bytes | bytearray) -> Variant | None:
        """The variant that claims a body that does not match the route's own type."""
        found = self._claiming(raw)
        return None if found is None else found[0]

    def decode(self, raw: bytes | bytearray) -> Decoded:
        try:
            return Decoded(self.decode_exact(raw))
        except msgspec.ValidationError as error:
            return self.decode_tolerantly(raw, error)

    def decode_exact(self, raw: bytes | bytearray) -> Any:
        """Decode a body of the route's own type. Raises msgspec's ValidationError for any other body."""
        check_nesting(raw)
        try:
            return self._decode_exact(raw)
        except msgspec.ValidationError:
            raise
        except UNDECODABLE as error:
            raise _not_json(error) from None

    def decode_tolerantly(self, raw: bytes | bytearray, error: msgspec.ValidationError) -> Decoded:
        """Decode a body of a variant, or one with unknown fields or nulls. `error` is the mismatch."""
        if (claimed := self._claiming(raw) if self._variants else None) is None:
            return self._own.decode_tolerantly(raw, error)
        variant, decoder = claimed
        decoded = decoder.decode(raw)
        decoded.variant = variant
        return decoded

    def _claiming(self, raw: bytes | bytearray) -> tuple[Variant, BodyDecoder] | None:
        try:
            fields = _RAW_FIELDS.decode(raw)
        except UNDECODABLE:
            return None
        return next((each for each in self._variants if each[0].accepts(fields)), None)


class BodyDecoder:
    """Decodes one type of body."""

    def __init__(self, body: type[msgspec.Struct], *, strict_fields: bool) -> None:
        self._body = body
        self._decode = msgspec.json.Decoder(body).decode
        self._refused = refused_fields(body)
        self._strict_fields = strict_fields
        self.decode_exact = self._decode if self._refused is None else self._decode_checked

    def _decode_checked(self, raw: bytes | bytearray) -> Any:
        body = self._decode(raw)
        if self._refused is not None:
            self._refused.check(body)
        return body

    def decode(self, raw: bytes | bytearray) -> Decoded:
        try:
            return Decoded(self.decode_exact(raw))
        except msgspec.ValidationError as error:
            return self.decode_tolerantly(raw, error)
        except UNDECODABLE as error:
            raise _not_json(error) from None

    def decode_tolerantly(self, raw: bytes | bytearray, error: msgspec.ValidationError) -> Decoded:
        """Decode without unknown fields and nulls. `error` is the mismatch that was found first."""
        found: Names = {}
        try:
            tidied = _tidied_struct(msgspec.Raw(raw), self._type, "", found)
        except UNDECODABLE:
            raise self._wrong(error) from None
        ignored = tuple(found)
        if self._strict_fields and ignored:
            raise MalformedBody(
                f"the body has an unknown field `{ignored[0]}`; this server runs with --strict-fields",
                param=ignored[0].partition(".")[0],
            )
        try:
            return Decoded(self.decode_exact(bytes(tidied)), ignored)
        except msgspec.ValidationError as remaining:
            raise self._wrong(remaining) from None
        except UNDECODABLE as undecodable:  # validation stopped before it reached these bytes
            raise _not_json(undecodable) from None

    @cached_property
    def _type(self) -> inspect.StructType:
        kind = inspect.type_info(self._body)
        assert isinstance(kind, inspect.StructType)
        return kind

    def _wrong(self, error: msgspec.ValidationError) -> MalformedBody:
        message, param = explain(str(error), self._body)
        return MalformedBody(message, param=param)


def _not_json(error: Exception) -> MalformedBody:
    return MalformedBody(f"the body is not valid JSON: {error}")


def _tidied(raw: msgspec.Raw, kind: inspect.Type, path: str, ignored: Names) -> msgspec.Raw:
    """Remove fields that the type does not have, and nulls that mean a default."""
    start = bytes(memoryview(raw)[:1])
    try:
        if start == b"{" and (struct := _find(kind, inspect.StructType)) is not None:
            return _tidied_struct(raw, struct, path, ignored)
        if start == b"[" and (listed := _find(kind, inspect.ListType)) is not None:
            if _find(listed.item_type, inspect.StructType) is None:
                return raw
            items = [_tidied(item, listed.item_type, path, ignored) for item in _RAW_ITEMS.decode(raw)]
            return msgspec.Raw(msgspec.json.encode(items))
    except UNDECODABLE:
        pass
    return raw


def _tidied_struct(raw: msgspec.Raw, struct: inspect.StructType, path: str, ignored: Names) -> msgspec.Raw:
    fields = {each.encode_name: each for each in struct.fields}
    kept: dict[str, msgspec.Raw] = {}
    for name, value in _RAW_FIELDS.decode(raw).items():
        known = fields.get(name)
        if known is None:
            if len(ignored) < MAX_IGNORED:
                ignored[path + name[:MAX_IGNORED_CHARS]] = None
        elif known.required or value != _NULL:
            kept[name] = _tidied(value, known.type, f"{path}{name}.", ignored)
    return msgspec.Raw(msgspec.json.encode(kept))


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [found for part in kind.types for found in _alternatives(part)]
    return [kind]


T = typing.TypeVar("T", bound=inspect.Type)


def _find(kind: inspect.Type, wanted: type[T]) -> T | None:
    return next((each for each in _alternatives(kind) if isinstance(each, wanted)), None)


# --- refused fields -----------------------------------------------------------------------------------------


class RefusedFields:
    """The fields of a body for which only defaults, and the values in `accepts`, are accepted."""

    def __init__(self, fields: Mapping[str, tuple[Any, Refused]]) -> None:
        self._fields = fields
        self._values = attrgetter(*fields)
        defaults = tuple(default for default, _ in fields.values())
        self._defaults = defaults if len(defaults) > 1 else defaults[0]

    def check(self, body: Any) -> None:
        if self._values(body) == self._defaults:
            return
        for name, (default, refused) in self._fields.items():
            value = getattr(body, name)
            if value != default and value not in refused.accepts:
                raise BadValue(f"{name} is not supported: {refused.reason}", param=name)


def refused_fields(body: type[msgspec.Struct]) -> RefusedFields | None:
    found: dict[str, tuple[Any, Refused]] = {}
    hints = typing.get_type_hints(body, include_extras=True)
    for each in msgspec.structs.fields(body):
        for note in getattr(hints[each.name], "__metadata__", ()):
            if isinstance(note, Refused):
                found[each.name] = (each.default, note)
    return RefusedFields(found) if found else None


# --- messages -----------------------------------------------------------------------------------------------

_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_MISSING = re.compile(r"missing required field `(.*?)`")
_PART = re.compile(r"\.?([^.\[\]]+)|\[[^\]]*\]")


def explain(text: str, body: type[msgspec.Struct] | None = None) -> tuple[str, str | None]:
    """The decoder's message as (message, field). Adds the accepted values to an error about a choice."""
    text = shortened(text, MAX_MESSAGE_CHARS)  # the message quotes values
    before, found_place, place = text.rpartition(" - at `$")  # the last one: a value may contain these words
    message = before if found_place else text
    field_name = place.removesuffix("`").removeprefix(".") if found_place else ""
    is_choice = body is not None and field_name and message.startswith("Invalid enum value")
    if is_choice and body is not None and (accepted := _choices(body, field_name)):
        message = f"{message}; use {_listed(accepted)}"
    for pattern in (_UNKNOWN, _MISSING):
        if found := pattern.search(text):
            field_name = f"{field_name}.{found.group(1)}".strip(".")
    if not field_name:
        return message, None
    name = re.split(r"[\[.]", field_name)[0]
    return (message if f"`{name}`" in message else f"{field_name}: {message}"), name


def _listed(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"


def _choices(body: type[msgspec.Struct], path: str) -> list[str]:
    """The values that the field at `path` accepts, if these are a fixed set."""
    kinds: list[inspect.Type] = [inspect.type_info(body)]
    for part in _PART.finditer(path):
        kinds = [found for kind in kinds for found in _inside(kind, part.group(1))]
    values: list[Any] = []
    for kind in kinds:
        for each in _alternatives(kind):
            if isinstance(each, inspect.LiteralType):
                values += each.values
            elif isinstance(each, inspect.EnumType):
                values += [member.value for member in each.cls]
    return [str(value) for value in dict.fromkeys(values) if value is not None]


def _inside(kind: inspect.Type, name: str | None) -> list[inspect.Type]:
    """The type of a named field, or of the items of a list or the values of a mapping."""
    found: list[inspect.Type] = []
    for each in _alternatives(kind):
        if name is not None and isinstance(each, inspect.StructType):
            found += [known.type for known in each.fields if known.encode_name == name]
        elif name is None and isinstance(each, inspect.ListType | inspect.VarTupleType | inspect.SetType):
            found.append(each.item_type)
        elif name is None and isinstance(each, inspect.DictType):
            found.append(each.value_type)
    return found

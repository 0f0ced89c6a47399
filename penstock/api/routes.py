"""The table of routes: what a dialect declares about each of its paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from penstock.api.error_styles import OPENAI_ERRORS, ErrorStyle

Handler = Callable[..., Awaitable[Any]]  # (call) or (call, body) → Reply | Streamed
Door = Literal["public", "admin", "both"]
Claims = Callable[[Mapping[str, msgspec.Raw]], bool]


@dataclass(frozen=True, slots=True)
class Variant:
    """Another kind of body on a path that has one already.

    It is considered only if the path's own body type does not accept a request. So its marker must be a field
    that the path's own body does not have.
    """

    markers: tuple[str, ...]  # one of these fields is present
    body: type[msgspec.Struct]
    handler: Handler
    dialect: str
    errors: ErrorStyle = OPENAI_ERRORS
    answer: Any = None
    example: Mapping[str, Any] | None = None
    claims: Claims | None = None  # decides by the fields of the body, where markers do not suffice
    media: tuple[str, ...] = ()  # as in RouteSpec

    def accepts(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        if self.claims is not None:
            return self.claims(fields)
        return any(marker in fields for marker in self.markers)


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One row of the table of routes."""

    path: str  # a part such as {model} takes the rest of the path, up to what follows it
    body: type[msgspec.Struct] | None  # None: GET
    handler: Handler
    dialect: str
    answer: Any = None  # type of the 200 answer in JSON, for the OpenAPI schema; None: not JSON
    errors: ErrorStyle = OPENAI_ERRORS
    example: Mapping[str, Any] | None = None  # a body that works with a fitting model
    open_to_all: bool = False  # needs no API key
    admin: bool = False  # needs an admin key
    on: Door = "public"  # the port, if there is an --admin-port; admin routes are on that port
    methods: tuple[str, ...] | None = None  # None: POST with a body, GET and HEAD without
    variants: tuple[Variant, ...] = ()  # other kinds of body on the same path
    # Content types of the 200 answer besides JSON. If empty, a body with `stream` implies text/event-stream,
    # and a body whose `encoding_format` accepts "bytes" implies application/octet-stream.
    media: tuple[str, ...] = ()
    is_listed: bool = True  # in the OpenAPI document; False: a file of a page, or a route that only refuses
    path_example: str | None = None  # value of the path's parameter; not needed for `model`
    form: type[msgspec.Struct] | None = None  # an upload: the fields of its form; the handler reads the body
    query: type[msgspec.Struct] | None = None  # parameters of the URL, for the OpenAPI schema

    @property
    def is_public(self) -> bool:
        """Whether the public port serves it even if there is an admin port."""
        return self.on != "admin" and not self.admin

    @property
    def is_for_operators(self) -> bool:
        """Whether the admin port serves it."""
        return self.on != "public" or self.admin

    @property
    def counts_as_request(self) -> bool:
        """Whether it counts towards the requests in flight."""
        return self.body is not None

    @property
    def all_methods(self) -> tuple[str, ...]:
        return self.methods or (("GET", "HEAD") if self.body is None else ("POST",))

    @property
    def prefix(self) -> str | None:
        """The path before its parameter; None if it has none."""
        return self.path.partition("{")[0] if "{" in self.path else None

    @property
    def suffix(self) -> str:
        """The part of the path after its parameter."""
        return self.path.partition("}")[2]


VariantTable = tuple[tuple[str, Variant], ...]  # (path, variant)

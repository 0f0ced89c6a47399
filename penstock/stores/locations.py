"""Locations of collections: the URLs of `--to` and `penstock migrate`, also shown without secrets."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from penstock.errors import BadValue, shown

GRAMMAR = {
    "lancedb": "lancedb:PATH/TABLE",
    "qdrant": "qdrant:http://HOST:PORT/COLLECTION or qdrant:PATH/COLLECTION",
    "pgvector": "pgvector:postgresql://USER@HOST:PORT/DATABASE?table=TABLE",
    "opensearch": "opensearch:http://HOST:PORT/INDEX",
}
_OPTIONS = {
    "lancedb": ("metric", "id", "vector"),
    "qdrant": ("metric", "vector"),
    "pgvector": ("metric", "id", "vector", "index", "table"),
    "opensearch": ("metric", "vector"),
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SECRETS = frozenset({"password", "api_key", "api-key", "token", "sslpassword", "passfile"})


class Metric(enum.StrEnum):
    """How vectors are compared."""

    COSINE = "cosine"
    DOT = "dot"
    L2 = "l2"
    HAMMING = "hamming"


@dataclass(frozen=True)
class Location:
    kind: str
    address: str = field(repr=False)  # address of the store, including secrets
    collection: str
    options: dict[str, str]
    shown: str  # the URL without secrets

    @property
    def metric(self) -> Metric | None:
        """The metric in the URL, if any."""
        return Metric(self.options["metric"]) if "metric" in self.options else None

    @property
    def is_remote(self) -> bool:
        return "://" in self.address

    def beside(self, collection: str) -> Location:
        """Return the location of another collection in the same store."""
        options = {**self.options, "table": collection} if "table" in self.options else self.options
        return Location(
            self.kind, self.address, collection, options, _renamed(self.shown, self.collection, collection)
        )


def parse(url: str) -> Location:
    kind, colon, rest = url.partition(":")
    if not colon or kind not in GRAMMAR:
        raise BadValue(
            f"{shown(hide_secrets(url))} names no vector store; write " + ", ".join(GRAMMAR.values()),
            param="--to",
        )
    if not rest:
        raise _bad(kind, "it is empty")
    if kind == "pgvector":
        return _postgres(rest)
    body, _, query = rest.partition("?")
    options = _options(kind, dict(parse_qsl(query, keep_blank_values=True)))
    address, slash, collection = body.rpartition("/")
    if not collection or not slash or not address or address.endswith((":/", "//")):
        raise _bad(kind, "it needs a store and the name of a collection")
    _check_name(kind, collection)
    if kind == "opensearch" and not address.startswith(("http://", "https://")):
        raise _bad(kind, "it needs http:// or https://")
    return Location(kind, address, collection, options, hide_secrets(f"{kind}:{rest}"))


def _postgres(rest: str) -> Location:
    parts = urlsplit(rest)
    if parts.scheme not in ("postgresql", "postgres"):
        raise _bad("pgvector", "it needs postgresql://")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    ours = _options("pgvector", {name: value for name, value in pairs if name in _OPTIONS["pgvector"]})
    table = ours.get("table", "")
    if not table:
        raise _bad("pgvector", "it names no table")
    for name in table.split(".", 1):
        _check_name("pgvector", name)
    others = urlencode([(name, value) for name, value in pairs if name not in _OPTIONS["pgvector"]])
    address = _joined(parts._replace(query=others))
    if ours.get("index", "none") not in ("none", "hnsw"):
        raise _bad("pgvector", f"index is {shown(ours['index'])}; use hnsw or none")
    return Location("pgvector", address, table, ours, hide_secrets(f"pgvector:{rest}"))


def _options(kind: str, given: dict[str, str]) -> dict[str, str]:
    known = _OPTIONS[kind]
    if unknown := [name for name in given if name not in known]:
        raise _bad(kind, f"{shown(unknown[0])} is no option; it takes {', '.join(known)}")
    if (metric := given.get("metric")) is not None and metric not in list(Metric):
        raise _bad(kind, f"metric is {shown(metric)}; use {', '.join(Metric)}")
    for name in ("id", "vector"):
        if name in given:
            _check_name(kind, given[name])
    return given


def _check_name(kind: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise _bad(kind, f"{shown(name)} is no name; use letters, digits, _, - and .")


def _bad(kind: str, why: str) -> BadValue:
    return BadValue(f"the URL of a {kind} store is {GRAMMAR[kind]}; {why}", param="--to")


def hide_secrets(url: str) -> str:
    """Remove passwords from a URL, for messages and records."""
    kind, colon, rest = url.partition(":")
    if "://" not in rest:
        return url
    parts = urlsplit(rest)
    host = parts.netloc.rpartition("@")
    user = host[0].partition(":")[0]
    netloc = f"{user}@{host[2]}" if host[1] else parts.netloc
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = urlencode([(name, value) for name, value in pairs if name not in _SECRETS], safe="/.:")
    return f"{kind}{colon}{_joined(parts._replace(netloc=netloc, query=query))}"


def _joined(parts: SplitResult) -> str:
    """Join the parts of a URL. `geturl` would drop the slashes before an empty host."""
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{parts.query}" if parts.query else "")


def credentials(address: str) -> tuple[str, str | None, str | None]:
    """Split an http address into the address without credentials, the user and the password."""
    parts: SplitResult = urlsplit(address)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return address, None, None
    name, _, password = user.partition(":")
    return _joined(parts._replace(netloc=host)), unquote(name), unquote(password)


def _renamed(shown_url: str, before: str, after: str) -> str:
    head, found, tail = shown_url.rpartition(quote(before))
    return head + quote(after) + tail if found else shown_url

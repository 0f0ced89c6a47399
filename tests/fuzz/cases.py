"""Seeded requests that try to break a server: mutated bodies, odd HTTP, and bytes that are not HTTP at all.

Bodies are derived from the server's own OpenAPI schema, so that new routes and fields are covered without a
change here. A case depends only on (seed, server, number), so each can be repeated on its own.
"""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Json = Any
Rng = random.Random


@dataclass(frozen=True, slots=True)
class Case:
    """One request, as the bytes that are sent over the socket."""

    name: str  # the kind of mutation
    route: str
    raw: bytes
    method: str = "POST"
    is_complete: bool = True  # an incomplete request is abandoned and needs no reply


WORDS = ("water", "time", "people", "word", "long", "find", "oil", "the")
TEXT = "the long water"

ADAPTER = "tenant"  # the adapter's name on the server that has one

# Valid bodies for routes whose schema does not say which fields belong together.
EXAMPLES: dict[str, Json] = {
    "/score": {"queries": TEXT, "documents": ["water", "oil"]},
    "/v1/score": {"text_1": TEXT, "text_2": ["water", "oil"]},
    "/similarity": {"inputs": {"source_sentence": TEXT, "sentences": ["water", "oil"]}},
    "/v1/maxsim": {"queries": [[[0.5, 0.25], [1, 0]]], "documents": [[[1.0, 0.0]], [[0, 1], [1, 1]]]},
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
}

# Values that most models accept, so that a case passes the first checks.
ACCEPTED: dict[str, tuple[Json, ...]] = {
    "truncate_prompt_tokens": (-1, 8),
    "truncation_side": ("left",),
    "dimensions": (8,),
    "encoding_format": ("base64", "bytes"),
    "embed_dtype": ("float16", "int8", "binary"),
    "normalize": (True, False),
    "use_activation": (True, False),
    "chunking": ("mean", "late"),
    "add_special_tokens": (False,),
    "priority": (-1, 5),
    "timeout": (30, 60.5),
    "request_id": ("mine", "größer"),
    "user": ("someone",),
    "cache_salt": ("salt",),
    "adapter": (ADAPTER,),
    "input_type": ("query", "document"),
    "top_n": (1, 100),
    "top_k": (1, 5),
    "min_weight": (0.25,),
    "return_documents": (True,),
    "return_text": (True,),
    "stream": (True,),
    "n": (2,),
    "stop": (["water"],),
}

NUMBERS: tuple[Json, ...] = (
    -1,
    0,
    1,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    2**64 - 1,
    2**64,
    -(2**64),
    10**40,
    0.5,
    -0.0,
    1e-308,
    5e-324,
    1e308,
    -1e308,
)
STRINGS = (
    "",
    " ",
    "\x00",
    "a\x00b",
    "\r\nx-injected: 1",
    "\x1b[31m\x07\x7f",
    "\u202e\u2066",
    "\ufffe\uffff",
    "\U0010ffff",
    "e\u0301" * 40,
    "👩‍👩‍👧" * 10,
    "日本語",
    "[MASK][CLS]<|im_end|>",
    "{{ 7 * 7 }}{% raw %}",
    "../../etc/passwd",
    "%s%n%x",
    "null",
    "NaN",
    "-1",
    "0x10",
)
# Written into the JSON verbatim; most are not valid JSON.
TOKENS = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e400",
    b"-1e400",
    b"01",
    b"1.",
    b"0x10",
    b"9" * 400,
    b"9" * 4000,
    b"9" * 20000,
    b"1" + b"0" * 300 + b".5",
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b'"\\ud83d\\ude00\\ud83d"',
    b'"\\u0000"',
    b'"\xff\xfe"',
    b'"\xed\xa0\x80"',
    b'"\x01"',
    b'"unfinished',
    b"True",
    b"undefined",
    b"",
)


class Schema:
    """The OpenAPI document of a server: its routes, and values for their bodies."""

    def __init__(self, document: Json) -> None:
        self.document = document
        self.paths: list[str] = list(document["paths"])
        self.posts = [
            path for path in self.paths if self._content(path) is not None and self._has_fields(path)
        ]

    def _has_fields(self, path: str) -> bool:
        return all(body.get("properties") for body in self.bodies(path))

    def _content(self, path: str) -> Json:
        """The JSON content of a POST to the path; None if the route takes no JSON."""
        body = self.document["paths"][path].get("post", {}).get("requestBody", {})
        return body.get("content", {}).get("application/json")

    def resolve(self, schema: Json) -> Json:
        while "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        return schema

    def bodies(self, path: str) -> list[Json]:
        """Schemas of the bodies that a route accepts."""
        schema = self._content(path)["schema"]
        return [self.resolve(each) for each in schema.get("anyOf", [schema])]

    def example(self, path: str, body: Json) -> dict[str, Json]:
        """A small body that the route accepts, unless the model lacks the task."""
        shown = self._content(path).get("examples", {}).get(body.get("title"))
        known = EXAMPLES.get(path, {} if shown is None else shown["value"])
        missing = {name: self.plausible(body["properties"][name]) for name in body.get("required", [])}
        return {**missing, **{name: value for name, value in known.items() if name in body["properties"]}}

    def plausible(self, schema: Json, rng: Rng | None = None) -> Json:
        """A value of the schema's type, random with `rng` and the simplest one without."""
        schema = self.resolve(schema)
        kinds = schema.get("anyOf") or schema.get("oneOf")
        if kinds:
            return self.plausible(rng.choice(kinds) if rng else kinds[0], rng)
        if "enum" in schema:
            return rng.choice(schema["enum"]) if rng else schema["enum"][0]
        kind = schema.get("type")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "integer":
            return rng.choice((1, 2, 3, 7, 16, 100)) if rng else 1
        if kind == "number":
            return rng.choice((0.1, 0.5, 1.0, 2)) if rng else 0.5
        if kind == "boolean":
            return rng.random() < 0.5 if rng else False
        if kind == "string":
            return " ".join(rng.choices(WORDS, k=rng.randint(1, 6))) if rng else TEXT
        if kind == "array":
            items = schema.get("prefixItems") or [schema.get("items") or {"type": "string"}]
            num_items = rng.randint(1, 3) if rng and "prefixItems" not in schema else len(items)
            return [self.plausible(items[at % len(items)], rng) for at in range(num_items)]
        if kind == "object":
            own = schema.get("properties", {})
            names = schema.get("required", list(own) if rng else [])
            return {name: self.plausible(own[name], rng) for name in names}
        return None if kind == "null" else TEXT

    def holding(
        self, schema: Json, value: Json, kinds: tuple[str, ...] = ("integer", "number")
    ) -> list[Json]:
        """Values of the schema with `value` at one place of a type in `kinds`; one for each such place."""
        schema = self.resolve(schema)
        if several := schema.get("anyOf") or schema.get("oneOf"):
            return [found for each in several for found in self.holding(each, value, kinds)]
        kind = schema.get("type")
        if kind in kinds and "enum" not in schema:
            return [value]
        if kind == "array":
            if fixed := schema.get("prefixItems"):
                rest = [self.plausible(each) for each in fixed]
                return [
                    [*rest[:at], found, *rest[at + 1 :]]
                    for at, each in enumerate(fixed)
                    for found in self.holding(each, value, kinds)
                ]
            return [[found] for found in self.holding(schema.get("items") or {}, value, kinds)]
        if kind == "object":
            own, base = schema.get("properties", {}), self.plausible(schema)
            inside = [
                {**base, name: found}
                for name, each in own.items()
                for found in self.holding(each, value, kinds)
            ]
            other = schema.get("additionalProperties")
            if isinstance(other, dict) and other:
                inside += [{"1": found} for found in self.holding(other, value, kinds)]
            return inside
        return []


def numeric_bodies(schema: Schema, path: str, value: Json) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield the name of every field that can hold a number, with a body in which the field holds `value`."""
    for body in schema.bodies(path):
        example = schema.example(path, body)
        for name, field in body["properties"].items():
            for found in schema.holding(field, value):
                yield name, {**example, name: found}


def make_case(schema: Schema, seed: int, server: str, number: int) -> Case:
    """The case with this number. Equal arguments give equal bytes."""
    rng = random.Random(f"{seed}/{server}/{number}")
    (kind,) = rng.choices(tuple(_KINDS), tuple(_KINDS.values()))
    return kind(schema, rng)


class _Splices:
    """Pieces that are not valid JSON, inserted into JSON."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def put(self, piece: bytes) -> str:
        self._pieces.append(piece)
        return f"@splice{len(self._pieces) - 1}@"

    def encode(self, body: Json) -> bytes:
        raw = json.dumps(body).encode()
        for at, piece in enumerate(self._pieces):
            raw = raw.replace(b'"@splice%d@"' % at, piece)
        return raw


def _http(
    path: str,
    body: bytes = b"",
    *,
    method: str = "POST",
    headers: list[tuple[bytes, bytes]] | None = None,
    length: bytes | None = None,
    version: bytes = b"HTTP/1.1",
) -> bytes:
    given = [(b"host", b"localhost"), (b"content-type", b"application/json")] if headers is None else headers
    size = [(b"content-length", str(len(body)).encode() if length is None else length)]
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in [*given, *size])
    return (
        b"%s %s %s\r\n" % (method.encode(), path.encode("latin-1", "replace"), version)
        + lines
        + b"\r\n"
        + body
    )


def _pick(schema: Schema, rng: Rng) -> tuple[str, Json, dict[str, Json]]:
    """A random route, the schema of one of its bodies, and an accepted body with a few optional fields."""
    path = rng.choice(schema.posts)
    body = rng.choice(schema.bodies(path))
    example = schema.example(path, body)
    known = [name for name in body["properties"] if name in ACCEPTED]
    for name in rng.sample(known, k=min(len(known), rng.choice((0, 0, 1, 2)))):
        example[name] = rng.choice(ACCEPTED[name])
    return path, body, example


def _valid(schema: Schema, rng: Rng) -> Case:
    """Plausible values in some of the optional fields."""
    path, body, example = _pick(schema, rng)
    for name in rng.sample(
        list(body["properties"]), k=min(len(body["properties"]), rng.choice((0, 0, 1, 2)))
    ):
        if name != "model":
            example[name] = schema.plausible(body["properties"][name], rng)
    return Case("valid", path, _http(path, json.dumps(example).encode()))


def _number(schema: Schema, rng: Rng) -> Case:
    path, body, example = _pick(schema, rng)
    numeric = [name for name, field in body["properties"].items() if schema.holding(field, 0)]
    for name in rng.sample(numeric, k=min(len(numeric), rng.randint(1, 3))):
        example[name] = rng.choice(schema.holding(body["properties"][name], rng.choice(NUMBERS)))
    return Case("number", path, _http(path, json.dumps(example).encode()))


def _any_value(rng: Rng, depth: int = 0) -> Json:
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(STRINGS)
    if kind == 4:
        return rng.choice((None, True, False, [], {}))
    if kind < 7:
        return [_any_value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return {rng.choice((*STRINGS, "text", "role", "content")): _any_value(rng, depth + 1) for _ in range(2)}


def _any_type(schema: Schema, rng: Rng) -> Case:
    path, body, example = _pick(schema, rng)
    for _ in range(rng.randint(1, 3)):
        example[rng.choice(list(body["properties"]))] = _any_value(rng)
    return Case("type", path, _http(path, json.dumps(example).encode()))


def _token(schema: Schema, rng: Rng) -> Case:
    """A number or string that JSON does not allow."""
    path, body, example = _pick(schema, rng)
    splices, name = _Splices(), rng.choice(list(body["properties"]))
    put = splices.put(rng.choice(TOKENS))
    kinds = ("integer", "number", "string")
    example[name] = rng.choice([*schema.holding(body["properties"][name], put, kinds), put])
    return Case("token", path, _http(path, splices.encode(example)))


def _text(schema: Schema, rng: Rng) -> Case:
    """Odd or long text in a field for text."""
    path, body, example = _pick(schema, rng)
    name = rng.choice(list(body["properties"]))
    long = rng.choice(("a", "long ", "\x00", "日本", "👩‍👩‍👧", "\u0301", "{", "[MASK]")) * rng.choice(
        (100, 5000, 20000)
    )
    value = rng.choice((*STRINGS, long, long, long))
    found = schema.holding(body["properties"][name], value, ("string",)) or [value]
    example[name] = rng.choice(found)
    return Case("text", path, _http(path, json.dumps(example).encode()))


def _megabyte(schema: Schema, rng: Rng) -> Case:
    path, body, example = _pick(schema, rng)
    name = rng.choice(list(body["properties"]))
    value = rng.choice(("x", "long water ", "\\", "\x07")) * rng.choice((100_000, 500_000))
    example[name] = rng.choice(
        schema.holding(body["properties"][name], value[:1_000_000], ("string",)) or [value]
    )
    return Case("megabyte", path, _http(path, json.dumps(example).encode()))


def _nesting(schema: Schema, rng: Rng) -> Case:
    path, body, example = _pick(schema, rng)
    splices, levels = _Splices(), rng.choice((100, 260, 900, 1100, 2000, 5000, 50_000))
    opening, closing = rng.choice(
        ((b"[", b"]"), (b'{"a":', b"}"), (b'{"text":', b"}"), (b'[{"content":', b"}]"))
    )
    deep = splices.put(opening * levels + rng.choice((b"1", b'"a"', b"")) + closing * levels)
    name = rng.choice(list(body["properties"]))
    value = rng.choice((deep, [deep], {"text": TEXT, "more": deep}, [{"text": TEXT, "more": deep}]))
    example[rng.choice((name, name, "unknown"))] = value
    return Case("nesting", path, _http(path, splices.encode(example)))


def _rows(schema: Schema, rng: Rng) -> Case:
    """The maximum number of rows, one more, fewer, or none, in any field that takes a list."""
    path, body, example = _pick(schema, rng)
    size = rng.choice((0, 1, 127, 128, 1000, 2048, 2049))
    names = [
        name for name in body["properties"] if schema.holding(body["properties"][name], "a", ("string",))
    ]
    name = rng.choice([*(n for n in names if n in example), *names])
    row = rng.choice(("a", ["a"], [5], 5, {"text": "a"}, "", None))
    example[name] = [row] * size if rng.random() < 0.8 else [row] * (size // 2) + ["a"] * (size // 2)
    return Case("rows", path, _http(path, json.dumps(example).encode()))


def _keys(schema: Schema, rng: Rng) -> Case:
    """Unknown, repeated, odd and missing keys."""
    path, body, example = _pick(schema, rng)
    raw = json.dumps(example).encode()
    choice = rng.randrange(5)
    if choice == 0:
        example[rng.choice(STRINGS) or "x" * 5000] = 1
        raw = json.dumps(example).encode()
    elif choice == 1:
        name = rng.choice(list(body["properties"]))
        raw = (
            b"{"
            + b",".join(
                b'"%s": %s' % (name.encode(), rng.choice((b"1", b'"a"', b"[]", b"null"))) for _ in range(50)
            )
            + b","
            + raw[1:]
        )
    elif choice == 2 and example:
        example.pop(rng.choice(list(example)))
        raw = json.dumps(example).encode()
    elif choice == 3:
        raw = b'{"' + rng.choice((b"\\ud800", b"\\u0000", b"a" * 100_000, b"\xff", b"")) + b'": 1,' + raw[1:]
    else:
        raw = json.dumps({f"field{at}": at for at in range(3000)} | example).encode()
    return Case("keys", path, _http(path, raw))


def _damaged(schema: Schema, rng: Rng) -> Case:
    """A valid body that was cut, extended or changed, or bytes that are not JSON."""
    path, _, example = _pick(schema, rng)
    raw = bytearray(json.dumps(example).encode())
    choice = rng.randrange(6)
    if choice == 0:
        raw = raw[: rng.randrange(len(raw))]
    elif choice == 1:
        for _ in range(rng.randint(1, 8)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    elif choice == 2:
        raw = bytearray(rng.randbytes(rng.choice((1, 10, 1000, 100_000))))
    elif choice == 3:
        raw = bytearray(rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b" " * 100_000)) + raw)
    elif choice == 4:
        raw = raw + bytearray(rng.choice((b"}", b"[]", b"\x00", b" " * 1000, b",", raw)))
    else:
        raw = bytearray(
            rng.choice((b"null", b"[]", b"1", b'"a"', b"", b"{}", b"[" * 100_000, b'{"a":' * 50_000))
        )
    return Case("damaged", path, _http(path, bytes(raw)))


def _headers(schema: Schema, rng: Rng) -> Case:
    path, _, example = _pick(schema, rng)
    odd = rng.choice(
        (
            (b"content-type", b"text/plain"),
            (b"content-type", b"application/x-www-form-urlencoded"),
            (b"content-type", b"multipart/form-data; boundary=x"),
            (b"content-type", b"application/json; charset=utf-16"),
            (b"content-type", b"\xff\xfe"),
            (b"content-encoding", b"gzip"),
            (b"content-encoding", b"identity"),
            (b"accept", b"image/png"),
            (b"accept-encoding", b"gzip, br, zstd"),
            (b"authorization", b"Bearer " + b"x" * 5000),
            (b"authorization", b"Basic \xff\xff"),
            (b"expect", b"100-continue"),
            (b"x-request-id", rng.randbytes(20).replace(b"\r", b"").replace(b"\n", b"").replace(b"\0", b"")),
            (b"x-request-id", b"a" * 6000),
            (b"connection", b"upgrade, close"),
            (b"upgrade", b"websocket"),
            (b"range", b"bytes=0-1"),
            (b"if-none-match", b"*"),
            (b"origin", b"http://evil.example"),
            (b"x-forwarded-for", b"1.2.3.4, " * 100),
            (b"cookie", b"a=b; " * 1000),
            (b"x" * 3000, b"1"),
            (b"bad name", b"1"),
            (b"", b"empty name"),
            (b"x-null", b"a\x00b"),
        )
    )
    headers = [(b"host", b"localhost"), odd] * rng.choice((1, 1, 1, 2))
    if rng.random() < 0.1:
        headers += [(b"x-%d" % at, b"v") for at in range(rng.choice((50, 90)))]
    return Case("headers", path, _http(path, json.dumps(example).encode(), headers=headers))


def _methods(schema: Schema, rng: Rng) -> Case:
    method = rng.choice(("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "POST", "BREW", "post"))
    path = rng.choice((*schema.paths, "/nothing", "*"))
    body = rng.choice((b"", b"{}", b'{"input": "a"}'))
    version = rng.choice((b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0"))
    return Case("method", path, _http(path, body, method=method, version=version), method)


def _paths(schema: Schema, rng: Rng) -> Case:
    path = rng.choice(schema.paths)
    method = rng.choice(("GET", "POST"))
    odd = rng.choice(
        (
            path + "/",
            "/" + path,
            path + "?" + "a=b&" * rng.choice((1, 1000)),
            path + "#x",
            path + "%00",
            path + "/../../etc/passwd",
            path.upper(),
            "/%2e%2e" + path,
            "/" + "a" * 6000,
            "/\xff\xfe",
            "http://localhost" + path,
            path + ";x=1",
        )
    )
    return Case(
        "path", path, _http(odd, b'{"input": "a"}' if method == "POST" else b"", method=method), method
    )


def _wire(schema: Schema, rng: Rng) -> Case:
    """Broken HTTP framing that still needs a reply."""
    path, _, example = _pick(schema, rng)
    body = json.dumps(example).encode()
    host = [(b"host", b"localhost")]
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\n" % path.encode()
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"
    raw = rng.choice(
        (
            _http(path, body, length=str(len(body) - 3).encode()),
            _http(path, body, length=b"-1"),
            _http(path, body, length=b"abc"),
            _http(path, b"", length=b"1000000000000"),
            _http(path, b"", length=b"9" * 30),
            _http(path, body, headers=[*host, (b"content-length", b"3")]),
            _http(path, body, headers=[*host, (b"transfer-encoding", b"chunked")]),
            _http(path, body, headers=[*host, (b"transfer-encoding", b"gzip")]),
            _http(path, body, headers=[]),
            _http(path, body, version=b"HTTP/1.0"),
            _http(path, body, version=b"HTTP/3.7"),
            _http(path, body) * 3,
            chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
            chunked + b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n",
            chunked + b"zz\r\n" + body,
            chunked + b"-1\r\n" + body,
            chunked + b"ffffffffffffffffff\r\n" + body,
            b"\r\n\r\n" + _http(path, body),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(50),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"nonsense\r\n\r\n",
        )
    )
    return Case("wire", path, raw)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, *, is_whole: bool = True) -> bytes:
    """A grey picture, or one with truncated rows."""
    rows = (b"\0" + b"\x7f" * width) * height if is_whole else b"\0"
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def _picture(rng: Rng) -> Json:
    """A reference to an image. About half of them can be decoded."""
    good = _png(rng.randint(1, 40), rng.randint(1, 40))
    file = rng.choice(
        (
            good,
            good,
            good,
            good[: rng.randrange(len(good))],
            good[:40] + rng.randbytes(20) + good[60:],
            _png(1, 5000),
            _png(2**31 - 1, 2**31 - 1, is_whole=False),
            _png(60_000, 60_000, is_whole=False),
            _png(0, 0, is_whole=False),
            b"GIF89a" + rng.randbytes(30),
            b"\xff\xd8\xff\xe0" + rng.randbytes(100),
            b"RIFF\xff\xff\xff\xffWEBPVP8 " + rng.randbytes(50),
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            b"%PDF-1.7",
            b"",
        )
    )
    text = base64.b64encode(file).decode()
    others = (
        "http://127.0.0.1:1/a.png",
        "http://[::1]/a.png",
        "file:///etc/passwd",
        "file-unknown",
        "data:,",
        "data:image/png;base64," + text[:-1],
        rng.choice(STRINGS),
        _any_value(rng),
    )
    return rng.choice((text, f"data:image/png;base64,{text}", f"data:text/html;base64,{text}", *others))


def _image(schema: Schema, rng: Rng) -> Case:
    """Images in the form of each dialect, some of them odd."""
    del schema
    image, other = _picture(rng), _picture(rng)
    url = {"type": "image_url", "image_url": rng.choice(({"url": image}, image))}
    messages = [{"role": "user", "content": [url, {"type": "text", "text": TEXT}]}]
    voyage = [{"type": "image_base64", "image_base64": image}, {"type": "text", "text": TEXT}]
    path, body = rng.choice(
        (
            ("/v1/embeddings", {"input": [{"image": image}, {"text": TEXT}, {"image": other}]}),
            ("/v1/embeddings", {"messages": messages}),
            ("/v1/embeddings", {"input": [{"image": image}] * rng.choice((1, 40, 300))}),
            ("/pooling", {"messages": messages}),
            ("/embeddings", {"input": [image, other], "modality": "image"}),
            ("/v1/multimodalembeddings", {"inputs": [{"content": voyage}]}),
            ("/v2/embed", {"images": [image], "input_type": "image"}),
            ("/v2/embed", {"inputs": [{"content": [url]}], "input_type": "search_document"}),
            ("/rerank", {"query": TEXT, "documents": [{"image": image}, TEXT]}),
            ("/rerank", {"query": {"image": image}, "documents": [{"content": [url]}]}),
            ("/score", {"queries": {"content": [url]}, "documents": [TEXT]}),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 2}),
            ("/api/generate", {"prompt": TEXT, "images": [image], "stream": False}),
        )
    )
    return Case("image", path, _http(path, json.dumps(body).encode()))


def _adapter(schema: Schema, rng: Rng) -> Case:
    """Adapters under every form of name, on every route."""
    path, body, example = _pick(schema, rng)
    names = (ADAPTER, f"{ADAPTER}:query", f"model:{ADAPTER}", f"{ADAPTER}:{ADAPTER}", ":", f"{ADAPTER}:", "")
    for name in ("model", "adapter", "adapter_id"):
        if name in body["properties"] and rng.random() < 0.6:
            example[name] = rng.choice((*names, rng.choice(STRINGS)))
    return Case("adapter", path, _http(path, json.dumps(example).encode()))


def _pipelined(schema: Schema, rng: Rng) -> Case:
    """Several requests in one write. The first answer is judged; the client disconnects during the others."""
    raw = []
    for _ in range(rng.choice((2, 5, 20, 64, 66))):
        path, _, example = _pick(schema, rng)
        expects = [(b"expect", b"100-continue")] if rng.random() < 0.2 else []
        raw.append(
            _http(path, json.dumps(example).encode(), headers=[(b"host", b"localhost"), *expects])
            if rng.random() < 0.8
            else _http(rng.choice(schema.paths), method=rng.choice(("HEAD", "GET", "OPTIONS")))
        )
    path, _, example = _pick(schema, rng)
    first = _http(path, json.dumps(example).encode())
    return Case("pipelined", path, b"".join((first, *raw)))


def _abandoned(schema: Schema, rng: Rng) -> Case:
    """A request that stops in the middle, where the client disconnects."""
    path, _, example = _pick(schema, rng)
    raw = _http(path, json.dumps(example).encode())
    return Case("abandoned", path, raw[: rng.randrange(1, len(raw))], is_complete=False)


def _left(schema: Schema, rng: Rng) -> Case:
    """A complete request whose client disconnects before the answer."""
    path, _, example = _pick(schema, rng)
    return Case("left", path, _http(path, json.dumps(example).encode()), is_complete=False)


_KINDS: dict[Callable[[Schema, Rng], Case], float] = {
    _valid: 14,
    _number: 20,
    _any_type: 14,
    _token: 12,
    _text: 10,
    _megabyte: 0.3,
    _nesting: 8,
    _rows: 2,
    _keys: 6,
    _damaged: 8,
    _headers: 5,
    _methods: 4,
    _paths: 3,
    _wire: 4,
    _image: 4,
    _adapter: 3,
    _pipelined: 2,
    _abandoned: 2,
    _left: 2,
}


def as_case(name: str, path: str, body: bytes) -> Case:
    """A plain HTTP request with this body."""
    return Case(name, path, _http(path, body))

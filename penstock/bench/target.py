"""The target of requests and the bytes to send: address, route, headers, and the whole HTTP message."""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson

from penstock.bench.load.plan import Address
from penstock.bench.options import ServerOptions
from penstock.errors import BadValue


class Target(msgspec.Struct, frozen=True):
    address: Address
    host_header: str
    prefix: str  # path of --base-url, put before every route
    headers: dict[str, str]

    @property
    def base_url(self) -> str:
        scheme = "https" if self.address.tls else "http"
        return f"{scheme}://{self.host_header}{self.prefix}"

    def message(self, method: str, route: str, body: bytes = b"") -> bytes:
        headers = {"Host": self.host_header, "Accept": "*/*", **self.headers}
        if body:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{method} {self.prefix}{route} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def target_of(options: ServerOptions) -> Target:
    url = options.base_url or f"http://{_bracketed(options.host)}:{options.port}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadValue(f"{url!r} is not a URL such as http://127.0.0.1:8000", param="base_url")
    tls = parts.scheme == "https"
    port = port or (443 if tls else 80)
    address = Address(_resolve(parts.hostname, port), port, tls, parts.hostname)
    return Target(address, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), _headers(options.header))


def route_of(options: ServerOptions, default: str) -> str:
    route = options.endpoint or default
    if not route.startswith("/"):
        raise BadValue(f"--endpoint {route!r} must begin with /", param="endpoint")
    return route


def json_object(text: str | None, flag: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadValue(f"{flag} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadValue(f"{flag} must be a JSON object, not {type(value).__name__}")
    return value


def _headers(pairs: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip() or "\n" in pair or "\r" in pair:
            raise BadValue(f"--header {pair!r}: give KEY=VALUE", param="header")
        headers[name.strip()] = value.strip()
    return headers


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _resolve(host: str, port: int) -> str:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadValue(f"host {host!r} cannot be resolved: {error}", param="host") from None
    return str(found[0][4][0])

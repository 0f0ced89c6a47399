"""Fetches an image from a URL whose host the operator allows.

The name is resolved first, and the connection uses a checked address, so the name cannot resolve differently
between check and connection. Private addresses are refused unless the operator names exactly that host.
Blocking: call it on a thread.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from penstock.errors import BadValue
from penstock.inputs.images.decode import ImageLimits

MAX_REDIRECTS = 3
MAX_URL_CHARS = 8192
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_URL_MARKS = "%/:=&?~#+!$,;'@()*[]"  # characters that are not escaped; non-ASCII letters are
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "penstock"}
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Rule(NamedTuple):
    """One entry of --allowed-media-domains."""

    host: str  # "*": every host; "*.example.com": every host below it
    port: int | None  # None: the scheme's default

    @property
    def is_exact(self) -> bool:
        return not self.host.startswith("*")

    def covers(self, host: str) -> bool:
        if self.host == "*":
            return True
        return host == self.host if self.is_exact else host.endswith(self.host[1:])


@dataclass(frozen=True, slots=True)
class MediaDomains:
    """The hosts from which images may be fetched; none unless the operator names some."""

    names: tuple[str, ...] = ()
    timeout_s: float = 10.0  # for one image, redirects included

    def fetch(self, url: str, limits: ImageLimits) -> bytes:
        """Fetch the body of a URL. Raise `BadValue` if it is not allowed, too large or too slow."""
        deadline = time.monotonic() + self.timeout_s
        first = target = _split(url)
        for _ in range(MAX_REDIRECTS + 1):
            addresses = self._resolve(target)
            answer = _get(target, addresses, limits, deadline)
            if isinstance(answer, bytes):
                return answer
            target = _split(urljoin(target.geturl(), answer))
            if target.hostname != first.hostname:
                raise BadValue(f"{_shown(first)} redirects to another host, {target.hostname}")
            if first.scheme == "https" and target.scheme != "https":
                raise BadValue(f"{_shown(first)} redirects to a URL without TLS")
        raise BadValue(f"{_shown(first)} redirects more than {MAX_REDIRECTS} times")

    def _resolve(self, url: SplitResult) -> list[Address]:
        """The addresses of a URL's host. If one of them is not allowed, the URL is refused."""
        host, port = str(url.hostname), _port(url)
        rules = [
            rule
            for rule in map(_rule, self.names)
            if rule.covers(host) and port == (rule.port or _PORTS[url.scheme])
        ]
        if not rules:
            named = ", ".join(self.names) or "none"
            raise BadValue(
                f"images are not fetched from {host}:{port}; --allowed-media-domains names {named}. Send the "
                "image itself, as a data URI"
            )
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise BadValue(f"the host {host} of an image cannot be resolved: {error}") from None
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        private = next((address for address in addresses if not is_public(address)), None)
        if private is not None and not any(rule.is_exact for rule in rules):
            raise BadValue(
                f"the host {host} of an image has the private address {private}; --allowed-media-domains has "
                "to name the host itself to allow that"
            )
        return addresses


def is_public(address: Address) -> bool:
    """Whether an address is public, including an IPv4 address embedded in an IPv6 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner: list[Address | None] = [address.ipv4_mapped, address.sixtofour]
        inner += list(address.teredo or ())
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if any(each is not None and not is_public(each) for each in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast


class _PinnedConnection(http.client.HTTPConnection):
    """Connects to a given address, without resolving the name again."""

    def __init__(self, url: SplitResult, address: Address, timeout_s: float) -> None:
        super().__init__(str(url.hostname), _port(url), timeout=timeout_s)
        self._address = str(address)
        self._is_tls = url.scheme == "https"
        self._open_socket: socket.socket | None = None

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._is_tls:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host)
        self._open_socket = self.sock

    def abort(self) -> None:
        """Abort all reads, from another thread."""
        if self._open_socket is not None:
            with contextlib.suppress(OSError):
                self._open_socket.shutdown(socket.SHUT_RDWR)


def _get(url: SplitResult, addresses: Sequence[Address], limits: ImageLimits, deadline: float) -> bytes | str:
    """The body, or the location of a redirect."""
    error: Exception | None = None
    for address in addresses:
        left_s = _left(url, deadline)
        connection = _PinnedConnection(url, address, left_s)
        # The socket's timeout bounds each read. This bounds all reads together, headers included.
        alarm = threading.Timer(left_s, connection.abort)
        alarm.daemon = True
        alarm.start()
        try:
            return _read(connection, url, limits, deadline)
        except (OSError, http.client.HTTPException, ValueError) as reason:
            error = reason
        finally:
            alarm.cancel()
            connection.close()
    raise BadValue(f"{_shown(url)} cannot be fetched: {error or 'it has no address'}")


def _read(
    connection: _PinnedConnection, url: SplitResult, limits: ImageLimits, deadline: float
) -> bytes | str:
    target = quote((url.path or "/") + (f"?{url.query}" if url.query else ""), safe=_URL_MARKS)
    connection.request("GET", target, headers=_HEADERS)
    response = connection.getresponse()
    if response.status in _REDIRECTS and (location := response.headers.get("Location")):
        return location
    if response.status != 200:
        raise BadValue(f"{_shown(url)} answered with status {response.status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise BadValue(f"{_shown(url)} answered with a compressed body, which is not read")
    stated = response.headers.get("Content-Length", "")
    if is_stated := stated.isdecimal() and stated.isascii():
        limits.check_bytes(int(stated))
    body = bytearray()
    while part := response.read1(_CHUNK):
        body += part
        limits.check_bytes(len(body))
    _left(url, deadline)
    if is_stated and not response.chunked and len(body) < int(stated):
        raise BadValue(f"{_shown(url)} ended after {len(body):,} of {int(stated):,} bytes")
    return bytes(body)


def _split(url: str) -> SplitResult:
    if len(url) > MAX_URL_CHARS or any(char <= " " or char == "\x7f" for char in url):
        raise BadValue("the URL of an image is too long, or has spaces or control characters")
    try:
        parts = urlsplit(url)
        _port(parts)
    except ValueError as error:
        raise BadValue(f"the URL of an image is not valid: {error}") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise BadValue("the URL of an image has to begin with http:// or https:// and name a host")
    if parts.username is not None or parts.password is not None:
        raise BadValue("the URL of an image must not have a user or a password")
    return parts


def _port(url: SplitResult) -> int:
    return url.port if url.port is not None else _PORTS.get(url.scheme, 0)


def _rule(name: str) -> _Rule:
    host, _, port = name.lower().rpartition(":") if name.count(":") == 1 else (name.lower(), "", "")
    return _Rule(host, int(port) if port else None)


def _left(url: SplitResult, deadline: float) -> float:
    """Seconds until the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise BadValue(f"{_shown(url)} takes too long to fetch")
    return left


def _shown(url: SplitResult) -> str:
    """A URL for a message, without its query, which may contain a secret."""
    return f"{url.scheme}://{url.netloc}{url.path}"[:200]

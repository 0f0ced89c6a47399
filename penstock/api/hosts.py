"""Which names a request may have in its `Host` header.

A page in a browser can point its own domain at a loopback address and then talk to whatever listens there
(DNS rebinding). Its requests still carry that domain in `Host`. Addresses and names without a dot are always
accepted: no page on the internet is served under them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from penstock.errors import UnknownHost

_MAX_CACHED = 256
ANY = "*"


class HostCheck:
    """Accepts addresses, names without a dot, and the given names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {name.lower().rstrip(".") for name in names}
        self._accepted: set[bytes] = set()  # accepted headers, as sent

    def check(self, header: bytes) -> UnknownHost | None:
        """The error for a header that is not accepted."""
        if header in self._accepted:
            return None
        if not self._accepts(header):
            return UnknownHost(
                f"this server does not answer for the host {header.decode('latin-1')[:100]!r}; use its "
                "address or localhost, or start it with --allowed-hosts NAME"
            )
        if len(self._accepted) < _MAX_CACHED:
            self._accepted.add(header)
        return None

    def _accepts(self, header: bytes) -> bool:
        name = host_name(header.decode("latin-1"))
        return "." not in name or _is_address(name) or name in self._names


def host_check(listens_on: str, configured: str, allowed: tuple[str, ...]) -> HostCheck | None:
    """The check of a server that listens on an address; None if it answers for every name."""
    if ANY in allowed or (not allowed and not is_loopback(listens_on)):
        return None
    return HostCheck((configured, *allowed))


def host_name(header: str) -> str:
    """A `Host` header in lower case, without port, brackets and final dot."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].rstrip(".")


def is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

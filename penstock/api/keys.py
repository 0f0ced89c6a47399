"""The API keys of a server: who sends a request, and what the key allows.

Keys are looked up by a hash that is keyed with a secret of this process, so that timing reveals nothing about
them. Key files are reloaded when they change.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import Scope

from penstock.api.key_file import KeyRecord, digest_of, given_keys, read_key_file
from penstock.api.key_limits import CounterFolder, KeyLimits
from penstock.api.watched_files import WatchedFiles
from penstock.config import ServerConfig
from penstock.errors import ConfigError, Forbidden, Unauthorized

log = logging.getLogger("penstock.api")
API_KEY, ADMIN_KEY = "--api-key", "--admin-key"
_NO_KEY = "a valid API key is required; send `Authorization: Bearer KEY`"
_NO_ADMIN_KEY = (
    "this route needs an admin key, and the server has none; set PENSTOCK_ADMIN_KEY or --admin-key-file, or "
    "`admin: true` for an entry of --api-key-file"
)


@dataclass(frozen=True, slots=True, eq=False)
class ApiKey:
    """A client, identified by its key. It does not hold the key itself."""

    name: str
    is_admin: bool = False
    weight: float = 1.0  # of its fair share, relative to other keys
    models: frozenset[str] | None = None  # models that the key may use; None: all
    limits: KeyLimits | None = field(default=None, repr=False)


class KeyRing:
    """The keys that a server accepts."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._files = [
            (path, flag, is_admin)
            for path, flag, is_admin in (
                (config.api_key_file, f"{API_KEY}-file", False),
                (config.admin_key_file, f"{ADMIN_KEY}-file", True),
            )
            if path is not None
        ]
        self.needs_key = config.needs_key
        self._watched = WatchedFiles([path for path, _, _ in self._files])
        self._read: dict[str, list[KeyRecord]] = {}  # by file: its last valid content
        self._counters = CounterFolder()
        self._secret = secrets.token_bytes(32)
        self._keys: dict[bytes, ApiKey] = {}
        self._has_admin = False
        self.has_several = False  # if so, keys distinguish clients
        self._reported: dict[str, str] = {}  # by file: its error that was logged
        self.reload()

    @property
    def has_files(self) -> bool:
        return bool(self._files)

    def share_limits(self, folder: Path, index: int, num_processes: int) -> None:
        """Share the counters of limits with the server's other API processes, in a common folder."""
        self._counters = CounterFolder(folder, index, num_processes)
        self._build()

    def reload(self) -> None:
        """Reload the files if any has changed. If a file has an error, log it and keep the last keys."""
        if self._files and not self._watched.have_changed() and self._keys:
            return
        for path, flag, is_admin in self._files:
            try:
                self._read[path] = read_key_file(path, flag, admin=is_admin)
            except ConfigError as error:
                if self._reported.get(path) != error.message:
                    kept = "its last keys stay valid" if path in self._read else "no key of it is valid"
                    log.error("%s; %s", error.message, kept)
                self._reported[path] = error.message
            else:
                if self._reported.pop(path, None) is not None:
                    log.info("%s %r is valid again", flag, path)
        self._build()

    def _records(self) -> Iterable[KeyRecord]:
        config = self._config
        yield from given_keys(config.admin_keys, ADMIN_KEY, admin=True)
        for path, *_ in reversed(self._files):  # admin keys first: they allow more
            yield from self._read.get(path, ())
        yield from given_keys(config.api_keys, API_KEY)

    def _build(self) -> None:
        """Rebuild the table. Requests in flight keep their key object."""
        keys: dict[bytes, ApiKey] = {}
        for record in self._records():
            made = self._make(record)
            for digest in record.digests:
                keys.setdefault(self._hidden(digest), made)
        self._has_admin = any(key.is_admin for key in keys.values())
        self.has_several = len({key.name for key in keys.values() if not key.is_admin}) > 1
        self._keys = keys

    def _make(self, record: KeyRecord) -> ApiKey:
        limits = None
        if record.max_concurrent_requests is not None or record.max_tokens_per_second is not None:
            limits = KeyLimits(
                record.name, self._counters, record.max_concurrent_requests, record.max_tokens_per_second
            )
        models = None if record.models is None else frozenset(record.models)
        return ApiKey(record.name, record.admin, record.weight, models, limits)

    def _hidden(self, digest: bytes) -> bytes:
        return hashlib.blake2s(digest, key=self._secret).digest()

    def find(self, given: bytes) -> ApiKey | None:
        return self._keys.get(self._hidden(digest_of(given)))

    def named(self, name: str) -> ApiKey | None:
        """The key of this name, if it is still valid."""
        return next((key for key in self._keys.values() if key.name == name), None)

    def check(self, scope: Scope, *, needs_admin: bool = False) -> ApiKey:
        """The key that a request was sent with, or the error that refuses it."""
        if needs_admin and not self._has_admin:
            raise Forbidden(_NO_ADMIN_KEY)
        found = self._sent(scope)
        if found is None:
            raise Unauthorized(_NO_KEY)
        if needs_admin and not found.is_admin:
            raise Forbidden(f"this route needs an admin key, and key {found.name} is none")
        return found

    def _sent(self, scope: Scope) -> ApiKey | None:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                if scheme.lower() == b"bearer" and (found := self.find(given.strip())) is not None:
                    return found
            elif name in (b"x-api-key", b"api-key") and (found := self.find(value)) is not None:
                return found
        return None

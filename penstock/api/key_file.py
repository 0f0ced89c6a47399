"""Files of API keys: one key in each line, or a YAML list of entries with names and limits.

No message shows a key, or a part of a line that could be one. Keys are kept as SHA-256 digests only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.errors import ConfigError

DIGEST = "sha256:"  # prefix of the hexadecimal digest of a key
MAX_WEIGHT = 1000.0
MAX_KEYS = 10_000  # in one file
_ENTRY = re.compile(r"\s*(-(\s|$)|\[|\{)")  # how the first line of a YAML list begins
_COMMENT = re.compile(r"\s*#(\s|$)")  # `#key` without a space is a key
_NAME = re.compile(r"[\w.@:/+-]{1,64}", re.ASCII)
_OTHERS_MAY_READ = 0o004


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of a YAML file."""

    key: str | tuple[str, ...]  # several keys of one client, such as the old and the new one
    name: str | None = None
    admin: bool = False
    max_concurrent_requests: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tokens_per_second: Annotated[float, msgspec.Meta(gt=0)] | None = None
    weight: Annotated[float, msgspec.Meta(gt=0, le=MAX_WEIGHT)] = 1.0
    models: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A client of the server, and what its keys allow. Only digests of the keys are kept."""

    name: str
    digests: tuple[bytes, ...]
    admin: bool = False
    max_concurrent_requests: int | None = None
    max_tokens_per_second: float | None = None
    weight: float = 1.0
    models: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"KeyRecord({self.name!r})"


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_digest(text: str) -> bytes:
    """The digest of a key, or the digest in `sha256:HEX`. The error does not show the key."""
    if text.startswith(DIGEST):
        found = re.fullmatch(r"[0-9a-fA-F]{64}", text[len(DIGEST) :])
        if found is None:
            raise ValueError(f"{DIGEST} needs the 64 hexadecimal digits of a key's SHA-256 digest")
        return bytes.fromhex(found[0])
    if not text or not all("!" <= character <= "~" for character in text):
        raise ValueError("a key is visible ASCII characters, without spaces")
    return digest_of(text.encode())


def given_keys(keys: Sequence[str], flag: str, *, admin: bool = False) -> list[KeyRecord]:
    """The keys of a flag or an environment variable."""
    records: dict[bytes, KeyRecord] = {}
    for number, key in enumerate(keys, 1):
        try:
            digest = read_digest(key)
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}", param=flag) from None
        name = f"{flag.lstrip('-')}-{number}"
        records.setdefault(digest, KeyRecord(name, (digest,), admin=admin))
    return list(records.values())


def read_key_file(path: str, flag: str = "--api-key-file", *, admin: bool = False) -> list[KeyRecord]:
    """The keys of a file. With `admin`, all of them are admin keys."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{flag} {path!r} cannot be read: {reason}", param=flag) from None
    try:
        records = _entries(text) if _is_yaml(text) else _lines(text)
        if not records:
            raise ValueError("it has no key; write one key in each line, or a YAML list of entries")
        if len(records) > MAX_KEYS:
            raise ValueError(f"it has {len(records)} keys; a file takes at most {MAX_KEYS}")
    except ValueError as error:
        raise ConfigError(f"{flag} {path!r}: {error}", param=flag) from None
    return [replace(record, admin=True) for record in records] if admin else records


def warning_about(path: str, flag: str, records: Sequence[KeyRecord]) -> str | None:
    """A warning if the file has plain keys that every user of the machine can read; otherwise None."""
    file = Path(path)
    has_keys = file.read_text(encoding="utf-8").count(DIGEST) < sum(len(each.digests) for each in records)
    if not has_keys or not file.stat().st_mode & _OTHERS_MAY_READ:
        return None
    return (
        f"every user of this machine can read the keys in {flag} {path!r}; run chmod 600 on it, "
        f"or store digests ({DIGEST}HEX)"
    )


def _is_yaml(text: str) -> bool:
    first = next((line for line in text.splitlines() if line.strip() and not _COMMENT.match(line)), "")
    return _ENTRY.match(first) is not None


def _lines(text: str) -> list[KeyRecord]:
    records: dict[bytes, KeyRecord] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or _COMMENT.match(line):
            continue
        try:
            digest = read_digest(line.strip())
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        records.setdefault(digest, KeyRecord(f"line-{number}", (digest,)))
    return list(records.values())


def _entries(text: str) -> list[KeyRecord]:
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # the error's own text quotes the file
        line = "" if error.problem_mark is None else f" near line {error.problem_mark.line + 1}"
        raise ValueError(f"it is not valid YAML{line}") from None
    except yaml.YAMLError:
        raise ValueError("it is not valid YAML") from None
    if not isinstance(content, list):
        raise ValueError("it must be a list of entries, as in `- {name: search, key: KEY}`")
    records = [_record(number, entry) for number, entry in enumerate(content, 1)]
    _check_unique(records)
    return records


def _record(number: int, content: Any) -> KeyRecord:
    fields = {"key": content} if isinstance(content, str) else content
    where = f"entry {number}"
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is not text; put the key in quotes, or write fields such as key and name")
    known = KeyEntry.__struct_fields__
    for field in fields:
        if field not in known:
            close = get_close_matches(str(field), known, 1)
            hint = f" {field!r}; did you mean {close[0]}?" if close else "."
            raise ValueError(f"{where} has an unknown field{hint} An entry takes {', '.join(known)}")
    if isinstance(fields.get("key", ""), int | float):
        raise ValueError(f"{where}: key is a number; put it in quotes")
    try:
        entry = msgspec.convert(fields, KeyEntry)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {_without_values(error)}") from None
    name = f"entry-{number}" if entry.name is None else entry.name
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where}: name takes up to 64 letters, digits and any of . _ - @ : / +")
    keys = (entry.key,) if isinstance(entry.key, str) else entry.key
    if not keys:
        raise ValueError(f"{where}: key is an empty list")
    if entry.models is not None and not entry.models:
        raise ValueError(f"{where}: models is an empty list; leave it out to allow every model")
    try:
        digests = tuple(dict.fromkeys(map(read_digest, keys)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return KeyRecord(
        name,
        digests,
        admin=entry.admin,
        max_concurrent_requests=entry.max_concurrent_requests,
        max_tokens_per_second=entry.max_tokens_per_second,
        weight=entry.weight,
        models=entry.models,
    )


def _without_values(error: msgspec.ValidationError) -> str:
    """The decoder's message, reworded. It quotes types, bounds and names of fields, but never values."""
    return str(error).replace(" - at `$.", ", in `").replace("Object missing required", "it lacks the")


def _check_unique(records: Iterable[KeyRecord]) -> None:
    names: dict[str, int] = {}
    digests: dict[bytes, int] = {}
    for number, record in enumerate(records, 1):
        if (other := names.setdefault(record.name, number)) != number:
            raise ValueError(
                f"entries {other} and {number} have the same name; one entry may have a list of keys"
            )
        for digest in record.digests:
            if (other := digests.setdefault(digest, number)) != number:
                raise ValueError(f"entries {other} and {number} have the same key")

"""Lines of an input file: read one at a time, with bounded memory, and checked before any of them runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.batches.records import LineError
from penstock.errors import BadValue, shortened, shown

MAX_ERRORS = 100  # reported per file
MAX_CUSTOM_ID = 512  # characters
_PIECE_BYTES = 1 << 20
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class RequestLine(msgspec.Struct, kw_only=True):
    """One line: a request with an id chosen by the caller."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decode_line = msgspec.json.Decoder(RequestLine).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode


class _ModelField(msgspec.Struct):
    """The field of a request body that names its model."""

    model: str | None = None


_decode_model = msgspec.json.Decoder(_ModelField).decode


@dataclass(slots=True)
class CheckedFile:
    """The result of checking an input file."""

    num_lines: int = 0
    model: str | None = None  # model named by the first line
    errors: list[LineError] = field(default_factory=list)


def read_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and content of each line that is not blank; None for lines longer than `max_bytes`."""
    with path.open("rb") as file:
        number = 0
        while piece := file.readline(max_bytes + 1):
            number += 1
            if len(piece) > max_bytes and not piece.endswith(b"\n"):
                while piece and not piece.endswith(b"\n"):
                    piece = file.readline(_PIECE_BYTES)
                yield number, None
            elif content := piece.strip(b" \t\r\n\xef\xbb\xbf" if number == 1 else b" \t\r\n"):
                yield number, content


def parse_line(raw: bytes) -> RequestLine:
    """Decode a line that `check_file` has accepted."""
    return _decode_line(raw)


def check_file(
    path: Path, endpoint: str, *, max_lines: int, max_bytes: int, check_nesting: Callable[[bytes], None]
) -> CheckedFile:
    """Check every line. Errors name the line. Stops after `MAX_ERRORS` errors."""
    found, seen = CheckedFile(), set[bytes]()
    for number, raw in read_lines(path, max_bytes):
        found.num_lines += 1
        if found.num_lines > max_lines:
            message = f"the file has more than {max_lines} lines, which is the limit (--max-batch-lines)"
            found.errors.append(LineError(code="too_many_lines", message=message))
            break
        error = _too_long(max_bytes) if raw is None else _check_line(raw, endpoint, seen, check_nesting)
        if error is not None:
            error.line = number
            found.errors.append(error)
            if len(found.errors) >= MAX_ERRORS:
                break
        elif found.num_lines == 1 and raw is not None:
            found.model = _model_of(raw)
    if not found.num_lines:
        found.errors.append(LineError(code="empty_file", message="the file has no line; give one at least"))
    return found


def _too_long(max_bytes: int) -> LineError:
    return LineError(
        code="line_too_long", message=f"this line has more than {max_bytes} bytes (--max-body-mb)"
    )


def _check_line(
    raw: bytes, endpoint: str, seen: set[bytes], check_nesting: Callable[[bytes], None]
) -> LineError | None:
    try:
        raw.decode()
        check_nesting(raw)
        line = _decode_line(raw)
    except BadValue as error:
        return LineError(code="invalid_json_line", message=error.message)
    except UNREADABLE as error:
        return _why_unreadable(raw, error)
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        return _bad_field("custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID} characters")
    digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
    if digest in seen:
        message = f"custom_id {shown(line.custom_id)} is that of an earlier line; each must be unique"
        return LineError(code="duplicate_custom_id", message=message, param="custom_id")
    seen.add(digest)
    if line.method.upper() != "POST":
        return _bad_field("method", f"method is {shown(line.method)}; use POST")
    if line.url != endpoint:
        message = f"url is {shown(line.url)}; every line must have that of the batch, {endpoint!r}"
        return LineError(code="mismatched_url", message=message, param="url")
    if not bytes(line.body).startswith(b"{"):
        return _bad_field("body", "body must be a JSON object")
    return None


def _why_unreadable(raw: bytes, error: Exception) -> LineError:
    """Explain why a line is not a request: not a JSON object, or a missing or wrong field."""
    if isinstance(error, UnicodeDecodeError):
        return LineError(code="invalid_json_line", message="this line is not a valid JSON object: not UTF-8")
    try:
        fields = _decode_fields(raw)
    except UNREADABLE:
        message = f"this line is not a valid JSON object: {shortened(str(error), 200)}"
        return LineError(code="invalid_json_line", message=message)
    for name in RequestLine.__struct_fields__:
        if name not in fields:
            message = f"{name} is missing; a line needs custom_id, method, url and body"
            return LineError(code="missing_required_parameter", message=message, param=name)
        if name != "body":
            try:
                _decode_text(fields[name])
            except UNREADABLE:
                return _bad_field(name, f"{name} must be a string")
    return LineError(
        code="invalid_json_line", message=f"this line cannot be read: {shortened(str(error), 200)}"
    )


def _bad_field(name: str, message: str) -> LineError:
    return LineError(code="invalid_value", message=message, param=name)


def _model_of(raw: bytes) -> str | None:
    try:
        return _decode_model(_decode_line(raw).body).model
    except UNREADABLE:
        return None

"""Logging of all server processes: lines of text on a terminal, JSON objects elsewhere.

A record may carry `extra={"fields": {...}}`: JSON adds them as keys, text appends them to the message.
`json_fields` are shown in JSON only, because the message already contains them. Messages of exceptions may
quote an input, so an API process omits them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import orjson

log = logging.getLogger("penstock")
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
MAX_CHAIN = 10  # exceptions shown of a chain of causes


def configure(
    *,
    level: str,
    format: str = "auto",
    process: str,
    model: str = "",
    shows_values: bool = True,
) -> None:
    """Set up the logging of this process, unless it is already set up.

    `process` is supervisor, engine or api. Without `shows_values`, exceptions are logged without their
    messages.
    """
    handler = logging.StreamHandler(sys.stderr)
    kind = formatter_class(format, sys.stderr.isatty())
    handler.setFormatter(kind(process=process, model=model, shows_values=shows_values))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if kind is JsonFormatter:
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught


def formatter_class(format: str, is_terminal: bool) -> type[TextFormatter]:
    is_json = format == "json" or (format == "auto" and not is_terminal)
    return JsonFormatter if is_json else TextFormatter


class TextFormatter(logging.Formatter):
    """`LEVEL process model: message name=value`"""

    def __init__(self, *, process: str, model: str = "", shows_values: bool = True) -> None:
        super().__init__()
        self.process = process
        self.model = model
        self.shows_values = shows_values
        origin = " ".join(word for word in (process if process != "supervisor" else "", model) if word)
        self._origin = f" {origin}" if origin else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_shown(value)}" for name, value in _fields(record).items())
        return f"{record.levelname}{self._origin}: {record.message}{fields}"

    def formatException(self, ei: ExcInfo) -> str:
        if self.shows_values or ei[1] is None:
            return super().formatException(ei)
        return "\n".join(_without_values(each) for each in _chain(ei[1]))


class JsonFormatter(TextFormatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": self.process,
            "pid": os.getpid(),
        }
        if self.model:
            entry["model"] = self.model
        entry.update(getattr(record, "json_fields", {}), **_fields(record))
        if record.exc_info and record.exc_info[1] is not None:
            entry["exception"] = self._exception(record.exc_info)
        return _encoded(entry)

    def _exception(self, info: ExcInfo) -> dict[str, str]:
        assert info[1] is not None
        out = {"type": type(info[1]).__name__, "stack": self.formatException(info)}
        if self.shows_values or _is_safe(info[1]):
            out["message"] = str(info[1])
        return out


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _shown(value: Any) -> str:
    """A value for a line of text. Quoted if needed, so that it cannot end the line."""
    text = str(value)
    return text if text.isprintable() and " " not in text and '"' not in text else json.dumps(text)


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _encoded(entry: dict[str, Any]) -> str:
    try:
        return orjson.dumps(entry, default=str).decode()
    except (TypeError, ValueError):  # a lone surrogate, which UTF-8 cannot encode
        return json.dumps(entry, default=str)


def _is_safe(error: BaseException) -> bool:
    """Whether the message of an exception comes from the system and cannot quote client data."""
    return isinstance(error, OSError)


def _without_values(error: BaseException) -> str:
    """Format the traceback and the type of an exception. The message is included only if it is safe."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    message = f": {error}" if _is_safe(error) else ""
    return f"Traceback (most recent call last):\n{frames}{type(error).__name__}{message}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception's causes, the first cause first, and then the exception itself."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found and len(found) < MAX_CHAIN:
        found.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return reversed(found)


def _log_uncaught(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, stack)
        return
    log.critical("the process ends because of an error", exc_info=(kind, error, stack))

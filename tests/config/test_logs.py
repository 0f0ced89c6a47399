"""Log lines of every process: text on a terminal, JSON elsewhere."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from penstock.logs import JsonFormatter, TextFormatter, formatter_class
from tests.waiting import PATIENCE_S

INPUT = "a text that nobody may read"


def record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord(
        "penstock.api", logging.INFO, "file.py", 1, message, args, extra.pop("error", None)
    )
    made.created = 1_700_000_000.25
    made.__dict__.update(extra)
    return made


def failed() -> tuple[Any, Any, Any]:
    """An exception whose message quotes an input, caused by another one that does too."""
    try:
        try:
            raise ValueError(INPUT)
        except ValueError as error:
            raise KeyError(INPUT) from error
    except KeyError:
        return sys.exc_info()


@pytest.mark.parametrize(
    ("format", "is_terminal", "expected"),
    [
        ("auto", True, TextFormatter),
        ("auto", False, JsonFormatter),
        ("text", False, TextFormatter),
        ("json", True, JsonFormatter),
    ],
)
def test_a_terminal_gets_text_and_everything_else_json(
    format: str, is_terminal: bool, expected: type
) -> None:
    assert formatter_class(format, is_terminal) is expected


def test_a_json_line_has_the_time_the_origin_and_the_fields() -> None:
    formatter = JsonFormatter(process="engine", model="mini")
    line = formatter.format(record("took %d", 3, fields={"request_id": "r1", "trace_id": "ab"}))
    entry = json.loads(line)
    assert "\n" not in line and entry.pop("pid") > 0
    assert entry == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "logger": "penstock.api",
        "message": "took 3",
        "process": "engine",
        "model": "mini",
        "request_id": "r1",
        "trace_id": "ab",
    }


def test_a_line_of_text_has_the_origin_and_the_fields() -> None:
    made = record("GET / 200", fields={"ms": 1.5, "body": 'two\nlines "x"'}, json_fields={"status": 200})
    assert TextFormatter(process="api").format(made) == (
        'INFO api: GET / 200 ms=1.5 body="two\\nlines \\"x\\""'
    )
    assert TextFormatter(process="supervisor").format(record("ready")) == "INFO: ready"
    assert TextFormatter(process="engine", model="mini").format(record("up")) == "INFO engine mini: up"


@pytest.mark.parametrize("kind", [TextFormatter, JsonFormatter])
def test_messages_of_exceptions_are_left_out_where_they_may_quote_inputs(kind: type[TextFormatter]) -> None:
    made = record("failed", error=failed())
    hidden = kind(process="api", shows_values=False).format(made)
    assert INPUT not in hidden and "KeyError" in hidden and "ValueError" in hidden
    assert "test_logs.py" in hidden  # the place where it was raised
    made.exc_text = None
    assert INPUT in kind(process="engine").format(made)


def test_an_exception_is_a_field_of_its_line() -> None:
    entry = json.loads(JsonFormatter(process="engine").format(record("failed", error=failed())))
    assert entry["exception"]["type"] == "KeyError" and entry["exception"]["message"] == f"'{INPUT}'"
    assert "Traceback" in entry["exception"]["stack"]


def test_half_a_character_does_not_break_a_line() -> None:
    assert json.loads(JsonFormatter(process="api").format(record("%s", "\ud800")))["message"] == "\ud800"


def test_what_ends_a_process_and_warnings_are_json_lines_too() -> None:
    code = (
        "import warnings; from penstock.logs import configure\n"
        "configure(level='info', process='engine', model='mini')\n"
        "warnings.warn('careful'); raise RuntimeError('over')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    warned, ended = map(json.loads, ran.stderr.splitlines())
    assert warned["level"] == "warning" and "careful" in warned["message"]
    assert ended["level"] == "critical" and ended["exception"]["message"] == "over"
    assert ran.returncode == 1

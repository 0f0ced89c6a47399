"""Lines of an input file are checked one by one, and errors give the line and the reason."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from penstock.api.nesting import check_nesting
from penstock.batches.lines import MAX_ERRORS, CheckedFile, check_file, read_lines

URL = "/v1/embeddings"


def line(name: str = "a", **changes: Any) -> bytes:
    fields = {
        "custom_id": name,
        "method": "POST",
        "url": URL,
        "body": {"input": "x", "model": "m"},
        **changes,
    }
    return json.dumps({key: value for key, value in fields.items() if value is not ...}).encode()


def check(tmp_path: Path, content: bytes, *, max_lines: int = 100, max_bytes: int = 4096) -> CheckedFile:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return check_file(path, URL, max_lines=max_lines, max_bytes=max_bytes, check_nesting=check_nesting)


def test_good_lines_are_counted_and_the_model_is_that_of_the_first(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + line("a") + b"\r\n\n  \n" + line("b", method="post")
    found = check(tmp_path, content)
    assert (found.num_lines, found.model, found.errors) == (2, "m", [])


@pytest.mark.parametrize(
    ("content", "code", "param", "words"),
    [
        (b"{", "invalid_json_line", None, "not a valid JSON object"),
        (b"[1]", "invalid_json_line", None, "not a valid JSON object"),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None, "not UTF-8"),
        (b"[" * 5000, "line_too_long", None, "more than 4096 bytes"),
        (b'{"a":' * 400 + b"1" + b"}" * 400, "invalid_json_line", None, "nested"),
        (line(custom_id=...), "missing_required_parameter", "custom_id", "custom_id is missing"),
        (line(body=...), "missing_required_parameter", "body", "body is missing"),
        (line(custom_id=7), "invalid_value", "custom_id", "must be a string"),
        (line(custom_id=""), "invalid_value", "custom_id", "1 to 512 characters"),
        (line("x" * 600), "invalid_value", "custom_id", "1 to 512 characters"),
        (line(method="GET"), "invalid_value", "method", "method is 'GET'; use POST"),
        (line(url="/v1/other"), "mismatched_url", "url", "every line must have that of the batch"),
        (line(body=[1]), "invalid_value", "body", "body must be a JSON object"),
        (line("first"), "duplicate_custom_id", "custom_id", "is that of an earlier line"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, content: bytes, code: str, param: str | None, words: str
) -> None:
    found = check(tmp_path, line("first") + b"\n" + content + b"\n" + line("last"))
    (error,) = found.errors
    assert (error.line, error.code, error.param) == (2, code, param)
    assert words in error.message


def test_an_empty_file_and_one_of_too_many_lines_are_refused(tmp_path: Path) -> None:
    assert [error.code for error in check(tmp_path, b" \n\n").errors] == ["empty_file"]
    found = check(tmp_path, b"\n".join(line(str(number)) for number in range(5)), max_lines=4)
    assert [error.code for error in found.errors] == ["too_many_lines"]
    assert "--max-batch-lines" in found.errors[0].message


def test_no_more_than_some_errors_are_reported(tmp_path: Path) -> None:
    assert len(check(tmp_path, b"{\n" * 500, max_lines=1000).errors) == MAX_ERRORS


def test_a_line_of_many_megabytes_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        for _ in range(40):
            file.write(b"x" * (1 << 20))
        file.write(b"\nend\n")
    tracemalloc.start()
    found = [(number, raw) for number, raw in read_lines(path, 1 << 16)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [(1, None), (2, b"end")]
    assert peak < 8 << 20

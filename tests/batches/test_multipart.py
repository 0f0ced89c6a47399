"""Forms are read piece by piece. Whatever a client sends is stored unchanged or refused with a reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batches.multipart import MAX_PARTS, Form, FormReader, shown_name
from penstock.errors import BadValue, BodyTooLarge, ClientError

KIND = b"multipart/form-data; boundary=cut"


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    more = "" if filename is None else f'; filename="{filename}"'
    head = f'--cut\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + content + b"\r\n"


END = b"--cut--\r\n"
GOOD = part("purpose", b"batch") + part("file", b'{"a": 1}\n', "in.jsonl") + END


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("forms") / "upload"


def read(path: Path, body: bytes, *, size: int = 7, kind: bytes = KIND, max_bytes: int = 1000) -> Form:
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    try:
        reader = FormReader(kind, descriptor, max_bytes)
        for at in range(0, len(body), size):
            reader.feed(body[at : at + size])
        return reader.finish()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_form_in_pieces_of_any_size_gives_its_file_and_fields(path: Path, size: int) -> None:
    form = read(path, GOOD, size=size)
    assert form == Form("in.jsonl", 9, {"purpose": "batch"})
    assert path.read_bytes() == b'{"a": 1}\n'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "ends before its last boundary"),
        (GOOD[:-9], "ends before its last boundary"),
        (b"no form at all", "not valid multipart"),
        (part("file", b"1", "a") + part("file", b"2", "b") + END, "two files"),
        (part("purpose", b"a") + part("purpose", b"b") + END, "'purpose' is given twice"),
        (part("purpose", b"x" * 5000) + END, "more than 4096 bytes"),
        (part("purpose", b"\xff") + END, "is not UTF-8"),
        (b"".join(part(f"f{number}", b"") for number in range(MAX_PARTS + 1)) + END, "more than 32 parts"),
        (b"--cut\r\n" + b"A: b\r\n" * 50 + b"\r\n\r\n" + END, "not valid multipart"),
        (b"--cut\r\n" + b"A" * 10_000 + b": b\r\n\r\n\r\n" + END, "not valid multipart"),
    ],
)
def test_a_form_that_is_wrong_is_refused_with_the_reason(path: Path, body: bytes, words: str) -> None:
    with pytest.raises(BadValue, match=words):
        read(path, body, size=64)


@pytest.mark.parametrize(
    "kind",
    [b"", b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=", b"\xff" * 50],
)
def test_another_content_type_is_refused(path: Path, kind: bytes) -> None:
    with pytest.raises(BadValue, match="upload a file as multipart/form-data"):
        read(path, GOOD, kind=kind)


def test_a_file_that_is_too_large_is_refused_before_it_is_read(path: Path) -> None:
    with pytest.raises(BodyTooLarge, match=r"limit of 4 bytes .--max-batch-file-mb"):
        read(path, GOOD, max_bytes=4)
    assert path.stat().st_size <= 4


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\x\\in.jsonl", "in.jsonl"),
        ("a\x00\n\x7fb", "ab"),
        ("", "upload.jsonl"),
        ("/", "upload.jsonl"),
        ("é" * 400, "é" * 255),
    ],
)
def test_a_name_has_no_folders_and_no_control_characters(given: str, shown: str) -> None:
    assert shown_name(given) == shown


@given(st.binary(max_size=300), st.integers(0, 200), st.integers(1, 50))
@settings(max_examples=150, deadline=None)
def test_damaged_forms_are_read_or_refused(path: Path, noise: bytes, at: int, size: int) -> None:
    body = GOOD[:at] + noise + GOOD[at:]
    try:
        form = read(path, body, size=size, max_bytes=200)
    except ClientError:
        return
    assert form.num_bytes == (path.stat().st_size if form.filename is not None else 0)

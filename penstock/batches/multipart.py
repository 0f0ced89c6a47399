"""Streaming reader of `multipart/form-data`: the file is written to disk, other fields are small texts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.errors import BadValue, BodyTooLarge, shown

FILE_FIELD = "file"
MAX_PARTS = 32
MAX_FIELD_BYTES = 4096
MAX_NAME = 255  # characters of a file's name
ENVELOPE_BYTES = 1 << 20  # allowance for the parts of a body other than its file
_MAX_BOUNDARY = 200
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(slots=True)
class Form:
    """The fields of a form, and facts about its file."""

    filename: str | None = None  # None: there was no file
    num_bytes: int = 0  # size of the file
    fields: dict[str, str] = field(default_factory=dict)


class FormReader:
    """Reads a form: call `feed` with pieces of the body, then `finish`. Writes to the file are blocking."""

    def __init__(self, content_type: bytes, descriptor: int, max_file_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY:
            raise BadValue(
                f"Content-Type is {shown(content_type.decode('latin-1'))}; upload a file as "
                "multipart/form-data with a boundary"
            )
        self.form = Form()
        self._descriptor = descriptor
        self._max_file_bytes = max_file_bytes
        self._num_parts = 0
        self._has_ended = False
        self._header = b""  # name of the header that is being read
        self._value = b""
        self._disposition = b""
        self._name: str | None = None  # name of the field that is being read; None for the file
        self._text = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._take_header,
                "on_header_value": self._take_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, piece: bytes) -> None:
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise BadValue(f"the body is not valid multipart/form-data: {error}") from None

    def finish(self) -> Form:
        if not self._has_ended:
            raise BadValue("the body is not valid multipart/form-data: it ends before its last boundary")
        return self.form

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise BadValue(f"the form has more than {MAX_PARTS} parts")
        self._disposition = self._header = self._value = b""
        self._text = bytearray()

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name != FILE_FIELD:
            self._name = name
            return
        if self.form.filename is not None:
            raise BadValue("the form has two files; upload one at a time", param=FILE_FIELD)
        self._name = None
        self.form.filename = shown_name(options.get(b"filename", b"").decode("utf-8", "replace"))

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            self.form.num_bytes += end - start
            if self.form.num_bytes > self._max_file_bytes:
                raise too_large(self._max_file_bytes)
            view = memoryview(data)[start:end]
            while view:
                view = view[os.write(self._descriptor, view) :]
            return
        self._text += data[start:end]
        if len(self._text) > MAX_FIELD_BYTES:
            raise BadValue(f"{shown(self._name)} has more than {MAX_FIELD_BYTES} bytes", param=self._name)

    def _end_part(self) -> None:
        if self._name is None:
            return
        if self._name in self.form.fields:
            raise BadValue(f"{shown(self._name)} is given twice", param=self._name)
        try:
            self.form.fields[self._name] = self._text.decode()
        except UnicodeDecodeError:
            raise BadValue(f"{shown(self._name)} is not UTF-8", param=self._name) from None

    def _end(self) -> None:
        self._has_ended = True


def too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the file exceeds the limit of {max_bytes} bytes (--max-batch-file-mb)")


def shown_name(given: str) -> str:
    """Clean a file's name for display: no folders, no control characters. Not used as a path."""
    name = re.split(r"[/\\]", given)[-1]
    return _NOT_SHOWN.sub("", name)[:MAX_NAME] or "upload.jsonl"

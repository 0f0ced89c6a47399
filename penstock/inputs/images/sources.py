"""Reads the bytes of images from data URIs, base64, uploaded files, allowed URLs and local paths.

Each error names what would be accepted. Reading is blocking: call it on a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pybase64

from penstock.errors import BadValue, shown
from penstock.inputs.images.decode import ImageLimits
from penstock.inputs.images.fetch import MediaDomains

FileReader = Callable[[str], Path]  # id of an uploaded file → path of its content
_ACCEPTED = "a data URI, base64, the id of an uploaded file, or a URL that the server allows"
_FILE_ID = re.compile(r"file-[0-9A-Za-z_-]{1,64}")
_SPACES = re.compile(rb"[ \t\r\n]+")
_DATA_URI = re.compile(r"data:([\w.+/-]*)((?:;[\w.+=\"-]*)*?)(;base64)?,", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageSources:
    """The sources that a server's clients can name instead of sending an image."""

    limits: ImageLimits = field(default_factory=ImageLimits)
    domains: MediaDomains = field(default_factory=MediaDomains)
    local_folder: Path | None = None  # clients can name files below it

    def read(self, source: str, uploaded: FileReader | None = None) -> bytes:
        """Read the bytes of an image file. `uploaded` finds the client's uploaded files."""
        if source[:5].lower() == "data:":
            return self._data_uri(source)
        scheme = source[:8].partition(":")[0].lower()
        if scheme in ("http", "https"):
            return self.domains.fetch(source, self.limits)
        if scheme == "file":
            return self._local(source)
        if _FILE_ID.fullmatch(source):
            return self._uploaded(source, uploaded)
        return self._base64(source.encode())

    def _data_uri(self, source: str) -> bytes:
        head = _DATA_URI.match(source[:512])
        if head is None or head[3] is None:
            raise BadValue(
                f"an image is the data URI {shown(source)}; it has to begin like data:image/png;base64,"
            )
        kind = head[1].lower()
        if kind and not kind.startswith("image/") and kind != "application/octet-stream":
            raise BadValue(
                f"an image is a data URI of type {kind}; use image/png, image/jpeg or another image"
            )
        return self._base64(source[head.end() :].encode())

    def _base64(self, text: bytes) -> bytes:
        self.limits.check_bytes(len(text) // 4 * 3 - 2)
        if not text:
            raise BadValue(f"an image is empty; use {_ACCEPTED}")
        packed = _SPACES.sub(b"", text) if _SPACES.search(text) else text
        packed = packed.translate(_STANDARD) + b"=" * (-len(packed) % 4)
        try:
            return bytes(pybase64.b64decode(packed, validate=True))
        except ValueError:
            raise BadValue(
                f"an image is {shown(text.decode())}, which is not base64; use {_ACCEPTED}"
            ) from None

    def _uploaded(self, file_id: str, uploaded: FileReader | None) -> bytes:
        if uploaded is None:
            raise BadValue(
                f"an image is the file {file_id}, but the server keeps no files; start it with "
                "--batch-folder, or send a data URI"
            )
        return self._read_file(uploaded(file_id), file_id)

    def _local(self, source: str) -> bytes:
        parts = urlsplit(source)
        if self.local_folder is None:
            raise BadValue(
                "an image is a file:// URL, but the server reads no local files; start it with "
                "--allowed-local-media-path, or send a data URI"
            )
        folder = self.local_folder.resolve()
        path = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or "\0" in str(path) or not path.is_absolute():
            raise BadValue(f"an image is {shown(source)}; use file:///PATH")
        resolved = path.resolve()
        if not resolved.is_relative_to(folder):  # links are resolved too
            raise BadValue(f"the file {shown(str(path))} of an image is not below --allowed-local-media-path")
        return self._read_file(resolved, str(path))

    def read_path(self, path: Path) -> bytes:
        """Read a file that the operator, not a client, names."""
        return self._read_file(path, str(path))

    def _read_file(self, path: Path, name: str) -> bytes:
        try:
            if not path.is_file():
                raise BadValue(f"the file {shown(name)} of an image does not exist")
            self.limits.check_bytes(path.stat().st_size)
            with path.open("rb") as file:
                return file.read(self.limits.max_bytes + 1)
        except OSError as error:
            raise BadValue(f"the file {shown(name)} of an image cannot be read: {error.strerror}") from None


_STANDARD = bytes.maketrans(b"-_", b"+/")  # URL-safe alphabet → standard alphabet

"""Saves the shapes of a model's steps between starts, so that the next start captures their graphs first.

A record holds sizes, counts and pooling parameters, never texts or tokens. Its key is the GPU and the model's
revision, which covers the files, the settings that change numbers and Penstock's version. An unreadable
record is ignored, because it only affects the order of captures.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from threading import Thread

import msgspec

from penstock.checkpoint.convert import cache_folder
from penstock.runner.buckets import Bucket
from penstock.runner.graph_keys import Key
from penstock.types import PoolingParams

log = logging.getLogger("penstock.graphs")

FORMAT = 1  # version of the file format; other versions are ignored
MAX_SHAPES = 256
MAX_BYTES = 1 << 18  # size of a file
MAX_FILES = 256  # beyond this the oldest files are deleted


class _Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    tokens: int
    rows: int
    max_length: int
    has_types: bool
    has_skip: bool
    params: PoolingParams | None
    max_cached_keys: int | None
    is_prompt: bool
    uses: int


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    identity: str  # of the model, the settings and the device
    shapes: tuple[_Shape, ...]  # ordered by the time that their graphs saved, most first


class GraphHistory:
    """The history file of one model on one kind of device."""

    def __init__(self, identity: str, folder: Path | None = None) -> None:
        self.identity = identity
        name = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        self.file = (cache_folder() / "graphs" if folder is None else folder) / f"{name}.json"
        self._known_uses: dict[Key, int] = {}  # uses in earlier runs
        self._writer: Thread | None = None

    def load(self) -> list[Key]:
        """The shapes of earlier runs in capture order; empty without a record."""
        try:
            with self.file.open("rb") as stream:
                content = stream.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            record = msgspec.json.decode(content, type=_Record)
            if record.format != FORMAT or record.identity != self.identity:
                raise ValueError("it is of another format or another model")
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:  # msgspec's errors are values too
            log.info("the history of step shapes in %s is ignored: %s", self.file, error)
            return []
        known = {_key(shape): max(0, shape.uses) for shape in record.shapes[:MAX_SHAPES]}
        self._known_uses = known
        return list(known)

    def save(self, used: Iterable[tuple[Key, int]]) -> None:
        """Write the shapes of this run in this order, then those of earlier runs that were not used again.
        Earlier uses count half."""
        shapes = {key: uses + self._known_uses.get(key, 0) // 2 for key, uses in used if not key.adapter_rank}
        for key, uses in self._known_uses.items():
            if uses > 1:
                shapes.setdefault(key, uses // 2)
        record = _Record(
            FORMAT,
            self.identity,
            tuple(_shape(key, uses) for key, uses in islice(shapes.items(), MAX_SHAPES)),
        )
        draft = self.file.with_suffix(f".{os.getpid()}.part")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(record))
            draft.replace(self.file)
            self._delete_oldest()
        except OSError as error:
            log.debug("the history of step shapes cannot be written: %s", error)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def save_in_background(self, used: Iterable[tuple[Key, int]]) -> None:
        """Write on a separate thread, because a file system may be slow. Does nothing while the thread of an
        earlier call is writing."""
        if self._writer is None or not self._writer.is_alive():
            self._writer = Thread(target=self.save, args=(list(used),), name="penstock-history", daemon=True)
            self._writer.start()

    def close(self, used: Iterable[tuple[Key, int]]) -> None:
        if self._writer is not None:
            self._writer.join()
        self.save(used)

    def _delete_oldest(self) -> None:
        files = sorted(self.file.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MAX_FILES]:
            file.unlink(missing_ok=True)


def _shape(key: Key, uses: int) -> _Shape:
    return _Shape(
        *key.bucket, key.has_types, key.has_skip, key.params, key.max_cached_keys, key.is_prompt, uses
    )


def _key(shape: _Shape) -> Key:
    bucket = Bucket(shape.tokens, shape.rows, shape.max_length)
    return Key(bucket, shape.has_types, shape.has_skip, shape.params, shape.max_cached_keys, shape.is_prompt)

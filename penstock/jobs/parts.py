"""The folder of an unfinished output: finished parts, and the settings of the run.

It holds `_manifest.json`, one file for each block of rows, named by first row and count, and a list of bad
rows for each block that has some. A file gets its name only when it is complete and on disk. A run that is
killed at any moment leaves complete parts, and drafts, which are ignored. The manifest records the state:

    clearing   removing the parts of an abandoned run   --resume starts from the beginning
    running    adding parts                             --resume computes the missing blocks
    joined     `whole` is the finished output           --resume only moves it into place
    complete   the folder of parts is the output        the manifest lists its files

A block is named by its rows. Every run cuts blocks at the same places, which the first run sets. So a block
that is computed twice, for example by a worker that was presumed dead, has the same name and content. A
worker of an abandoned run finds another run's name in the manifest, or its draft removed, and commits
nothing.
"""

from __future__ import annotations

import itertools
import os
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.errors import BadValue, EngineError
from penstock.jobs.rows import BadRow
from penstock.jobs.storage import Folder, Write

_PART = re.compile(r"(\d{12})-(\d+)\.\w+")
_BAD_ROWS = re.compile(r"_errors-(\d{12})-(\d+)\.jsonl")
MANIFEST, ERRORS, WHOLE = "_manifest.json", "_errors.jsonl", "whole"
_LAYOUT = 2


class Span(NamedTuple):
    """A block of rows of the input."""

    first: int
    num_rows: int

    @property
    def end(self) -> int:
        return self.first + self.num_rows

    @property
    def name(self) -> str:
        return f"{self.first:012d}-{self.num_rows}"


class Cut(msgspec.Struct, frozen=True):
    """The limits of a block: this many rows, or characters of text."""

    rows: int = 2048
    chars: int = 8 << 20


DEFAULT_CUT = Cut()


class PartFile(msgspec.Struct, frozen=True):
    name: str
    first_row: int
    input_rows: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    layout: int = _LAYOUT
    run: str = ""  # random name of the run; a resumed run keeps it
    state: Literal["clearing", "running", "joined", "complete"] = "running"
    cut: Cut = Cut()
    overwrite: bool = False  # the run may replace an existing output
    input_rows: int | None = None  # rows of the finished output, bad rows included
    bad_rows: int | None = None  # listed in `errors`
    errors: str | None = None
    files: list[PartFile] = []
    stamp: dict[str, Any] = {}
    settings: dict[str, Any]


class PartWriter:
    """Commits blocks. Picklable, so that workers on other machines can commit to the same folder."""

    def __init__(self, folder: Folder, suffix: str, run: str) -> None:
        self.folder = folder
        self.suffix = suffix
        self._run = run

    def commit(self, span: Span, write: Write, bad: Sequence[BadRow] = ()) -> None:
        """Save a block. Its bad rows are saved first; they count only once the block exists."""
        if bad:
            content = _lines(bad)
            self.folder.commit(
                f"_errors-{span.name}.jsonl", lambda file: file.write_bytes(content), self._check_current
            )
        self.folder.commit(f"{span.name}{self.suffix}", write, self._check_current)

    def _check_current(self) -> None:
        manifest = read_manifest(self.folder)
        if manifest is None or (manifest.run, manifest.state) != (self._run, "running"):
            raise EngineError(f"another run writes {self.folder.location}")


def _lines(bad: Iterable[BadRow]) -> bytes:
    return msgspec.json.Encoder(enc_hook=str).encode_lines(list(bad))


class Parts:
    """The parts of one output. Only one run at a time can open them."""

    def __init__(
        self,
        folder: Folder,
        suffix: str,
        settings: dict[str, Any],
        *,
        stamp: dict[str, Any] | None = None,
        cut: Cut = DEFAULT_CUT,
        resume: bool = False,
        overwrite: bool = False,
        check: Callable[[Manifest | None], None] = lambda found: None,
    ) -> None:
        """`check` gets the manifest of the run to resume, if any. It raises to protect an existing output."""
        self.folder = folder
        folder.create()
        self._lock = folder.lock()
        try:
            self._refuse_foreign_files()
            found = read_manifest(folder) if resume else None
            check(found)
            run = uuid.uuid4().hex
            fresh = Manifest(run=run, settings=settings, overwrite=overwrite, cut=cut, stamp=stamp or {})
            self.manifest = self._begin(found, fresh)
            self.writer = PartWriter(folder, suffix, self.manifest.run)
            self.spans = self._committed()
        except BaseException:
            self.close()
            raise

    @property
    def rows(self) -> int:
        """Number of committed rows."""
        if self.manifest.input_rows is not None:
            return self.manifest.input_rows
        return sum(span.num_rows for span in self.spans)

    @property
    def is_running(self) -> bool:
        return self.manifest.state == "running"

    def add(self, span: Span, write: Write, bad: Sequence[BadRow] = ()) -> None:
        self.writer.commit(span, write, bad)
        self.spans.add(span)

    def refresh(self) -> None:
        """Update `spans` with blocks that other processes have committed."""
        self.spans = self._committed()

    def files(self) -> list[PartFile]:
        """List all parts in order. Raises if rows are missing."""
        row, files = 0, []
        for span in sorted(self.spans):
            if span.first != row:
                raise EngineError(f"rows {row} to {span.first - 1} are missing; run again with --resume")
            files.append(PartFile(f"{span.name}{self.writer.suffix}", span.first, span.num_rows))
            row = span.end
        return files

    def bad_rows(self) -> list[tuple[Span, str]]:
        """List spans with bad rows, and the files that list these rows."""
        found = [(_span(name, _BAD_ROWS), name) for name in self.folder.names() if _BAD_ROWS.fullmatch(name)]
        return sorted((span, name) for span, name in found if span in self.spans)

    def commit_errors(self) -> int:
        """Join the lists of bad rows into `_errors.jsonl`, if there are any. Returns the number of rows."""
        contents = [self.folder.read(name) or b"" for _, name in self.bad_rows()]
        if contents:
            self.folder.commit(ERRORS, lambda file: file.write_bytes(b"".join(contents)))
        return sum(content.count(b"\n") for content in contents)

    def save(self, **changes: Any) -> None:
        self.manifest = self._save(msgspec.structs.replace(self.manifest, **changes))

    def discard(self) -> None:
        """Remove everything. The manifest is removed last, because it describes the rest."""
        if self.folder.exists():
            _clear(self.folder)
            self.folder.remove(MANIFEST)
            self.folder.remove_folder()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, found: Manifest | None, fresh: Manifest) -> Manifest:
        if found is None or found.state == "clearing":
            self._save(msgspec.structs.replace(fresh, state="clearing"))
            _clear(self.folder)
            return self._save(fresh)
        if changed := _changes(found.settings, fresh.settings):
            raise BadValue(
                f"{self.folder.location} was started with other settings ({changed}); "
                "use those, or start again with --overwrite",
                param="--resume",
            )
        self.folder.remove_drafts()
        return found

    def _committed(self) -> set[Span]:
        names = [name for name in self.folder.names() if _PART.fullmatch(name)]
        spans = sorted(_span(name, _PART) for name in names)
        for before, after in itertools.pairwise(spans):
            if after.first < before.end:
                raise BadValue(
                    f"{self.folder.location} holds overlapping parts {before.name} and {after.name}; "
                    "start again with --overwrite",
                    param="--output",
                )
        return set(spans)

    def _save(self, manifest: Manifest) -> Manifest:
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        self.folder.commit(MANIFEST, lambda draft: draft.write_bytes(text))
        return manifest

    def _refuse_foreign_files(self) -> None:
        """Refuse files that this module did not write, because it would remove them."""
        for name in self.folder.names():
            ours = name in (MANIFEST, ERRORS, WHOLE) or _PART.fullmatch(name) or _BAD_ROWS.fullmatch(name)
            if not ours:
                raise BadValue(
                    f"{self.folder.location} holds {name}, which is not part of an unfinished run; "
                    "move it away",
                    param="--output",
                )


def _span(name: str, pattern: re.Pattern[str]) -> Span:
    match = pattern.fullmatch(name)
    assert match is not None
    return Span(int(match[1]), int(match[2]))


def read_manifest(folder: Folder) -> Manifest | None:
    content = folder.read(MANIFEST) if folder.exists() else None
    if content is None:
        return None
    try:
        layout = msgspec.json.decode(content, type=dict[str, Any]).get("layout")
        if layout != _LAYOUT:
            raise BadValue(
                f"{folder.location} was started by another version; start again with --overwrite",
                param="--resume",
            )
        return msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise BadValue(
            f"{folder.location}/{MANIFEST} is damaged ({error}); start again with --overwrite",
            param="--resume",
        ) from None


def parts_folder(output: Path) -> Path:
    """The folder for the parts of a file until they are joined."""
    return output.with_name(output.name + ".parts")


def check_output(output: Path, *, resume: bool, overwrite: bool, may_be_folder: bool = False) -> None:
    """Refuse early if writing to a file would fail later or destroy an existing output."""
    if output.is_dir() and not may_be_folder:
        raise BadValue(f"{output} is a folder; give a file", param="--output")
    check_parent(output)
    folder = parts_folder(output)
    is_started = (folder / MANIFEST).is_file()
    if is_started and not (resume or overwrite):
        raise unfinished(str(folder))
    if output.exists() and not overwrite and not (resume and is_started):
        raise output_exists(str(output))


def check_parent(output: Path) -> None:
    if not output.parent.is_dir():
        raise BadValue(f"there is no folder {output.parent} to write {output.name} into", param="--output")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise BadValue(f"the folder {output.parent} is not writable", param="--output")


def unfinished(folder: str) -> BadValue:
    return BadValue(
        f"{folder} holds an unfinished run; continue with --resume, or start again with --overwrite",
        param="--output",
    )


def output_exists(output: str) -> BadValue:
    return BadValue(f"{output} exists; replace it with --overwrite", param="--output")


def _changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    # As it would be read back from the manifest: tuples become lists.
    after = msgspec.json.decode(msgspec.json.encode(after))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return "; ".join(f"{name}: {_shown(before.get(name))}, now {_shown(after.get(name))}" for name in names)


def _shown(value: Any) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()


def _clear(folder: Folder) -> None:
    """Remove everything but the manifest."""
    folder.remove_drafts()
    for name in folder.names():
        if name != MANIFEST:
            folder.remove(name)

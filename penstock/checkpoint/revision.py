"""The revision of a loaded model: equal revisions give equal results for equal rows.

There are two kinds. `loaded_revision` is cheap: it identifies the model's files by path, size and times, and
is valid on one machine. `portable_revision` hashes their content, and is the same wherever the same files are
served with the same settings. Both cover the settings that change numbers, and Penstock's version.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock import __version__
from penstock.checkpoint.convert import cache_folder
from penstock.checkpoint.spec import ModelSpec

# Settings that affect scheduling and memory, but not results.
SCHEDULING_SETTINGS = frozenset(
    {
        *("max_num_batched_tokens", "max_num_seqs", "max_queued_tokens", "max_queue_seconds"),
        *("background_step_ms", "target_itl_s", "max_partial_prefills"),
        *("pipeline_depth", "threads", "shares_steps", "share_identical", "step_output_bytes"),
        *("kv_cache_bytes", "kv_share", "document_cache_bytes", "profile", "profile_steps", "devices"),
        *("null_step_s", "graph_capture_seconds", "graph_history"),
    }
)
# Names, and settings that only affect tokenising: rows are already tokenised.
UNRELATED_TO_ROWS = frozenset({"name", "folder", "root", "max_model_len", "prompts", "default_prompt_name"})
_UNREAD_SUFFIXES = frozenset(
    {*(".md", ".png", ".jpg", ".jpeg", ".gif", ".pdf", ".lock"), *(".onnx", ".onnx_data", ".msgpack")}
    | {".h5", ".ot", ".tflite", ".gguf", ".mlmodel", ".pyc"}
)
_UNREAD_FOLDERS = frozenset({"onnx", "openvino", "coreml", "__pycache__"})
MAX_FILES = 10_000  # a folder with more files is not one model
PIECE_BYTES = 1 << 22


class _Stopped(Exception):
    pass


def loaded_revision(spec: ModelSpec, settings: Mapping[str, Any]) -> str:
    """The revision of the files as they are now on this machine; "" if they cannot be identified."""
    files = _file_marks(spec)
    return "" if files is None else _revision(spec, settings, repr(files))


def portable_revision(
    spec: ModelSpec, settings: Mapping[str, Any], loaded: str, is_stopped: Callable[[], bool] = lambda: False
) -> str:
    """The revision by content of the files that were `loaded`; "" if these have changed or are gone.

    Reads all files, unless an earlier call on this machine has. Call it off the event loop.
    """
    try:
        content = _content_digest(spec, is_stopped)
    except (OSError, _Stopped):
        return ""
    if not loaded or loaded_revision(spec, settings) != loaded:
        return ""
    return _revision(spec, settings, content)


def content_revision(spec: ModelSpec) -> str:
    """A hash of the model's files alone, whatever the settings and the version; "" if they cannot be read.

    Reads all files, unless an earlier call on this machine has.
    """
    try:
        return _content_digest(spec, lambda: False)
    except OSError:
        return ""


def _revision(spec: ModelSpec, settings: Mapping[str, Any], files: str) -> str:
    """Hash everything that affects results."""
    described = {
        name: value for name, value in msgspec.to_builtins(spec).items() if name not in UNRELATED_TO_ROWS
    }
    chosen = {name: value for name, value in settings.items() if name not in SCHEDULING_SETTINGS}
    chosen["device"] = str(settings.get("device", "")).partition(":")[0]  # the index does not affect results
    content = msgspec.json.encode([__version__, described, chosen, files], order="deterministic")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _files(spec: ModelSpec) -> Iterator[tuple[str, Path]]:
    """Every file that the model may be read from, with its name within the model."""
    roots = [spec.root_path]
    if not spec.path.is_relative_to(spec.root_path):
        roots.append(spec.path)
    for number, root in enumerate(roots):
        for folder, folders, names in os.walk(root, followlinks=True):
            folders[:] = [
                each for each in folders if each not in _UNREAD_FOLDERS and not each.startswith(".")
            ]
            for name in names:
                file = Path(folder, name)
                if file.suffix.lower() not in _UNREAD_SUFFIXES and not name.startswith("."):
                    yield f"{number}/{file.relative_to(root).as_posix()}", file


def _file_marks(spec: ModelSpec) -> list[tuple[str | int, ...]] | None:
    """Identify a version of each file without reading it; None if that is not possible."""
    marks: list[tuple[str | int, ...]] = []
    try:
        for name, file in _files(spec):
            stat = file.stat()
            times = (stat.st_mtime_ns, stat.st_ctime_ns)
            marks.append((name, str(file.resolve()), stat.st_dev, stat.st_ino, stat.st_size, *times))
            if len(marks) > MAX_FILES:
                return None
    except OSError:
        return None
    return sorted(marks) or None


def _content_digest(spec: ModelSpec, is_stopped: Callable[[], bool]) -> str:
    """A hash of all files. It is cached on disk, and only one process at a time computes it."""
    marks = _file_marks(spec)
    if marks is None:
        raise OSError("the model's files cannot be identified")
    name = hashlib.blake2b(repr(marks).encode(), digest_size=16).hexdigest()
    record = cache_folder() / "revisions" / name
    with _locked(record) as known:
        if known:
            return known
        digest = hashlib.blake2b(digest_size=16)
        for inner_name, file in sorted(_files(spec)):
            digest.update(f"{len(inner_name)}:{inner_name}:{file.stat().st_size}:".encode())
            _hash_file(file, digest, is_stopped)
        if _file_marks(spec) != marks:
            raise OSError("the model's files changed while they were read")
        with contextlib.suppress(OSError):  # with a read-only home, the files are read again next time
            draft = record.with_suffix(f".{os.getpid()}.part")
            draft.write_text(digest.hexdigest())
            draft.replace(record)
        return digest.hexdigest()


@contextlib.contextmanager
def _locked(record: Path) -> Iterator[str]:
    """Lock a record, and give its content; "" if there is none."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(record.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        known = ""
        with contextlib.suppress(OSError):
            known = record.read_text()
        yield known


def _hash_file(file: Path, digest: hashlib.blake2b, is_stopped: Callable[[], bool]) -> None:
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(PIECE_BYTES):
            if is_stopped():
                raise _Stopped
            digest.update(piece)

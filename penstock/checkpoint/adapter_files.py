"""Finds the files of a LoRA adapter, and identifies their content. Free of torch."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from penstock.checkpoint import hub
from penstock.checkpoint.find import is_hub_id
from penstock.errors import AdapterNotFound, BadValue, ModelLoadError, shown

CONFIG = "adapter_config.json"
_FILES = (CONFIG, "adapter_model.safetensors", "adapter_model.bin")
Marks = tuple[tuple[str, int, int, int], ...]


def find_adapter(path: str, root: str | None = None, download_dir: str | None = None) -> Path:
    """The folder of an adapter: `path`, or the downloaded files if it is a hub id.

    With `root`, only folders below it are allowed, and relative paths are resolved against it.
    """
    try:
        return _find(path, root, download_dir)
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, no home folder
        raise BadValue(
            f"the adapter's path {shown(path)} cannot be used: {error}", param="lora_path"
        ) from None


def _find(path: str, root: str | None, download_dir: str | None) -> Path:
    given = Path(path).expanduser()
    if root is not None:
        top = Path(root).resolve()
        folder = (top / given).resolve()  # resolves links, which may lead out of `top`
        if not folder.is_relative_to(top):
            raise BadValue(f"the adapter's path {path!r} is not below --lora-root", param="lora_path")
    else:
        folder = given
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise AdapterNotFound(f"{path!r} has no {CONFIG}, so it is no LoRA adapter", param="lora_path")
        if root is not None:
            _check_links(folder, Path(root).resolve(), path)
        return folder.absolute()
    if root is None and not given.is_absolute() and not given.exists() and is_hub_id(path):
        return hub.fetch(path, None, download_dir)
    raise AdapterNotFound(f"there is no folder {path!r} with a LoRA adapter", param="lora_path")


def _check_links(folder: Path, top: Path, path: str) -> None:
    """Refuse a folder whose files are links to files outside of `top`."""
    for name in _FILES:
        if (folder / name).is_file() and not (folder / name).resolve().is_relative_to(top):
            raise BadValue(f"{name} of the adapter {path!r} is not below --lora-root", param="lora_path")


def file_marks(folder: str | Path) -> Marks:
    """Identify a version of the adapter's files without reading them."""
    marks = []
    for name in _FILES:
        file = Path(folder, name)
        if file.is_file():
            stat = file.stat()
            marks.append((name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(marks)


def adapter_digest(folder: str | Path) -> str:
    """A hash of the adapter's files, which are read again only if they have changed. May block."""
    try:
        return _digest(str(folder), file_marks(folder))
    except OSError as error:
        raise ModelLoadError(f"the adapter in {folder} cannot be read: {error.strerror}") from None


@lru_cache(4096)
def _digest(folder: str, marks: Marks) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for name, _, size, _ in marks:
        whole.update(f"{name}:{size}:".encode())
        with Path(folder, name).open("rb") as stream:
            whole.update(hashlib.file_digest(stream, hashlib.blake2b).digest())
    return whole.hexdigest()

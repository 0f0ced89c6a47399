"""Models without `tokenizer.json`: converted once by transformers, in a process of its own, and kept.

The conversion runs outside this process because transformers brings torch with it, which an API
process never imports.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

from penstock.errors import ModelLoadError

log = logging.getLogger(__name__)
_SOURCES = (
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
# What else decides how a vocabulary is used: class, casing, special and added tokens.
_SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_PROGRAM = """
import sys
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True).backend_tokenizer.save(sys.argv[2])
"""


def tokenizer_file(folder: Path) -> Path:
    """The model's `tokenizer.json`, made from its older files if it has none."""
    file = folder / "tokenizer.json"
    if file.is_file():
        return file
    sources = [folder / name for name in _SOURCES if (folder / name).is_file()]
    if not sources:
        raise ModelLoadError(f"{folder} has no tokenizer.json and no vocabulary to make one from")
    kept = _kept(sources + [folder / name for name in _SETTINGS if (folder / name).is_file()])
    if not kept.is_file():
        _convert(folder, kept)
    return kept


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def _kept(sources: list[Path]) -> Path:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache_folder() / "tokenizers" / f"{digest.hexdigest()[:32]}.json"


def _convert(folder: Path, kept: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ModelLoadError(
            f"{folder} has no tokenizer.json; install penstock[hf], which converts its vocabulary once"
        )
    log.warning("%s has no tokenizer.json: converting its vocabulary once, into %s", folder, kept)
    kept.parent.mkdir(parents=True, exist_ok=True)
    draft = kept.with_suffix(f".{os.getpid()}.part")
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), str(draft)], capture_output=True, text=True, check=False
    )
    if ran.returncode != 0 or not draft.is_file():
        lines = ran.stderr.strip().splitlines()
        raise ModelLoadError(
            f"{folder}: its vocabulary could not be converted: {lines[-1] if lines else '?'}"
        )
    draft.replace(kept)

"""The fingerprint by which an ingress process and an engine replica check that they have the same model.

The tokens of one must fit the other. An update replaces the processes one after another, on machines that may
hold different files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from penstock import __version__
from penstock.checkpoint.spec import ModelSpec
from penstock.serving.launch import AdapterLaunch

_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer.model", "tokenizer_config.json")
_PLACES = ("folder", "root")  # fields that differ between machines


def fingerprint(spec: ModelSpec, adapters: Sequence[AdapterLaunch] = ()) -> str:
    """Hash a model's description, tokenizer files and adapters, independent of where the files are."""
    described = {name: value for name, value in msgspec.to_builtins(spec).items() if name not in _PLACES}
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.json.encode([__version__, described], order="deterministic"))
    for name in _TOKENIZER_FILES:
        file = spec.path / name
        if file.is_file():
            digest.update(hashlib.blake2b(file.read_bytes()).digest())
    for each in adapters:
        digest.update(msgspec.json.encode(["adapter", each.id, each.name, each.digest]))
    return digest.hexdigest()

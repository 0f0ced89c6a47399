"""Whether a checkpoint can generate text, and which tokens end a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.families import Architecture
from penstock.checkpoint.files import PICKLES, CheckpointFiles, optional_json
from penstock.checkpoint.pickles import may_hold
from penstock.checkpoint.tensors import header_bytes

_HEAD = "lm_head.weight"
_HEADS = (_HEAD, "lm_head.weight_packed", "lm_head.qweight")  # the others are in quantised checkpoints


def eos_token_ids(files: CheckpointFiles) -> tuple[int, ...]:
    """The tokens that end a sequence, from generation_config.json and config.json."""
    found: list[Any] = []
    for source in (optional_json(files.folder / "generation_config.json"), files.config):
        ids = source.get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids]
    given = [token for token in found if token is not None]
    if any(type(token) is not int for token in given):
        raise ValueError(f"eos_token_id is {given}; it has to be a token id or a list of them")
    return tuple(dict.fromkeys(given))


def why_not_generate(folder: Path, architecture: Architecture, config: Mapping[str, Any]) -> str | None:
    """Why a checkpoint cannot generate; None if it can."""
    if config.get("tie_word_embeddings") is False and not _has_head(folder):
        return f"the checkpoint has no {_HEAD}, and tie_word_embeddings is false"
    if (why := architecture.family.why_whole_rows) is not None:
        return f"{architecture.name} cannot: {why}"
    if not architecture.has_language_head:
        return f"{architecture.name} has no language-model head"
    if not architecture.family.is_causal(config) and not architecture.family.generates_by_default:
        return f"{architecture.name} is not causal"
    return None


def _has_head(folder: Path) -> bool:
    """Whether the weights include a language-model head, which some checkpoints are saved without.

    True if there are no weight files.
    """
    for kind in ("model.safetensors", "pytorch_model.bin"):
        if (where := optional_json(folder / f"{kind}.index.json").get("weight_map")) is not None:
            return any(name.endswith(_HEADS) for name in where)
        if (folder / kind).is_file():
            return _may_hold(folder / kind)
    return True


def _may_hold(file: Path) -> bool:
    if file.suffix in PICKLES:
        return any(may_hold(file, head) for head in _HEADS)
    try:
        header = header_bytes(file)
    except ValueError:  # the error is reported when the weights are loaded
        return False
    return any(f'{head}"'.encode() in header for head in _HEADS)

"""How long a row may be: what the weights allow, and what the model is meant for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.families import Family
from penstock.checkpoint.files import CheckpointFiles, integer, optional_json

_NO_LIMIT = 1_000_000  # tokenizers without a limit name a far larger number


def max_positions(family: Family, config: Mapping[str, Any], file: Path = Path("config.json")) -> int:
    """The longest row that the weights allow."""
    positions = integer(config, *family.keys.max_positions, file=file)
    if family.positions_follow_padding:
        positions -= int(config.get("pad_token_id", 1)) + 1
    if family.keys.trained_positions is not None and config.get("rotary_scaling_factor") is not None:
        # Beyond the trained length, angles would depend on the length of each text.
        positions = min(positions, int(config.get(family.keys.trained_positions) or positions))
    return positions


def max_model_len(files: CheckpointFiles, positions: int) -> int:
    """The length that the model is meant for: that of sentence-transformers, else the tokenizer's, within
    what the weights allow."""
    if isinstance(files.transformer.get("max_seq_length"), int):
        return min(positions, int(files.transformer["max_seq_length"]))
    length = optional_json(files.folder / "tokenizer_config.json").get("model_max_length")
    if isinstance(length, int) and length < _NO_LIMIT:
        return min(positions, length)
    return positions

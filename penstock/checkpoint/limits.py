"""Limits of the row length: what the weights allow, and what the model is intended for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.families import Family
from penstock.checkpoint.files import CheckpointFiles, integer, optional_json, shown
from penstock.errors import ModelLoadError

_NO_LIMIT = 1_000_000  # tokenizers without a limit have a far larger model_max_length


def max_positions(family: Family, config: Mapping[str, Any], file: Path = Path("config.json")) -> int:
    """The longest row that the weights allow."""
    if family.max_row_length is not None:
        return family.max_row_length
    positions = integer(config, *family.keys.max_positions, file=file)
    if family.positions_follow_padding:
        padding = config.get("pad_token_id", 1)
        if not isinstance(padding, int) or isinstance(padding, bool) or not 0 <= padding < positions - 1:
            raise ModelLoadError(
                f"{file} has pad_token_id = {shown(padding)}; positions are counted from it, so it has to be "
                f"an integer from 0 to {positions - 2}",
                param="model",
            )
        positions -= padding + 1
    if family.keys.trained_positions is not None and config.get("rotary_scaling_factor") is not None:
        # Beyond the trained length, angles would depend on the length of each text.
        positions = min(positions, int(config.get(family.keys.trained_positions) or positions))
    return positions


def any_max_positions(files: CheckpointFiles, family: Family) -> int:
    """The same for a model that transformers runs. If config.json has no limit, other files are read."""
    file, limit = files.folder / "config.json", 1 << 24
    if family.max_row_length is not None or any(
        files.config.get(key) is not None for key in family.keys.max_positions
    ):
        return max_positions(family, files.config, file)
    if (length := max_model_len(files, limit)) < limit:
        return length
    raise ModelLoadError(
        f"no file in {files.folder} says how long a text may be; set the limit, for example with "
        """--hf-overrides '{"max_position_embeddings": 512}'""",
        param="model",
    )


def max_model_len(files: CheckpointFiles, positions: int, trained: int | None = None) -> int:
    """The row length that the model is intended for, at most `positions`.

    It comes from the sentence-transformers files, otherwise from the tokenizer, otherwise from the length
    that the family was `trained` with.
    """
    length = files.transformer.get("max_seq_length")
    if type(length) is int:
        return min(
            positions, _at_least_one(length, f"max_seq_length of the Transformer module in {files.folder}")
        )
    tokenizer = files.folder / "tokenizer_config.json"
    length = optional_json(tokenizer).get("model_max_length")
    if type(length) is int and length < _NO_LIMIT:
        return min(positions, _at_least_one(length, f"model_max_length in {tokenizer}"))
    return positions if trained is None else min(positions, trained)


def _at_least_one(length: int, source: str) -> int:
    if length < 1:
        raise ModelLoadError(f"{source} is {length}; it has to be at least 1", param="model")
    return length

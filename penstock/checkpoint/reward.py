"""What a reward model scores: a whole text, or each of its steps."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.checkpoint.families import Architecture
from penstock.checkpoint.files import CheckpointFiles, optional_json
from penstock.checkpoint.pooling import STEP, is_pooling_type
from penstock.config import PoolerConfig
from penstock.errors import ModelLoadError

_STEP_TAG = "<extra_0>"  # ends a step, unless step_tag_id is set


class RewardSpec(msgspec.Struct, frozen=True):
    steps: bool = False
    tag: int | None = None  # the token that ends a step


def read_reward(
    files: CheckpointFiles, architecture: Architecture, pooler: PoolerConfig
) -> RewardSpec | None:
    """Read what is scored; None for a model without a reward or classification head."""
    wants_steps = is_pooling_type(pooler, STEP)
    if not architecture.is_reward_model and not architecture.classifies_sequences:
        if wants_steps:
            raise ModelLoadError(
                f"pooling_type STEP needs a reward model or a sequence classifier; "
                f"{architecture.name} is neither",
                param="pooler_config",
            )
        return None
    if not wants_steps and not architecture.is_process_reward_model:
        return RewardSpec()
    tag = pooler.step_tag_id if pooler.step_tag_id is not None else _added_token(files.folder, _STEP_TAG)
    if tag is None:
        raise ModelLoadError(
            f"STEP pooling needs step_tag_id in the pooler config: the tokenizer has no {_STEP_TAG}",
            param="pooler_config",
        )
    return RewardSpec(steps=True, tag=tag)


def _added_token(folder: Path, token: str) -> int | None:
    """The id of an added token, without loading the tokenizer."""
    for entry in optional_json(folder / "tokenizer.json").get("added_tokens") or ():
        if entry.get("content") == token:
            return int(entry["id"])
    return None

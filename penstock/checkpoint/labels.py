"""The labels of classifiers and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.families import Architecture


def label_count(config: Mapping[str, Any], default: int = 2) -> int:
    """How many outputs a classifier has; `default` where config.json does not say."""
    return int(config.get("num_labels") or len(config.get("id2label") or ()) or default)


def reward_count(config: Mapping[str, Any]) -> int:
    """How many outputs a reward model has: one, or two where it judges steps (wrong, right)."""
    name = str((config.get("architectures") or [""])[0])
    return label_count(config, default=2 if name.endswith("ForProcessRewardModel") else 1)


def label_names(architecture: Architecture, config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label") or {}
    count = reward_count(config) if architecture.is_reward_model else label_count(config)
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))

"""The labels of classifiers and reward models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.checkpoint.families import Architecture


def label_count(config: Mapping[str, Any], default: int = 2) -> int:
    """Number of outputs of a classifier; `default` if config.json does not say."""
    return int(config.get("num_labels") or len(config.get("id2label") or ()) or default)


def reward_count(config: Mapping[str, Any]) -> int:
    """Number of outputs of a reward model. Default: one, or two if it scores steps (wrong, right)."""
    name = str((config.get("architectures") or [""])[0])
    return label_count(config, default=2 if name.endswith("ForProcessRewardModel") else 1)


class NliLabels(NamedTuple):
    """The labels of a natural-language-inference classifier that zero-shot classification reads."""

    entailment: int
    contradiction: int  # with two labels, the other one


def nli_labels(names: Sequence[str]) -> NliLabels | None:
    """Find the labels for entailment and contradiction; None if the names are ambiguous."""
    lowered = [name.lower() for name in names]
    entailments = [index for index, name in enumerate(lowered) if name.startswith("entail")]
    if len(entailments) != 1 or len(names) < 2:
        return None
    if len(names) == 2:
        return NliLabels(entailments[0], 1 - entailments[0])
    contradictions = [index for index, name in enumerate(lowered) if name.startswith("contra")]
    return NliLabels(entailments[0], contradictions[0]) if len(contradictions) == 1 else None


def label_names(architecture: Architecture, config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label") or {}
    count = reward_count(config) if architecture.is_reward_model else label_count(config)
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))

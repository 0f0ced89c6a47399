"""The tasks that remain if transformers runs a model (`--model-impl transformers`)."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.checkpoint.families import COLBERT_CLASS
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import ModelLoadError
from penstock.types import Task


def run_by_transformers(spec: ModelSpec) -> ModelSpec:
    """Reduce a model to what transformers can run: its trained head, or hidden states and their pooling.

    There is no KV cache.
    """
    if spec.reads_labels:
        raise ModelLoadError(
            f"model_impl is transformers, which has no {spec.architecture}; leave --model-impl out",
            param="model_impl",
        )
    first = spec.tasks[0]
    if spec.architecture == COLBERT_CLASS:
        raise ModelLoadError(
            f"--model-impl transformers cannot run {spec.architecture}: its projection to token vectors is "
            "stored with the backbone, where transformers does not read it; leave the flag out",
            param="model_impl",
        )
    if spec.reward is not None and spec.reward.steps:
        raise ModelLoadError(
            f"--model-impl transformers does not judge steps; leave out pooling_type STEP for "
            f"{spec.architecture}",
            param="pooler_config",
        )
    plain: dict[str, Any] = {
        "is_causal": False,
        "why_not_generate": "--model-impl transformers does not generate",
    }
    if first in (Task.CLASSIFY, Task.TOKEN_CLASSIFY, Task.SPARSE):
        tasks = tuple(task for task in spec.tasks if task not in (Task.EMBED, Task.TOKEN_EMBED))
        return msgspec.structs.replace(spec, tasks=tasks, **plain)
    hidden = (Task.EMBED, Task.TOKEN_EMBED)
    if first in hidden:
        return msgspec.structs.replace(spec, **plain)
    # Heads without a class in transformers: answer tokens, marks, rewards.
    return msgspec.structs.replace(spec, tasks=hidden, score=None, reward=None, **plain)

"""The tasks that a checkpoint offers."""

from __future__ import annotations

from penstock.checkpoint.families import Architecture
from penstock.checkpoint.files import CheckpointFiles
from penstock.checkpoint.labels import label_count
from penstock.checkpoint.score import ScoreSpec
from penstock.checkpoint.sparse import SparseSpec
from penstock.types import LABELLED_TASKS, Task


def pooling_tasks(
    files: CheckpointFiles, architecture: Architecture, sparse: SparseSpec | None, score: ScoreSpec | None
) -> tuple[Task, ...]:
    """The tasks that the weights allow; the one that the checkpoint was trained for comes first.

    Models that read pairs score them; embedders score by comparing vectors.
    """
    if labelled := architecture.family.heads & LABELLED_TASKS:
        return tuple(labelled)
    if sparse is not None and sparse.kind == "splade":
        return (Task.SPARSE, Task.EMBED, Task.TOKEN_EMBED)
    if sparse is not None:
        return (Task.EMBED, Task.TOKEN_EMBED, Task.SPARSE, Task.SCORE)
    if score is not None and (score.tokens or score.marks):
        return (Task.SCORE, Task.EMBED, Task.TOKEN_EMBED)
    if architecture.classifies_sequences:
        scores = () if score is None else (Task.SCORE,)
        rewards = (Task.REWARD,) if label_count(files.config) == 1 else ()
        return (Task.CLASSIFY, *scores, *rewards, Task.EMBED, Task.TOKEN_EMBED)
    if architecture.is_reward_model:
        return (Task.REWARD, Task.EMBED, Task.TOKEN_EMBED)
    if architecture.classifies_tokens:
        return (Task.TOKEN_CLASSIFY, Task.EMBED, Task.TOKEN_EMBED)
    if architecture.family.is_dual:
        return (Task.EMBED, Task.SCORE)
    return (Task.EMBED, Task.TOKEN_EMBED, Task.SCORE)


def late_tasks(files: CheckpointFiles) -> tuple[Task, ...]:
    """The tasks of late interaction. One vector for the whole text requires a Pooling module."""
    pooled = (Task.EMBED,) if files.has_module("Pooling") else ()
    return (Task.TOKEN_EMBED, *pooled, Task.SCORE)


def without_score(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    return tuple(task for task in tasks if task is not Task.SCORE)

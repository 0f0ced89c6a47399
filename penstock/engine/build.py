"""Puts an engine together: description → settings → runner, scheduler, core."""

from __future__ import annotations

from collections.abc import Callable

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.engine.core import EngineCore, StepStats
from penstock.runner.load import load_runner
from penstock.scheduler.scheduler import Budget, Scheduler


def build_core(
    spec: ModelSpec,
    settings: Resolved,
    wake: Callable[[], None],
    observe: Callable[[StepStats], None] = lambda stats: None,
) -> EngineCore:
    budget = Budget(settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_queued_tokens)
    return EngineCore(
        load_runner(spec, settings),
        Scheduler(budget),
        depth=settings.pipeline_depth,
        wake=wake,
        observe=observe,
    )

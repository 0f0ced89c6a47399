"""Puts an engine together: description → settings → runner, scheduler, core."""

from __future__ import annotations

from collections.abc import Callable

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.engine.core import EngineCore, StepStats
from penstock.kvcache.blocks import BlockPool
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.load import load_runner
from penstock.scheduler.lane import Lane, LaneLimits
from penstock.scheduler.scheduler import Budget, Chunking, Scheduler
from penstock.scheduler.vectors import VectorPlaces


def build_core(
    spec: ModelSpec,
    settings: Resolved,
    wake: Callable[[], None],
    observe: Callable[[StepStats], None] = lambda stats: None,
) -> EngineCore:
    budget = Budget(settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_queued_tokens)
    loaded = load_runner(spec, settings)
    pool = BlockPool(loaded.num_blocks, BLOCK_SIZE)
    chunking = lane = None
    if settings.chunked:
        chunking = Chunking(pool, settings.chunk_tokens, settings.prefix_caching)
    if settings.generates:
        limits = LaneLimits(
            rows=settings.max_num_seqs,
            tokens=settings.max_num_batched_tokens,
            chunk_tokens=settings.chunk_tokens,
            length=settings.max_model_len,
            queued_tokens=settings.max_queued_tokens,
            prefixes=settings.generate_prefixes,
        )
        lane = Lane(pool, limits)
    places = None
    if loaded.num_places:
        places = VectorPlaces(loaded.num_places, documents=settings.document_cache_bytes > 0)
    return EngineCore(
        loaded.runner,
        Scheduler(budget, chunking, places),
        depth=settings.pipeline_depth,
        wake=wake,
        observe=observe,
        share_identical=settings.share_identical,
        lane=lane,
    )

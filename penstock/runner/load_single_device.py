"""Load a model on one device, with its draft model if it has one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import msgspec
import torch

from penstock.checkpoint.revision import loaded_revision
from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.errors import ModelLoadError
from penstock.kvcache.store import KVCache
from penstock.layers.images import VisionTower
from penstock.models.registry import CausalModel, Model
from penstock.pooling.build import Pooler
from penstock.runner.adapters import AdapterPool
from penstock.runner.base import DraftRunner, Sleeper
from penstock.runner.cuda_device import use_device
from penstock.runner.generator import Generator
from penstock.runner.graph_history import GraphHistory
from penstock.runner.images import ImageRunner
from penstock.runner.load import Loaded, num_image_features, warn_of_unmarked
from penstock.runner.load_kv_cache import allocate_cache, make_cache
from penstock.runner.load_warmup import warm_up_draft, warm_up_runner
from penstock.runner.load_weights import adapter_sites, build_weights, num_vectors
from penstock.runner.model_runner import ModelRunner
from penstock.runner.sleep import ModelSleeper
from penstock.runner.stopwatch import Stopwatch
from penstock.types import Task

log = logging.getLogger("penstock.load")
_IMAGE_CACHE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


class Parts(NamedTuple):
    """The parts of a runner."""

    model: Model
    pooler: Pooler
    cache: KVCache | None
    generator: Generator | None
    num_blocks: int  # of the cache
    images: ImageRunner | None = None
    draft: Parts | None = None  # of the draft model


def load_single_device(spec: ModelSpec, settings: Resolved, watch: Stopwatch) -> Loaded:
    device = torch.device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(settings.threads)
    parts = _build_parts(spec, settings, watch)
    model, pooler, cache, generator, blocks, images, _ = parts
    num_cached_vectors = num_vectors(pooler)
    runner = ModelRunner(
        model,
        pooler,
        device,
        settings.pipeline_depth,
        cache,
        generator,
        graphs=settings.graphs,
        images=images,
    )
    runner.graph_history = _graph_history(spec, settings) if runner.graphs is not None else None
    adapters = runner.adapters = _adapter_pool(model, settings, runner)
    warm_up_runner(runner, spec, settings, blocks, watch)
    draft = None if parts.draft is None else _draft_runner(parts.draft, spec, settings, runner, watch)
    log.info("%s", watch)
    warn_of_unmarked(spec)
    # After a wake, the KV cache must have the same number of blocks, however much memory is free then.
    caches = [cache, None if parts.draft is None else parts.draft.cache]
    cache_bytes = sum(each.store.nbytes for each in caches if each is not None)
    again = msgspec.structs.replace(settings, kv_cache_bytes=cache_bytes)

    def install() -> None:
        with _without_repeated_warnings():
            parts = _build_parts(spec, again, Stopwatch())
        if parts.num_blocks != blocks:
            raise ModelLoadError(f"the KV cache has {parts.num_blocks} blocks instead of {blocks}")
        runner.install(parts.model, parts.pooler, parts.cache, parts.generator, parts.images)
        if draft is not None and (made := parts.draft) is not None:
            draft.install(made.model, made.pooler, made.cache, made.generator)
        if adapters is not None and (sites := adapter_sites(parts.model)) is not None:
            adapters.attach(sites)

    num_features = 0 if images is None else len(images.store)
    return Loaded(
        runner,
        blocks,
        num_cached_vectors,
        num_features,
        _sleeper(runner, draft, spec, install),
        background=runner.background,
        adapters=runner.adapters,
        replays_mixed_steps=(lambda: runner.mixed is None or runner.mixed.is_usable)
        if settings.graphs
        else None,
        idle_work=runner if runner.graphs is not None else None,
        draft=None if draft is None else _described_draft(draft, spec, settings),
    )


def _sleeper(
    runner: ModelRunner, draft: ModelRunner | None, spec: ModelSpec, install: Callable[[], None]
) -> Sleeper:
    if draft is None or spec.draft is None:
        return ModelSleeper(runner, spec.path, install)
    return ModelSleeper(runner, spec.path, install, draft=draft, draft_folder=spec.draft.path)


def _described_draft(runner: ModelRunner, spec: ModelSpec, settings: Resolved) -> DraftRunner:
    assert spec.draft is not None and settings.draft is not None and runner.generator is not None
    max_length = settings.draft.max_model_len
    vocab_size, padding_slot = spec.draft.vocab_size, runner.generator.padding_slot
    return DraftRunner(runner, spec.draft.name, vocab_size, max_length, padding_slot)


def _draft_runner(
    parts: Parts, spec: ModelSpec, settings: Resolved, target: ModelRunner, watch: Stopwatch
) -> ModelRunner:
    """The runner of a draft model, whose steps alternate with those of the target model."""
    assert spec.draft is not None and settings.draft is not None and settings.speculation is not None
    own = settings.draft
    runner = ModelRunner(
        parts.model,
        parts.pooler,
        target.device,
        own.pipeline_depth,
        parts.cache,
        parts.generator,
        graphs=own.graphs,
        beside=target,
    )
    warm_up_draft(runner, own, parts.num_blocks, watch)
    log.info(
        "the draft model %s proposes up to %d tokens, in sequences of up to %d",
        spec.draft.name,
        settings.speculation.num_speculative_tokens,
        own.max_model_len,
    )
    return runner


def _graph_history(spec: ModelSpec, settings: Resolved) -> GraphHistory | None:
    """The shapes of earlier runs of the same model with the same settings on the same kind of GPU."""
    revision = loaded_revision(spec, msgspec.to_builtins(settings)) if settings.graph_history else ""
    gpu = torch.cuda.get_device_name(settings.device) if settings.device.startswith("cuda") else "cpu"
    return GraphHistory(f"{revision} {gpu} {torch.__version__}") if revision else None


def _adapter_pool(model: Model, settings: Resolved, runner: ModelRunner) -> AdapterPool | None:
    """The pool of adapters that are loaded at run time or with the checkpoint; None: the model takes none."""
    if (sites := adapter_sites(model)) is None:
        return None
    pool = AdapterPool(sites, settings.max_cpu_loras, getattr(torch, settings.dtype), runner.device)
    pool.on_growth = runner.forget_adapter_graphs
    return pool


@contextmanager
def _without_repeated_warnings() -> Iterator[None]:
    """Suppress warnings about unused parts of a checkpoint. They were logged when it was first loaded."""
    levels = {name: logging.getLogger(name).level for name in ("penstock.load", "penstock.models")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _build_parts(spec: ModelSpec, settings: Resolved, watch: Stopwatch) -> Parts:
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    use_device(device)
    with watch.timed("weights"):
        model, pooler = build_weights(spec, settings, device)
    draft_model, draft = None, None
    if spec.draft is not None and settings.draft is not None:
        with watch.timed("draft weights"):
            draft_model, draft_pooler = build_weights(spec.draft, settings.draft, device)
    cache, blocks = None, 0
    generator = None
    with watch.timed("memory"):
        if settings.generates:
            generator = Generator(model.heads[Task.GENERATE], settings.max_num_seqs, device)
            if settings.speculation is not None:
                generator.max_rows *= 1 + settings.speculation.num_speculative_tokens
        if settings.chunked or settings.generates:
            others = [] if draft_model is None else [cast(CausalModel, draft_model)]
            cache, blocks = make_cache(cast(CausalModel, model), settings, dtype, device, others)
        if draft_model is not None and settings.draft is not None and generator is not None:
            own = Generator(
                draft_model.heads[Task.GENERATE], settings.max_num_seqs, device, generator.sampler.plan.seed
            )
            own.max_rows *= 2  # the first draft step may run two tokens of each sequence
            own_cache = allocate_cache(cast(CausalModel, draft_model), settings.draft, dtype, device, blocks)
            draft = Parts(draft_model, draft_pooler, own_cache, own, blocks)
        images = _image_runner(model, settings, dtype, device)
    return Parts(model, pooler, cache, generator, blocks, images, draft)


def _image_runner(
    model: Model, settings: Resolved, dtype: torch.dtype, device: torch.device
) -> ImageRunner | None:
    """The vision tower with the store of its features, if the model has one."""
    tower: VisionTower | None = getattr(model, "vision", None)
    if tower is None:
        return None
    cached = _IMAGE_CACHE_BYTES[device.type] // (tower.feature_width * dtype.itemsize)
    return ImageRunner(tower, num_image_features(settings, cached), dtype, device)

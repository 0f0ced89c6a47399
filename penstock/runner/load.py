"""Build a runner from a resolved configuration. Torch is imported only for runners that compute.

`load_single_device` and `parallel.load` load a model, with the parts that `load_weights`, `load_kv_cache` and
`load_warmup` make.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.checkpoint.sharding import check_shards
from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, Machine, Resolved, available_cpus, resolve, unused_settings
from penstock.errors import DeviceFailed
from penstock.runner.base import (
    BLOCK_SIZE,
    LATE_VECTORS,
    AdapterStore,
    BackgroundSteps,
    DraftRunner,
    IdleWork,
    Runner,
    Sleeper,
)
from penstock.runner.stopwatch import Stopwatch
from penstock.types import Task

log = logging.getLogger("penstock.load")

OnDeviceFailed = Callable[[DeviceFailed], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner, the sizes of its stores, and its optional parts."""

    runner: Runner
    num_blocks: int = 0  # of the KV cache
    num_cached_vectors: int = 0  # vectors in the store that scores read from
    num_image_features: int = 0  # slots of the store of image features; 0: the model reads no images
    sleeper: Sleeper | None = None  # None: the runner cannot sleep
    background: BackgroundSteps | None = None  # None: the runner's steps cannot be interrupted
    adapters: AdapterStore | None = None  # None: the runner takes no adapters
    # Whether mixed steps of prompts and decodes run as CUDA graphs now. None: this runner has no graphs.
    replays_mixed_steps: Callable[[], bool] | None = None
    idle_work: IdleWork | None = None  # None: no work while idle
    draft: DraftRunner | None = None  # None: no draft model
    # Calls a function, on another thread, if the device is lost while no step runs.
    watch: Callable[[OnDeviceFailed], None] | None = None


def settle(config: EngineConfig, spec: ModelSpec) -> Resolved:
    settings = resolve(config, spec.facts, this_machine(config.device))
    check_shards(spec, settings)
    for name in unused_settings(config, spec.facts):
        flag = "--" + name.replace("_", "-")
        log.warning("%s changes nothing: model %s does not generate text", flag, spec.name)
    return settings


def this_machine(device: str) -> Machine:
    cpus = available_cpus()
    if device in ("cpu", "null"):
        return Machine(cpus=cpus, cuda=False)
    import torch

    cuda = torch.cuda.is_available()
    return Machine(
        cpus=cpus,
        cuda=cuda,
        bf16=cuda and torch.cuda.is_bf16_supported(),
        fp8=cuda and torch.cuda.get_device_capability() >= (8, 9),
        num_gpus=torch.cuda.device_count() if cuda else 0,
    )


def load_runner(spec: ModelSpec, settings: Resolved) -> Loaded:
    loaded = _load(spec, settings)
    if not settings.profile:
        return loaded
    from penstock.runner.profile import ProfiledRunner

    return replace(
        loaded, runner=ProfiledRunner(loaded.runner, Path(settings.profile), settings.profile_steps)
    )


def _load(spec: ModelSpec, settings: Resolved) -> Loaded:
    if settings.device == "null":
        from penstock.runner.null import NullAdapters, NullRunner, NullSleeper

        cached = settings.chunked or settings.generates
        blocks = -(-4 * settings.max_model_len // BLOCK_SIZE) if cached else 0
        widths: dict[Task, int] = {t: spec.width(t) for t in spec.tasks if t is not Task.GENERATE}
        own = len(spec.adapters)
        adapters = NullAdapters(own, settings.max_loras or own) if settings.max_loras or own else None
        runner = NullRunner(widths, settings.null_step_s)
        features = num_image_features(settings, 0)
        return Loaded(runner, blocks, LATE_VECTORS, features, NullSleeper(), adapters=adapters)
    if is_parallel(settings):
        from penstock.runner.parallel.load import load_parallel

        return load_parallel(spec, settings)
    watch = Stopwatch()
    with watch.timed("imports"):
        from penstock.runner.load_single_device import load_single_device

    return load_single_device(spec, settings, watch)


def is_parallel(settings: Resolved) -> bool:
    """Whether several ranks compute the model. Tests replace this to run one rank as if there were more."""
    return settings.tensor_parallel_size > 1


def num_image_features(settings: Resolved, num_cached: int) -> int:
    """Slots of the feature store: at least enough for a whole step, and for a row that runs alone."""
    return max(settings.max_num_batched_tokens, settings.max_model_len, num_cached)


def warn_of_unmarked(spec: ModelSpec) -> None:
    if spec.is_unmarked:
        log.warning(
            "the vectors of %s may mean nothing: it was not made to embed, or its files do not say so. It "
            "has no score task: %s",
            spec.name,
            spec.why_not_score,
        )

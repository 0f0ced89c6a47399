"""Small steps before the first request, so that it does not pay for lazy set-up."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.kvcache.blocks import BlockPool
from penstock.runner.base import BLOCK_SIZE, Runner
from penstock.runner.buckets import bucket_of
from penstock.runner.graph_keys import Key
from penstock.runner.graph_policy import USES_BEFORE_CAPTURE
from penstock.runner.likely_shapes import likely_buckets
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.plan import build_plan
from penstock.scheduler.prompt_lookup import PromptLookup
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import (
    PoolingParams,
    PoolPlan,
    Request,
    RequestImages,
    SampledResult,
    SamplerParams,
    Task,
)

if TYPE_CHECKING:
    from penstock.checkpoint.spec import ModelSpec
    from penstock.config import Resolved
    from penstock.runner.decode import DecodeGraphs
    from penstock.runner.decode import Key as DecodeKey
    from penstock.runner.graphs import Graphs
    from penstock.runner.mixed import Key as MixedKey
    from penstock.runner.mixed import MixedGraphs

log = logging.getLogger("penstock.warmup")


class FreesSlots(Protocol):
    """The part of a sampler that a warm-up needs."""

    def leave(self, slot: int) -> None: ...


LENGTHS = (1, 64)
# On CUDA kernels are compiled on first use; each of these lengths needs another variant.
KERNEL_LENGTHS = (1, 17, 64, 128, 256)
# (rows, length) of steps that run several times. They measure the host and device times of different sizes,
# and allocate the pinned buffers that later steps use.
TIMED_SHAPES = ((1, 64), (16, 64), (64, 64), (64, 128))
MAX_MIXED_CAPTURE_S = 12.0  # mostly for kernels that are compiled for the first time on this machine


def warm_up(runner: Runner, max_tokens: int, lengths: tuple[int, ...] = LENGTHS) -> None:
    for length in sorted({min(length, max_tokens) for length in lengths}):
        runner.launch(_plan(1, length, PoolingParams())).result()


def warm_up_chunked_prefill(runner: Runner, block_size: int) -> None:
    """Run the second chunk of a row; nothing reads what it writes to the KV cache."""
    length, begin, end = 3 * block_size, block_size, 2 * block_size
    request = Request("warm-up", np.ones(length, dtype=np.int32), np.array([length], dtype=np.int32))
    row, first, stop = (np.array([number], dtype=np.int32) for number in (0, begin, end))
    share = ScheduledRows(request, row, first, stop, ([0, 1, 2],))
    runner.launch(build_plan([share], block_size)).result()


def warm_up_images(runner: Runner, spec: ModelSpec, max_tokens: int, max_length: int) -> None:
    """Run one image, of medium size if sizes differ. `max_tokens`: of images in a step; `max_length`: of a
    row."""
    if (processor := spec.images) is None:
        return
    are_rows = spec.dual is not None
    if not are_rows:
        max_tokens = min(max_tokens, max_length)
    side = processor.tile_patches
    if not are_rows and processor.sizes_differ and processor.tokens_of(side * side) > max_tokens:
        side //= 2  # a model with few positions
    num_patches = side * side
    tokens = num_patches if are_rows else processor.tokens_of(num_patches)
    zero, length = np.zeros(1, dtype=np.int32), np.array([tokens], dtype=np.int32)
    images = RequestImages(
        np.zeros((num_patches, processor.values_per_patch), dtype=np.uint8),
        np.array([[side, side]], dtype=np.int32),
        rows=zero,
        starts=zero,
        num_tokens=np.ones_like(length) if are_rows else length,
        digests=np.zeros((1, 16), dtype=np.uint8),
        are_rows=are_rows,
    )
    if tokens <= max_tokens:
        request = Request("warm-up", np.zeros(tokens, dtype=np.int32), length, images=images)
        share = ScheduledRows(request, zero)
        runner.launch(build_plan([share], image_cache=ImageCache(tokens))).result()


def time_steps(
    runner: Runner, params: PoolingParams, max_length: int, max_tokens: int, *, has_skip: bool = False
) -> None:
    """Run steps of a few sizes, with or without graphs. The second step of each size shows its usual time.
    They are too few to cause a capture."""
    for rows, length in TIMED_SHAPES:
        if length <= max_length and rows * length <= max_tokens:
            for _ in range(USES_BEFORE_CAPTURE):
                runner.launch(_plan(rows, length, params, has_skip)).result()


def kernel_keys(params: PoolingParams, settings: Resolved) -> list[Key]:
    """Keys of graphs that together launch every kernel of other graphs: short and long rows, and enough
    tokens that the last layer is computed only for the output tokens."""
    shapes = ((1, 32), (16, 64), (16, 128), (64, 128))
    fitting = [(rows, length) for rows, length in shapes if rows * length <= settings.max_num_batched_tokens]
    buckets = [bucket_of(rows * length, rows, length) for rows, length in fitting]
    return [Key(bucket, False, False, params) for bucket in buckets if bucket is not None]


def likely_keys(
    graphs: Graphs, params: PoolingParams, max_length: int, settings: Resolved, *, has_skip: bool = False
) -> list[Key]:
    """Keys of graphs for natural texts, ordered by the time that they save, most first. `has_skip`: pooling
    skips leading tokens of texts; such graphs also serve texts without skipped tokens."""
    gain_s = graphs.policy.times.gain_s
    counts = likely_buckets(max_length, settings.max_num_batched_tokens, settings.max_num_seqs)
    order = sorted(counts, key=lambda bucket: counts[bucket] * gain_s(bucket.tokens), reverse=True)
    return [Key(bucket, False, has_skip, params) for bucket in order]


def capture_graphs(graphs: Graphs, max_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
    """Capture planned graphs, for at most about `max_s` seconds; the last one may take longer."""
    began, num_planned = clock(), graphs.policy.num_planned
    while clock() - began < max_s and graphs.capture_next(is_planned=True):
        _show_progress(num_planned - graphs.policy.num_planned, num_planned)
    log.info(
        "captured %d graphs in %.1f s; %d more while idle",
        len(graphs.captured),
        clock() - began,
        graphs.policy.num_planned,
    )


def capture_decode_graphs(
    graphs: DecodeGraphs, keys: Sequence[DecodeKey], max_s: float
) -> Sequence[DecodeKey]:
    """Capture graphs of decode steps, for at most `max_s` seconds. Returns the keys that are left."""
    began, done = time.perf_counter(), 0
    while done < len(keys) and time.perf_counter() - began < max_s:
        graphs.ensure(keys[done])
        done += 1
        _show_progress(done, len(keys))
    elapsed = time.perf_counter() - began
    log.info("captured %d of %d decode graphs in %.1f s", len(graphs.captured), len(keys), elapsed)
    return keys[done:]


def capture_mixed_graphs(
    graphs: MixedGraphs, keys: Sequence[MixedKey], max_s: float = MAX_MIXED_CAPTURE_S
) -> None:
    """Capture graphs of mixed steps of prompts and decodes, for at most `max_s` seconds."""
    began = time.perf_counter()
    for done, key in enumerate(keys):
        if graphs.gave_up or time.perf_counter() - began > max_s:
            break
        graphs.ensure(key)
        _show_progress(done + 1, len(keys))
    elapsed = time.perf_counter() - began
    log.info("captured %d of %d graphs of mixed steps in %.1f s", len(graphs.captured), len(keys), elapsed)


def _show_progress(done: int, total: int) -> None:
    """Show a progress bar on a terminal."""
    if sys.stderr.isatty():
        bar = "█" * (20 * done // total)
        end = "\n" if done == total else ""
        print(f"\rcapturing graphs {bar:<20} {done}/{total}", end=end, file=sys.stderr, flush=True)  # noqa: T201


def _plan(rows: int, length: int, params: PoolingParams, has_skip: bool = False) -> PoolPlan:
    tokens = np.ones(rows * length, dtype=np.int32)
    skip = np.zeros(rows, dtype=np.int32) if has_skip else None
    request = Request("warm-up", tokens, np.full(rows, length, dtype=np.int32), params, skip=skip)
    return build_plan([ScheduledRows(request, np.arange(rows, dtype=np.int32))])


def warm_up_generation(
    runner: Runner, sampler: FreesSlots, num_blocks: int, max_tokens: int, *, speculates: bool = False
) -> None:
    """Run a prompt and generate a few tokens, on blocks and a slot that are freed afterwards. `speculates`:
    propose tokens of the prompt."""
    length = min(17, max_tokens)
    generation = GenerationScheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        GenerationLimits(1, max_tokens, max_tokens, length + 3, length, prefix_caching=False),
    )
    if speculates:
        generation.enable_speculation(lambda slots: PromptLookup(slots, 1, 1, 1), is_adaptive=False)
    tokens = np.ones(length, dtype=np.int32)
    sampling = SamplerParams(max_tokens=3, temperature=0)
    lengths = np.array([length], dtype=np.int32)
    generation.add(Request("warm-up", tokens, lengths, PoolingParams(Task.GENERATE), sampling=sampling))
    while (plan := generation.schedule(0.0)) is not None:
        result = runner.launch(plan).result()
        assert isinstance(result, SampledResult)
        generation.collect(plan, result)
    for slot in generation.take_freed_slots():
        sampler.leave(slot)

"""Small steps before the first request, so that it does not pay for lazy set-up."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.kvcache.blocks import BlockPool
from penstock.runner.base import BLOCK_SIZE, Runner
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.plan import build_plan
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
    from penstock.runner.decode import DecodeGraphs, Key
    from penstock.runner.graphs import Graphs

log = logging.getLogger("penstock.warmup")


class FreesSlots(Protocol):
    """The part of a sampler that a warm-up needs."""

    def leave(self, slot: int) -> None: ...


LENGTHS = (1, 64)
# On CUDA kernels are compiled on first use; each of these lengths needs another variant.
KERNEL_LENGTHS = (1, 17, 64, 256)
# Steps captured before the first request, as (rows, length): single rows, and batches of short ones. Other
# shapes are captured once they come repeatedly; until then small steps use the next larger of these graphs.
SHAPES = (
    *((1, 16), (1, 32), (1, 64), (1, 128), (1, 256), (1, 512)),
    *((16, 32), (32, 32), (64, 32), (4, 64), (8, 64), (16, 64)),
)
MAX_CAPTURE_S = 3.0


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


def warm_up_images(runner: Runner, spec: ModelSpec, max_tokens: int) -> None:
    """Run one image, of a middle size where sizes differ."""
    if (processor := spec.images) is None:
        return
    side = processor.tile_patches
    num_patches = side * side
    are_rows = spec.dual is not None
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


def capture_graphs(
    runner: Runner,
    graphs: Graphs,
    task: Task,
    max_length: int,
    max_tokens: int,
    *,
    has_skip: bool = False,
    max_s: float = MAX_CAPTURE_S,
) -> None:
    """Capture graphs of one task, for at most `max_s` seconds. `has_skip`: pooling leaves out leading tokens
    of its texts; such graphs serve texts without them too."""
    began = time.perf_counter()
    shapes = [
        (rows, length) for rows, length in SHAPES if length <= max_length and rows * length <= max_tokens
    ]
    with graphs.capture_on_first_use():
        for done, (rows, length) in enumerate(shapes):
            if time.perf_counter() - began > max_s:
                break
            runner.launch(_plan(rows, length, PoolingParams(task), has_skip)).result()
            _show_progress(done + 1, len(shapes))
    elapsed = time.perf_counter() - began
    log.info("captured %d of %d graphs in %.1f s", len(graphs.captured), len(shapes), elapsed)


def capture_decode_graphs(graphs: DecodeGraphs, keys: Sequence[Key], max_s: float = MAX_CAPTURE_S) -> None:
    """Capture graphs of decode steps, for at most `max_s` seconds."""
    began = time.perf_counter()
    for done, key in enumerate(keys):
        if time.perf_counter() - began > max_s:
            break
        graphs.ensure(key)
        _show_progress(done + 1, len(keys))
    elapsed = time.perf_counter() - began
    log.info("captured %d of %d decode graphs in %.1f s", len(graphs.captured), len(keys), elapsed)


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


def warm_up_generation(runner: Runner, sampler: FreesSlots, num_blocks: int, max_tokens: int) -> None:
    """Run a prompt and generate a few tokens, on blocks and a slot that are freed afterwards."""
    length = min(17, max_tokens)
    generation = GenerationScheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        GenerationLimits(1, max_tokens, max_tokens, length + 3, length, prefix_caching=False),
    )
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

"""The first steps of a runner, before it serves: they compile kernels and capture CUDA graphs."""

from __future__ import annotations

from contextlib import suppress

import torch

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved, available_cpus
from penstock.kernels import language
from penstock.kernels.language import MAX_COMPILER_THREADS
from penstock.runner import decode, mixed, warmup
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.graphs import Graphs
from penstock.runner.model_runner import ModelRunner
from penstock.runner.stopwatch import Stopwatch
from penstock.types import PoolingParams, Task


def warm_up_runner(
    runner: ModelRunner,
    spec: ModelSpec,
    settings: Resolved,
    blocks: int,
    watch: Stopwatch,
    *,
    precompiles: bool = True,
) -> None:
    """Run the first steps of every kind, which compile kernels, and capture the first graphs. `precompiles`:
    compile kernels in parallel before the steps run."""
    lengths = warmup.KERNEL_LENGTHS if runner.device.type == "cuda" else warmup.LENGTHS
    longest = min(settings.max_model_len, settings.max_num_batched_tokens)
    generates = runner.generator is not None and settings.max_model_len >= 8

    def pooled() -> None:
        warmup.warm_up(runner, longest, lengths)
        if runner.images is not None:
            warmup.warm_up_images(runner, spec, len(runner.images.store), longest)
        if settings.chunked and blocks >= 3 and settings.max_model_len >= 2 * BLOCK_SIZE:
            warmup.warm_up_chunked_prefill(runner, BLOCK_SIZE)

    if (
        runner.device.type == "cuda"
        and precompiles
        and (compiling := language.precompile(min(available_cpus(), MAX_COMPILER_THREADS))) is not None
    ):
        with watch.timed("kernels"), suppress(Exception), compiling:  # the real steps will raise the error
            pooled()
            if runner.graphs is not None:
                with torch.inference_mode():
                    runner.graphs.compile_ahead(warmup.kernel_keys(_first_params(spec), settings))
    with watch.timed("first steps"):
        pooled()
        if runner.generator is not None and generates:
            room = min(settings.max_model_len - 3, settings.max_num_batched_tokens)
            for speculates in (False, True) if settings.speculation is not None else (False,):
                warmup.warm_up_generation(
                    runner, runner.generator.sampler, blocks, room, speculates=speculates
                )
    if runner.graphs is None:
        return
    with watch.timed("graphs"):
        capture_likely_graphs(runner, runner.graphs, spec, settings)
        if runner.decode is not None and generates:
            keys, max_s = decode.warm_up_keys(settings.max_num_seqs), settings.graph_capture_seconds
            with torch.inference_mode():
                if settings.speculation is not None and runner.generator is not None:
                    keys = [*keys, *decode.verify_warm_up_keys(runner.generator.max_rows)]
                left = warmup.capture_decode_graphs(runner.decode, keys, max_s)
                if runner.mixed is not None and settings.target_itl_s:
                    warmup.capture_mixed_graphs(runner.mixed, mixed.warm_up_keys(settings.max_num_seqs))
            runner.planned_decodes.extend(left)


def warm_up_draft(runner: ModelRunner, settings: Resolved, blocks: int, watch: Stopwatch) -> None:
    """Run a prompt and a few decode steps, and capture the first graphs of decode steps."""
    if runner.generator is None or settings.max_model_len < 8:
        return
    with watch.timed("draft"):
        room = min(settings.max_model_len - 3, settings.max_num_batched_tokens)
        warmup.warm_up_generation(runner, runner.generator.sampler, blocks, room)
        if runner.decode is not None:
            with torch.inference_mode():
                warmup.capture_decode_graphs(
                    runner.decode, decode.warm_up_keys(settings.max_num_seqs), settings.graph_capture_seconds
                )


def capture_likely_graphs(runner: ModelRunner, graphs: Graphs, spec: ModelSpec, settings: Resolved) -> None:
    """Capture graphs for the first requests: shapes of earlier runs, then those of natural texts."""
    longest = min(settings.max_model_len, settings.max_num_batched_tokens)
    params = _first_params(spec)
    max_tokens, has_skip = settings.max_num_batched_tokens, spec.pooling.after is not None
    graphs.policy.uses.clear()  # warm-up steps do not count
    warmup.time_steps(runner, params, longest, max_tokens, has_skip=has_skip)
    graphs.policy.plan(warmup.likely_keys(graphs, params, longest, settings, has_skip=has_skip))
    if runner.graph_history is not None:
        known = runner.graph_history.load()
        graphs.policy.plan(key for key in known if key.params is None or key.params.task in spec.tasks)
    graphs.policy.plan_largest_first()
    with torch.inference_mode():
        warmup.capture_graphs(graphs, settings.graph_capture_seconds)
    if graphs.captured:
        graphs.policy.uses.clear()
        warmup.time_steps(runner, params, longest, max_tokens, has_skip=has_skip)
    graphs.policy.uses.clear()


def _first_params(spec: ModelSpec) -> PoolingParams:
    """The pooling parameters of most requests to a model."""
    return PoolingParams(Task.EMBED if spec.reads_labels else spec.tasks[0])

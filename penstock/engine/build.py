"""Builds an engine: model description and settings → runner, schedulers, core."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from threading import Lock

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.engine.draft import DraftProposer
from penstock.engine.grammars import Compiled, Grammars
from penstock.engine.loop import EngineCore
from penstock.engine.step_stats import StepStats
from penstock.errors import DeviceFailed, NotPossible
from penstock.inputs.constraints import GrammarCompiler, rejected
from penstock.inputs.grammar_sandbox import GrammarSandbox
from penstock.kvcache.blocks import BlockPool
from penstock.runner.base import BLOCK_SIZE, DraftRunner
from penstock.runner.load import Loaded, load_runner
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.prompt_lookup import PromptLookup
from penstock.scheduler.scheduler import Budget, Chunking, Scheduler
from penstock.scheduler.slots import SlotTable
from penstock.scheduler.speculation import Proposer
from penstock.scheduler.vector_cache import VectorCache
from penstock.speculative_config import SpeculativeConfig
from penstock.types import Grammar, PoolingParams

# Image patches that a step may run, per token of its budget. A vision tower is smaller than a text model by
# about this factor.
_PATCHES_PER_TOKEN = 4
MAX_GENERATING = 1024  # sequences at once: each step has logits over the vocabulary for all of them


def build_core(
    spec: ModelSpec,
    settings: Resolved,
    wake: Callable[[], None],
    observe: Callable[[StepStats], None] = lambda stats: None,
) -> EngineCore:
    loaded = load_runner(spec, settings)
    pool = BlockPool(loaded.num_blocks, BLOCK_SIZE)
    scheduler = _scheduler(spec, settings, pool, loaded)
    generation = None
    if settings.generates:
        limits = _generation_limits(spec, settings)
        generation = GenerationScheduler(pool, limits, scheduler.image_cache)
        if loaded.replays_mixed_steps is not None:
            generation.can_mix_steps = loaded.replays_mixed_steps
        if settings.speculation is not None:
            _enable_speculation(generation, settings.speculation, loaded.draft)
    core = EngineCore(
        loaded.runner,
        scheduler,
        depth=settings.pipeline_depth,
        wake=wake,
        observe=observe,
        share_identical=settings.share_identical,
        generation=generation,
        background_step_s=settings.background_step_ms / 1000,
    )
    _mark_drafts(core)
    core.max_queue_s = settings.max_queue_seconds
    core.sleeper = loaded.sleeper
    core.background = loaded.background
    core.idle_work = loaded.idle_work
    if loaded.adapters is not None:
        core.adapters = loaded.adapters
        loaded.adapters.in_use = core.adapters_in_use
        core.scheduler.max_adapters = loaded.adapters.max_adapters
        if generation is not None:
            generation.max_adapters = loaded.adapters.max_adapters
    if loaded.watch is not None:
        loaded.watch(partial(_device_failed, core))
    if settings.tensor_parallel_size > 1:
        core.why_not_sleep = (
            f"an engine of {settings.tensor_parallel_size} tensor-parallel ranks cannot sleep"
        )
    if generation is not None:
        core.grammars = _grammars(spec)
    return core


def _device_failed(core: EngineCore, error: DeviceFailed) -> None:
    """Give up the device, which may have failed while no step was running. Called on another thread."""
    core.fail_device(error)
    core.wake()


def _scheduler(spec: ModelSpec, settings: Resolved, pool: BlockPool, loaded: Loaded) -> Scheduler:
    budget = Budget(
        max_tokens=settings.max_num_batched_tokens,
        max_rows=settings.max_num_seqs,
        max_queued_tokens=settings.max_queued_tokens,
        max_output_bytes=settings.step_output_bytes,
        is_shared=settings.shares_steps,
        max_patches=_PATCHES_PER_TOKEN * settings.max_num_batched_tokens,
    )
    chunking = vector_cache = None
    if settings.chunked:
        chunking = Chunking(pool, settings.chunk_tokens, settings.prefix_caching)
    if loaded.num_cached_vectors:
        vector_cache = VectorCache(
            loaded.num_cached_vectors,
            documents=settings.document_cache_bytes > 0,
            reuse=settings.share_identical,
        )
    token_bytes = lru_cache(1024)(partial(_token_bytes, spec))
    image_cache = ImageCache(loaded.num_image_features) if loaded.num_image_features else None
    return Scheduler(budget, chunking, vector_cache, token_bytes, image_cache)


def _generation_limits(spec: ModelSpec, settings: Resolved) -> GenerationLimits:
    return GenerationLimits(
        max_rows=min(settings.max_num_seqs, MAX_GENERATING),
        max_tokens=settings.max_num_batched_tokens,
        max_chunk_tokens=settings.chunk_tokens,
        max_length=settings.max_model_len,
        max_queued_tokens=settings.max_queued_tokens,
        prefix_caching=settings.generate_prefixes,
        vocab_size=spec.vocab_size,
        separate_prefill=settings.graphs and not settings.target_itl_s,
        mixed_needs_graph=settings.graphs,
        target_itl_s=settings.target_itl_s,
        max_partial_prefills=settings.max_partial_prefills,
    )


def _enable_speculation(
    generation: GenerationScheduler, config: SpeculativeConfig, draft: DraftRunner | None
) -> None:
    def make_proposer(slots: SlotTable) -> Proposer:
        if draft is None:
            return PromptLookup(slots, config.num_speculative_tokens, config.min_ngram, config.max_ngram)
        return DraftProposer(
            slots,
            draft,
            num_tokens=config.num_speculative_tokens,
            vocab_size=generation.limits.vocab_size,
            block_size=generation.pool.block_size,
            max_tokens=generation.limits.max_tokens,
        )

    generation.enable_speculation(make_proposer, is_adaptive=config.adaptive)


def _mark_drafts(core: EngineCore) -> None:
    """Report waits for the draft model as launches, because they may block for long."""
    speculation = None if core.generation is None else core.generation.speculation
    if speculation is not None and isinstance(speculation.proposer, DraftProposer):
        speculation.proposer.mark_wait = lambda waits: core.mark_launch(core.clock() if waits else 0.0)


def _token_bytes(spec: ModelSpec, params: PoolingParams) -> int:
    """Output bytes per token of a row; 0 for tasks with one output per row."""
    if not params.per_token:
        return 0
    width = params.dimensions or spec.width(params.task) * max(1, params.num_labels)
    return -(-width // 8) if params.dtype.is_packed else width * params.dtype.numpy.itemsize


def _grammars(spec: ModelSpec) -> Grammars:
    """Compiles grammars over the model's vocabulary, which is loaded when the first grammar arrives. A
    sandbox compiles each grammar before this process does."""
    file, lock = spec.path / "tokenizer.json", Lock()
    sandbox = GrammarSandbox(file, spec.vocab_size, spec.eos_token_ids)

    @cache
    def compiler() -> GrammarCompiler:
        if not file.is_file():
            raise NotPossible(f"structured output needs {file.name} in the model's folder")
        sandbox.start()  # the sandbox loads the vocabulary at the same time as this process
        return GrammarCompiler(file, spec.vocab_size, spec.eos_token_ids)

    def compile(grammar: Grammar, max_s: float) -> Compiled:
        with lock:
            prepared = compiler()
        checked = sandbox.check(grammar, max_s)
        if checked.error:
            raise rejected(grammar, checked.error)
        if checked.lark:
            grammar = Grammar("lark", checked.lark)
        return Compiled(prepared.compile(grammar), checked.num_bytes)

    return Grammars(compile, close=sandbox.close)

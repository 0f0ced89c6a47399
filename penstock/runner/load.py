"""Build a runner from a resolved configuration. Torch is imported only for runners that compute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from penstock.checkpoint.adapters import read_lora
from penstock.checkpoint.files import usable_values
from penstock.checkpoint.quantization import stored_format
from penstock.checkpoint.sharding import check_shards
from penstock.checkpoint.sizes import check_memory, check_weight_files
from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, Machine, Resolved, available_cpus, resolve, unused_settings
from penstock.errors import ConfigError, DeviceFailed, ModelLoadError
from penstock.runner.base import (
    BLOCK_SIZE,
    AdapterStore,
    BackgroundSteps,
    DraftRunner,
    IdleWork,
    Runner,
    Sleeper,
)
from penstock.runner.cpu_memory import total_memory_bytes
from penstock.types import PoolingParams, Task

if TYPE_CHECKING:
    import torch

    from penstock.checkpoint.static import StaticSpec
    from penstock.kvcache.store import KVCache
    from penstock.layers.images import VisionTower
    from penstock.layers.lora import AdapterSites
    from penstock.layers.parallel import Shard
    from penstock.models.registry import CausalModel, Model
    from penstock.models.static import StaticModel
    from penstock.pooling.build import Pooler
    from penstock.runner.adapters import AdapterPool
    from penstock.runner.generator import Generator
    from penstock.runner.graph_history import GraphHistory
    from penstock.runner.graphs import Graphs
    from penstock.runner.images import ImageRunner
    from penstock.runner.model_runner import ModelRunner
    from penstock.scoring.pairs import PairScorer
    from penstock.weights.stream import WeightSource


log = logging.getLogger("penstock.load")


class Stopwatch:
    """The time that each part of loading takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items())
        return f"loaded in {sum(self.seconds.values()):.1f} s: {parts}"


OnDeviceFailed = Callable[[DeviceFailed], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner and the sizes of its stores."""

    runner: Runner
    num_blocks: int = 0  # of the KV cache
    num_cached_vectors: int = 0  # vectors in the store that scores read from
    num_image_features: int = 0  # slots of the store of image features; 0: the model reads no images
    sleeper: Sleeper | None = None  # None: the runner cannot sleep
    background: BackgroundSteps | None = None  # None: the runner's steps cannot be interrupted
    adapters: AdapterStore | None = None  # None: no request has one
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
        features = _num_image_features(settings, 0)
        return Loaded(runner, blocks, _LATE_VECTORS, features, NullSleeper(), adapters=adapters)
    if is_parallel(settings):
        from penstock.runner.parallel.load import load_parallel

        return load_parallel(spec, settings)
    return _model_runner(spec, settings)


def is_parallel(settings: Resolved) -> bool:
    """Whether several ranks compute the model. Tests replace this to run one rank as if there were more."""
    return settings.tensor_parallel_size > 1


class Parts(NamedTuple):
    """What a runner computes with."""

    model: Model
    pooler: Pooler
    cache: KVCache | None
    generator: Generator | None
    num_blocks: int  # of the cache
    images: ImageRunner | None = None
    draft: Parts | None = None  # of the draft model


def _model_runner(spec: ModelSpec, settings: Resolved) -> Loaded:
    watch = Stopwatch()
    with watch.timed("imports"):
        import torch

        from penstock.runner.model_runner import ModelRunner

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
    # The KV cache must have as many blocks again, however much memory is free then.
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
    from penstock.runner.sleep import ModelSleeper

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
    from penstock.runner.model_runner import ModelRunner

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
    _warm_up_draft(runner, own, parts.num_blocks, watch)
    log.info(
        "the draft model %s proposes up to %d tokens, in sequences of up to %d",
        spec.draft.name,
        settings.speculation.num_speculative_tokens,
        own.max_model_len,
    )
    return runner


def _warm_up_draft(runner: ModelRunner, settings: Resolved, blocks: int, watch: Stopwatch) -> None:
    """Run a prompt and decode, and capture the first graphs of decode steps."""
    import torch

    from penstock.runner import warmup
    from penstock.runner.decode import warm_up_keys

    if runner.generator is None or settings.max_model_len < 8:
        return
    with watch.timed("draft"):
        room = min(settings.max_model_len - 3, settings.max_num_batched_tokens)
        warmup.warm_up_generation(runner, runner.generator.sampler, blocks, room)
        if runner.decode is not None:
            with torch.inference_mode():
                warmup.capture_decode_graphs(
                    runner.decode, warm_up_keys(settings.max_num_seqs), settings.graph_capture_seconds
                )


def _graph_history(spec: ModelSpec, settings: Resolved) -> GraphHistory | None:
    """The shapes of earlier runs of the same model with the same settings on the same kind of GPU."""
    import torch

    from penstock.checkpoint.revision import loaded_revision
    from penstock.runner.graph_history import GraphHistory

    revision = loaded_revision(spec, msgspec.to_builtins(settings)) if settings.graph_history else ""
    gpu = torch.cuda.get_device_name(settings.device) if settings.device.startswith("cuda") else "cpu"
    return GraphHistory(f"{revision} {gpu} {torch.__version__}") if revision else None


def adapter_sites(model: Model) -> AdapterSites | None:
    """The layers of a model that adapters may change; None if it takes none."""
    return getattr(model, "adapter_sites", None)


def _adapter_pool(model: Model, settings: Resolved, runner: ModelRunner) -> AdapterPool | None:
    """The adapters of a model that takes some, whether at run time or those of its own checkpoint."""
    if (sites := adapter_sites(model)) is None:
        return None
    import torch

    from penstock.runner.adapters import AdapterPool

    pool = AdapterPool(sites, settings.max_cpu_loras, getattr(torch, settings.dtype), runner.device)
    pool.on_growth = runner.forget_adapter_graphs
    return pool


def num_vectors(pooler: Pooler) -> int:
    """Vectors in the store that scores read from."""
    return 0 if pooler.scorer is None else len(pooler.scorer.store)


def warn_of_unmarked(spec: ModelSpec) -> None:
    if spec.is_unmarked:
        log.warning(
            "the vectors of %s may mean nothing: it was not made to embed, or its files do not say so. It "
            "has no score task: %s",
            spec.name,
            spec.why_not_score,
        )


@contextmanager
def _without_repeated_warnings() -> Iterator[None]:
    """Say nothing of what a checkpoint leaves unused: that was said when it was first loaded."""
    levels = {name: logging.getLogger(name).level for name in ("penstock.load", "penstock.models")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _build_parts(spec: ModelSpec, settings: Resolved, watch: Stopwatch) -> Parts:
    import torch

    from penstock.runner.cuda_device import use_device
    from penstock.runner.generator import Generator

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
            others = [] if draft_model is None else [cast("CausalModel", draft_model)]
            cache, blocks = make_cache(cast("CausalModel", model), settings, dtype, device, others)
        if draft_model is not None and settings.draft is not None and generator is not None:
            own = Generator(
                draft_model.heads[Task.GENERATE], settings.max_num_seqs, device, generator.sampler.plan.seed
            )
            own.max_rows *= 2  # the first draft step may run two tokens of each sequence
            own_cache = allocate_cache(
                cast("CausalModel", draft_model), settings.draft, dtype, device, blocks
            )
            draft = Parts(draft_model, draft_pooler, own_cache, own, blocks)
        images = _image_runner(model, settings, dtype, device)
    return Parts(model, pooler, cache, generator, blocks, images, draft)


_IMAGE_CACHE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


def _image_runner(
    model: Model, settings: Resolved, dtype: torch.dtype, device: torch.device
) -> ImageRunner | None:
    """The vision tower with the store of its features, if the model has one."""
    from penstock.runner.images import ImageRunner

    tower: VisionTower | None = getattr(model, "vision", None)
    if tower is None:
        return None
    cached = _IMAGE_CACHE_BYTES[device.type] // (tower.feature_width * dtype.itemsize)
    return ImageRunner(tower, _num_image_features(settings, cached), dtype, device)


def check_no_tower(model: Model) -> None:
    if getattr(model, "vision", None) is not None:
        raise ConfigError(
            "models with a vision tower run on one GPU; use --data-parallel-size for several",
            param="tensor_parallel_size",
        )


def _num_image_features(settings: Resolved, num_cached: int) -> int:
    """Slots of the feature store: those of a whole step at least, and of a row that runs alone."""
    return max(settings.max_num_batched_tokens, settings.max_model_len, num_cached)


def read_model(
    spec: ModelSpec, settings: Resolved, device: torch.device, shard: Shard | None = None
) -> Model:
    """Read the model's files. `shard`: one rank's share of the model."""
    import torch

    with torch.inference_mode(), _buildable(spec, device):
        return _model(spec, settings, getattr(torch, settings.dtype), device, shard)


def build_weights(
    spec: ModelSpec, settings: Resolved, device: torch.device, shard: Shard | None = None
) -> tuple[Model, Pooler]:
    """The model, and the pooler that reads its states."""
    import torch

    from penstock.pooling.build import build_pooler

    dtype = getattr(torch, settings.dtype)
    model = read_model(spec, settings, device, shard)
    with torch.inference_mode(), _buildable(spec, device):
        pooler = build_pooler(spec, model.heads, settings.load_format, settings.seed, device, dtype)
        pooler.row_means = getattr(model, "row_means", None)
    pooler.scorer = _scorer(spec, settings, device)
    return model, pooler


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
    kernels are compiled together before the steps run."""
    import torch

    from penstock.kernels.language import MAX_COMPILER_THREADS, precompile
    from penstock.runner import mixed, warmup
    from penstock.runner.decode import verify_warm_up_keys, warm_up_keys

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
        and (compiling := precompile(min(available_cpus(), MAX_COMPILER_THREADS))) is not None
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
        _capture_likely_graphs(runner, runner.graphs, spec, settings)
        if runner.decode is not None and generates:
            keys, max_s = warm_up_keys(settings.max_num_seqs), settings.graph_capture_seconds
            with torch.inference_mode():
                if settings.speculation is not None and runner.generator is not None:
                    keys = [*keys, *verify_warm_up_keys(runner.generator.max_rows)]
                left = warmup.capture_decode_graphs(runner.decode, keys, max_s)
                if runner.mixed is not None and settings.target_itl_s:
                    warmup.capture_mixed_graphs(runner.mixed, mixed.warm_up_keys(settings.max_num_seqs))
            runner.planned_decodes.extend(left)


def _first_params(spec: ModelSpec) -> PoolingParams:
    """The pooling parameters of most requests to a model."""
    return PoolingParams(Task.EMBED if spec.reads_labels else spec.tasks[0])


def _capture_likely_graphs(runner: ModelRunner, graphs: Graphs, spec: ModelSpec, settings: Resolved) -> None:
    """Capture graphs for the first seconds: shapes of earlier runs, then those of natural texts."""
    import torch

    from penstock.runner import warmup

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


_ROW_VECTORS = 4096  # queries with one vector each, as many as one request may have
_LATE_VECTORS = 1 << 16  # token vectors of queries


def _scorer(spec: ModelSpec, settings: Resolved, device: torch.device) -> PairScorer | None:
    """The scorer and its vector store, if the model scores rows by their vectors. Token vectors have unit
    length and are multiplied in fp16 on a GPU; one vector per row costs so little that it stays in fp32."""
    import torch

    from penstock.scoring.pairs import PairScorer

    if (kind := spec.score_kind) not in ("late", "bi"):
        if settings.document_cache_bytes:
            raise ConfigError(
                f"document_cache_gb needs a model that scores by vectors; {spec.architecture} does not",
                param="document_cache_gb",
            )
        return None
    late = kind == "late"
    dim = spec.token_dim if late else spec.embed_dim
    dtype = torch.float16 if late and device.type == "cuda" else torch.float32
    capacity = _LATE_VECTORS if late else _ROW_VECTORS
    capacity += settings.document_cache_bytes // (dim * dtype.itemsize)
    store = torch.empty((capacity, dim), dtype=dtype, device=device)
    return PairScorer(store, late=late, similarity=spec.similarity)


def _model(
    spec: ModelSpec,
    settings: Resolved,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None = None,
) -> Model:
    if settings.model_impl == "transformers":
        from penstock.models.hf import TransformersModel

        return TransformersModel(spec, dtype, device)
    from penstock.layers.build import LayerBuilder
    from penstock.layers.lora import AdapterSites
    from penstock.models.registry import build_model
    from penstock.weights.stream import open_weights

    if spec.static is not None:
        return _static_model(spec, spec.static, settings, device)
    _check_layers(spec, settings)
    sizes = spec.sizes
    stored = stored_format(spec.config)
    min_bits = 8 if stored is None else min(stored.min_bits, 8)
    is_small = settings.quantization is not None or (stored is not None and device.type == "cuda")
    ranks = settings.tensor_parallel_size
    total_bytes = _total_bytes(device) // (ranks if device.type == "cpu" else 1)  # which its ranks share
    check_memory(sizes, min_bits / 8 if is_small else dtype.itemsize, total_bytes, ranks=ranks)
    splade = spec.sparse is not None and spec.sparse.kind == "splade"
    tokens = () if spec.score is None else spec.score.tokens
    with closing(open_weights(spec.path, settings.load_format, settings.seed, dtype, device)) as weights:
        if settings.load_format != "dummy":
            check_weight_files(spec.path, sizes, min_bits)
        if spec.merges_adapter and settings.load_format != "dummy":
            weights = _with_adapter(spec, weights)
        build = LayerBuilder(weights, settings.quantization, settings.unquantized_layers)
        build.folder = spec.path
        build.shard = shard
        if settings.max_loras:
            build.adapters = AdapterSites(settings.max_loras, settings.max_lora_rank)
        return build_model(
            spec.architecture,
            spec.config,
            build,
            splade=splade,
            score_tokens=tokens,
            generates=settings.generates,
        )


def _with_adapter(spec: ModelSpec, weights: WeightSource) -> WeightSource:
    """The weights, merged with the adapter in the model's folder."""
    from penstock.weights.merged import PeftMergedSource

    return PeftMergedSource(weights, read_lora(spec.root_path, spec.name))


def _static_model(
    spec: ModelSpec, static: StaticSpec, settings: Resolved, device: torch.device
) -> StaticModel:
    """The table stays in fp32 whatever the dtype: a mean costs as much as its memory reads, and no more."""
    import torch

    from penstock.models.static import build_static_model
    from penstock.weights.stream import open_weights

    check_memory(spec.sizes, torch.float32.itemsize, _total_bytes(device))
    if settings.load_format == "dummy":
        static = msgspec.structs.replace(static, has_mapping=False, has_weights=False, rows=static.vocab_size)
    source = open_weights(spec.path, settings.load_format, settings.seed, torch.float32, device)
    with closing(source) as weights:
        return build_static_model(static, weights)


def _total_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return total_memory_bytes()
    import torch

    return torch.cuda.get_device_properties(device).total_memory


@contextmanager
def _buildable(spec: ModelSpec, device: torch.device) -> Iterator[None]:
    """Turn the error of a model that cannot be built from its files into one that says so. Errors of a GPU
    are left alone: they may be gone after a restart."""
    try:
        with usable_values(spec.path):
            yield
    except (RuntimeError, MemoryError) as error:
        if device.type != "cpu":
            raise
        log.debug("%s cannot be built", spec.folder, exc_info=True)
        raise ModelLoadError(f"the model in {spec.folder} cannot be built: {error}", param="model") from error


def _check_layers(spec: ModelSpec, settings: Resolved) -> None:
    layers = spec.num_layers
    if layers is not None and (beyond := [n for n in settings.unquantized_layers if n >= layers]):
        raise ConfigError(
            f"unquantized_layers has {beyond[0]}, but the model's layers are 0 to {layers - 1}",
            param="unquantized_layers",
        )


def make_cache(
    model: CausalModel,
    settings: Resolved,
    dtype: torch.dtype,
    device: torch.device,
    others: Sequence[CausalModel] = (),
) -> tuple[KVCache, int]:
    """The KV cache and its number of blocks. `others`: models whose caches have the same number of blocks and
    share the memory."""
    blocks = count_blocks(model, settings, dtype, device, others)
    return allocate_cache(model, settings, dtype, device, blocks), blocks


def _cache_dtype(settings: Resolved, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The number format of the KV cache of a model in `dtype`."""
    import torch

    from penstock.kernels.quantize import FP8

    if not settings.kv_cache_is_fp8:
        return dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            "kv_cache_dtype = 'fp8' needs a GPU that converts fp8 (Ada, Hopper or later); use 'auto'",
            param="kv_cache_dtype",
        )
    return FP8


def count_blocks(
    model: CausalModel,
    settings: Resolved,
    dtype: torch.dtype,
    device: torch.device,
    others: Sequence[CausalModel] = (),
) -> int:
    """The blocks of the KV cache: as many as were granted, and at least those of one row."""
    import torch

    from penstock.kvcache.store import KVStore

    cached = _cache_dtype(settings, dtype, device)
    slot_bytes = [KVStore.bytes_per_slot(*each.kv_shape, cached) for each in (model, *others)]
    block_bytes = BLOCK_SIZE * sum(slot_bytes)
    needed = -(-settings.max_model_len // BLOCK_SIZE)
    enough = needed * settings.max_num_seqs
    granted = settings.kv_cache_bytes or int(settings.kv_share * torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        granted //= settings.tensor_parallel_size  # its ranks share the memory
    blocks = max(needed, min(enough, granted // block_bytes))
    if blocks * block_bytes > (total := _total_bytes(device)):
        raise ConfigError(
            f"the KV cache of one row of max_model_len = {settings.max_model_len} tokens needs "
            f"{needed * block_bytes / 2**30:,.1f} GiB, but the device has {total / 2**30:,.1f} GiB; "
            "set a smaller --max-model-len"
            if needed == blocks
            else f"kv_cache_gb asks for {granted / 2**30:,.1f} GiB, but the device has "
            f"{total / 2**30:,.1f} GiB; set a smaller --kv-cache-gb",
            param="max_model_len" if needed == blocks else "kv_cache_gb",
        )
    return blocks


def allocate_cache(
    model: CausalModel, settings: Resolved, dtype: torch.dtype, device: torch.device, blocks: int
) -> KVCache:
    import torch

    from penstock.kvcache.store import KVCache, KVStore

    layers, kv_heads, dim = model.kv_shape
    cached = _cache_dtype(settings, dtype, device)
    store = KVStore(layers, blocks * BLOCK_SIZE, kv_heads, dim, cached, device)
    sums = torch.zeros(
        (blocks if settings.chunked else 0, model.hidden_size), dtype=torch.float32, device=device
    )
    return KVCache(store, sums)

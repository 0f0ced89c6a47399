"""Jobs on Ray Data: readers stream chunks of rows to a pool of engines, which commit blocks of the output.

The worker that computes a block commits it before it reports to the driver. So no committed block is lost
with a worker, a node or the driver, and `--resume` computes only the missing blocks. Ray Data applies
backpressure to readers while engines are busy, so only a few chunks per engine are in memory.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import BadValue, EngineUnavailable, PenstockError
from penstock.jobs.blocks import Block, VectorColumns
from penstock.jobs.embedder import Embedder, VectorOptions
from penstock.jobs.formats import VectorKind
from penstock.jobs.job import (
    BlockMaker,
    Job,
    OpenedJob,
    RunStats,
    Sink,
    keep_parts,
    open_job,
    report,
)
from penstock.jobs.outputs import BlockWriter
from penstock.jobs.parts import Span
from penstock.jobs.plan import missing_ranges
from penstock.jobs.progress import show_progress
from penstock.jobs.rows import Chunk, Columns
from penstock.types import OutputDtype

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import ActorPoolStrategy, Dataset

CHUNKS_IN_FLIGHT = 3  # per engine: one is being tokenised, one computed, one written
_MAX_RETRIES = 20  # retries of a chunk whose worker died
_READER_CPUS = 0  # readers mostly wait for engines


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of a job."""

    workers: int | None = None  # None: one for each GPU, or one for each node without GPUs
    gpus_per_worker: float | None = None  # None: one if the cluster has GPUs
    address: str | None = None  # address of the cluster; None: RAY_ADDRESS, or a new cluster for this run


class PoolSize(msgspec.Struct, frozen=True):
    """The size of a pool, resolved for a cluster."""

    workers: int
    gpus: float  # per worker
    cpus: float  # per worker


def run_job(job: Job, pool: Pool | None = None, *, sink: Sink | None = None) -> None:
    """Run a job on Ray, and report the result on stderr."""
    began_s = time.monotonic()
    if job.reads_stdin:
        raise BadValue("--ray cannot read stdin, because several processes read the input", param="--ray")
    with open_job(job, sink) as opened:
        stats, before = RunStats(), opened.output.parts.rows
        with keep_parts(opened):
            if opened.output.parts.is_running:
                with _cluster(pool or Pool()) as size:
                    _embed_rows(opened, size, stats)
                opened.output.parts.refresh()
            total = opened.output.parts.rows
            opened.finish()
        report(opened, stats, before, total, time.monotonic() - began_s)


def embed_dataset(
    dataset: Dataset,
    *,
    model: str | None = None,
    column: str = "text",
    vectors: Sequence[str] = ("dense",),
    dtype: str = "float32",
    dimensions: int | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    truncate: bool = True,
    workers: int = 1,
    gpus_per_worker: float = 0,
    batch_rows: int = 2048,
    **engine: Any,
) -> Dataset:
    """Add the vectors of a column of texts to a dataset, as columns `vector`, `sparse` or `multi_vector`.

    Nothing runs until the dataset is read. `engine` are fields of `EngineConfig`, such as `device`.
    """
    options = VectorOptions(
        kinds=tuple(map(VectorKind, vectors)),
        dtype=OutputDtype(dtype),
        dimensions=dimensions,
        prompt=prompt,
        prompt_name=prompt_name,
        truncate=truncate,
    )
    fields = engine if model is None else {**engine, "model": model}
    return dataset.map_batches(
        DatasetWorker,
        fn_constructor_args=(fields, options, column),
        batch_format="pyarrow",
        batch_size=batch_rows,
        zero_copy_batch=True,
        compute=_actor_pool(workers),
        num_gpus=gpus_per_worker or None,
    )


class DatasetWorker:
    """An engine that adds vectors to batches of a dataset."""

    def __init__(self, engine: dict[str, Any], options: VectorOptions, column: str) -> None:
        self._column = column
        self._columns = Columns(column, None, ())
        self._embedder = Embedder(engine, options).__enter__()
        found = self._embedder.columns()
        self._vectors = VectorColumns(found.widths, found.dtype, found.stamp, dense_name="vector")

    def __call__(self, batch: pa.Table) -> pa.Table:
        if self._column not in batch.schema.names:
            raise BadValue(
                f"the dataset has no column {self._column!r}; it has: {', '.join(batch.schema.names)}",
                param="column",
            )
        texts = batch[self._column].to_pylist()
        if not all(isinstance(text, str) for text in texts):
            raise BadValue(f"column {self._column!r} holds values that are not texts", param="column")
        _, found = self._embedder.run(Chunk(0, len(texts), texts, {}, None), self._columns)
        block = Block(Span(0, len(texts)), {}, found or self._vectors.empty())
        table = self._vectors.table(block)
        for name in table.schema.names:
            batch = batch.append_column(table.schema.field(name), table[name])
        return batch


class JobWorker:
    """An engine that embeds chunks of a job and commits them. Ray calls it from several threads."""

    def __init__(self, job: Job, columns: Columns, maker: BlockMaker, writer: BlockWriter) -> None:
        self._columns, self._maker, self._writer = columns, maker, writer
        self._embedder = job.embedder().__enter__()

    def __call__(self, batch: pa.Table) -> dict[str, list[Any]]:
        from penstock.scale.chunks import unpacked

        counts = self._commit(unpacked(batch))
        return {name: [count] for name, count in counts.items()}

    def _commit(self, bundle: list[Chunk]) -> dict[str, Any]:
        """Embed and commit chunks. Returns counts and a pickled error: Ray would keep only its text."""
        stats, error, count, read = RunStats(), b"", 0, None
        try:
            for chunk in bundle:
                prepared, vectors = self._embedder.run(chunk, self._columns)
                self._writer.commit(self._maker.block(prepared.chunk, vectors))
                stats.add(prepared)
                count, read = count + chunk.count, chunk.read
        except PenstockError as found:
            error = pickle.dumps(found)
        return {"count": count, "read": read, "error": error, **stats.as_dict()}


def _embed_rows(opened: OpenedJob, size: PoolSize, stats: RunStats) -> None:
    """Stream the missing rows through the pool."""
    rows = opened.output.parts.rows
    dataset = _dataset(opened, size)
    if dataset is None:
        return
    share = 0.0
    # Progress and errors are reported here instead.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    with show_progress(rows) as advance, _own_errors():
        batches: Any = dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
        for batch in batches:
            for done in batch.to_pylist():
                if done["error"]:
                    raise pickle.loads(done["error"])
                stats.add_counts(done)
                share = max(share, done["read"] or 0.0)
                advance(done["count"], share or None)


def _dataset(opened: OpenedJob, size: PoolSize) -> Dataset | None:
    """Build the dataset that runs the job and yields counts. None if no rows are missing."""
    import ray.data

    from penstock.scale.chunks import ChunkSource, Reading

    parts = opened.output.parts
    ranges = missing_ranges(opened.source.file_rows, opened.cut, opened.job.limit, parts.spans)
    if not ranges:
        return None
    job = _with_threads(opened.job, size)
    reading = Reading(
        opened.files,
        job.input_format,
        opened.columns,
        opened.cut,
        job.skips_bad_rows,
        frozenset(parts.spans),
    )
    with _data_context():
        chunks = ray.data.read_datasource(
            ChunkSource(reading, ranges),
            override_num_blocks=len(ranges),
            concurrency=max(1, size.workers),
            num_cpus=_READER_CPUS,
        )
        counts: Dataset = chunks.map_batches(
            JobWorker,
            fn_constructor_args=(job, opened.columns, opened.maker, opened.writer),
            batch_format="pyarrow",
            batch_size=None,
            zero_copy_batch=True,
            compute=_actor_pool(size.workers),
            num_cpus=size.cpus,
            num_gpus=size.gpus or None,
            **_retries(chunks),
        )
        return counts


def _retries(dataset: Dataset) -> dict[str, Any]:
    """Options that end the run if a chunk kills every worker that receives it, where Ray has such options."""
    if "ray_remote_args" in inspect.signature(dataset.map_batches).parameters:  # until 2.64
        return {"max_restarts": -1, "max_task_retries": _MAX_RETRIES}
    return {}


def _with_threads(job: Job, size: PoolSize) -> Job:
    """On a CPU, set an engine's threads to the cores that Ray reserves for it, unless they are set."""
    if size.gpus or job.engine.get("threads") is not None:
        return job
    return msgspec.structs.replace(job, engine={**job.engine, "threads": max(1, int(size.cpus))})


def _actor_pool(workers: int) -> ActorPoolStrategy:
    from ray.data import ActorPoolStrategy

    return ActorPoolStrategy(
        size=workers,
        max_tasks_in_flight_per_actor=CHUNKS_IN_FLIGHT + 1,
        max_concurrent_calls_per_actor=CHUNKS_IN_FLIGHT,
        enable_true_multi_threading=True,
    )


@contextmanager
def _data_context() -> Iterator[None]:
    """Set Ray Data's options for datasets of bundles: each bundle is its own block, however small."""
    from ray.data import DataContext

    context = DataContext.get_current()
    before = context.target_max_block_size, context.enable_progress_bars
    context.target_max_block_size, context.enable_progress_bars = 1, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated options: `_retries` checks that they exist
            yield
    finally:
        context.target_max_block_size, context.enable_progress_bars = before


@contextmanager
def _cluster(pool: Pool) -> Iterator[PoolSize]:
    """Connect to the cluster for the duration of a block. An existing connection is reused and kept open."""
    try:
        import ray
    except ImportError:
        raise BadValue("--ray needs the package ray; install penstock[scale]", param="--ray") from None
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(pool.address)
    try:
        yield settle_pool(pool, ray.cluster_resources(), sum(node["Alive"] for node in ray.nodes()))
    finally:
        if is_ours:
            ray.shutdown()


def _connect(address: str | None) -> None:
    import ray

    starts_one = address is None and "RAY_ADDRESS" not in os.environ
    options: dict[str, Any] = {"include_dashboard": False} if starts_one else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **options)
    except (ConnectionError, ValueError) as error:
        raise BadValue(f"no Ray cluster answers: {error}", param="--ray-address") from None
    except Exception as error:  # Ray has no error class for nodes that do not start
        raise EngineUnavailable(f"Ray does not start: {error}") from error


def settle_pool(pool: Pool, resources: dict[str, float], nodes: int) -> PoolSize:
    """Compute how many engines run, and the GPUs and CPUs of each."""
    gpus, cpus = resources.get("GPU", 0.0), resources.get("CPU", 1.0)
    each = pool.gpus_per_worker if pool.gpus_per_worker is not None else float(gpus > 0)
    workers = pool.workers or (int(gpus / each) if each else nodes)
    if workers * each > gpus:
        raise BadValue(
            f"{workers} workers with {each:g} GPUs each need {workers * each:g} GPUs, "
            f"but the cluster has {gpus:g}",
            param="--workers",
        )
    if workers > cpus:
        raise BadValue(f"the cluster has {cpus:g} CPUs, too few for {workers} workers", param="--workers")
    return PoolSize(max(1, workers), each, 1.0 if each else float(max(1, int(cpus / max(1, workers, nodes)))))


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise Penstock's errors from readers in place of Ray's wrappers."""
    try:
        yield
    except Exception as error:
        if (own := _own_error(error)) is not None:
            raise own from None
        raise


def _own_error(error: BaseException | None) -> PenstockError | None:
    while error is not None:
        for candidate in (error, getattr(error, "cause", None)):
            if isinstance(candidate, PenstockError):
                return candidate
        error = error.__cause__ or error.__context__
    return None

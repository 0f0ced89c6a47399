"""Embedding of chunks of rows. A thread reads and tokenises the next chunk while the engine computes two."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.checkpoint.revision import content_revision
from penstock.errors import BadValue
from penstock.inputs.images.rows import refuse_images
from penstock.inputs.processor import InputOptions
from penstock.jobs.blocks import VectorColumns
from penstock.jobs.formats import VectorKind
from penstock.jobs.images import ImageRef
from penstock.jobs.rows import BadRow, Chunk, Columns
from penstock.jobs.stamp import Stamp
from penstock.offline.loop_thread import LoopThread
from penstock.offline.open import DescribedModel
from penstock.tasks.adapted import Adapted
from penstock.tasks.embed import Embed
from penstock.tasks.model import TextModel
from penstock.tasks.multi_task import MultiTask
from penstock.tasks.rows import TextTask
from penstock.tasks.run import DEFAULT_SCHEDULING, Prepared, run_prepared
from penstock.tasks.sparse import Sparse
from penstock.tasks.token_embed import TokenEmbed
from penstock.types import OutputDtype, PooledOutput, PoolingParams, PreparedImage, Task

if TYPE_CHECKING:
    from penstock.inputs.images.loader import ImageLoader

MAX_CHUNKS_IN_FLIGHT = 2  # the engine computes one while the other is saved
_TASKS = {
    VectorKind.DENSE: Task.EMBED,
    VectorKind.SPARSE: Task.SPARSE,
    VectorKind.MULTI_VECTOR: Task.TOKEN_EMBED,
}
_TASK_TYPES: dict[Task, type[TextTask[Any]]] = {
    Task.EMBED: Embed,
    Task.SPARSE: Sparse,
    Task.TOKEN_EMBED: TokenEmbed,
}
# Engine settings that change results by more than rounding errors.
_OVERRIDES = ("pooler_config", "hf_overrides", "quantization", "unquantized_layers", "load_format", "seed")
T = TypeVar("T")


class VectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which vectors to compute, and how texts are prepared."""

    kinds: tuple[VectorKind, ...] = (VectorKind.DENSE,)
    dimensions: int | None = None
    normalize: bool | None = None
    dtype: OutputDtype = OutputDtype.FLOAT32
    prompt_name: str | None = None
    prompt: str | None = None
    adapter: str | None = None  # one of the engine's `lora_modules`, or one of the checkpoint's own adapters
    truncate: bool = True
    truncation_side: str = "right"

    def params(self) -> tuple[PoolingParams, ...]:
        """Build the parameters of each output. Dimensions and dtypes do not apply to sparse vectors."""
        return tuple(
            PoolingParams(Task.SPARSE)
            if kind is VectorKind.SPARSE
            else PoolingParams(_TASKS[kind], self.dimensions, self.normalize, self.dtype)
            for kind in self.kinds
        )

    def input_options(self) -> InputOptions:
        return InputOptions(
            prompt_name=self.prompt_name,
            prompt=self.prompt,
            truncate_prompt_tokens=-1 if self.truncate else None,
            truncation_side="left" if self.truncation_side == "left" else "right",
        )


@dataclass(frozen=True, slots=True, eq=False)
class PreparedChunk:
    chunk: Chunk
    prepared: Prepared[Any] | None  # None: no rows are left to compute
    num_truncated: int = 0

    @property
    def num_tokens(self) -> int:
        return 0 if self.prepared is None else self.prepared.request.num_tokens


class _BadRows(Exception):
    """Rows that the model cannot read, each with its index in `Chunk.texts`."""

    def __init__(self, rows: list[tuple[int, BadRow]]) -> None:
        super().__init__(rows)
        self.rows = rows


class Embedder:
    """A model with the options of a run. Weights are loaded on entering the context."""

    def __init__(
        self, engine: dict[str, Any], options: VectorOptions, *, skips_bad_rows: bool = False
    ) -> None:
        self._described = DescribedModel.of(None, engine)
        self.spec, self.settings = self._described.spec, self._described.settings
        self.options = options
        self._input_options = options.input_options()
        self._adapter = "" if options.adapter is None else self._described.adapter_mark(options.adapter)
        if options.adapter in self.spec.adapters:
            self._input_options = replace(self._input_options, adapter=options.adapter)
        # Keeps a LoRA adapter loaded, and its id; set on entering the context.
        self._held, self._adapter_id = ExitStack(), -1
        self._params = options.params()
        self.skips_bad_rows = skips_bad_rows
        self._text = TextModel(self.spec)
        self._prompt = self._text.processor.prompt(self._input_options)
        for params in self._params:
            self._text.processor.check(params)
        self._task([""]).check(self._text)
        self._running: deque[tuple[PreparedChunk, Future[PooledOutput] | None]] = deque()
        self._max_tokens = self._text.processor.row_limit(self._params[0], self._input_options).max_tokens

    def columns(self) -> VectorColumns:
        widths = {kind: self._width(kind) for kind in self.options.kinds}
        return VectorColumns(widths, self.options.dtype, self._stamp())

    def _dimensions(self, kind: VectorKind) -> int:
        return self.options.dimensions or self.spec.width(_TASKS[kind])

    def _width(self, kind: VectorKind) -> int:
        """Numbers per stored vector."""
        if kind is VectorKind.SPARSE:
            return 0
        dimensions = self._dimensions(kind)
        return -(-dimensions // 8) if self.options.dtype.is_packed else dimensions

    def _stamp(self) -> Stamp:
        options, config = self.options, msgspec.to_builtins(self._described.config)
        default = msgspec.to_builtins(type(self._described.config)())
        changed = {name: config[name] for name in _OVERRIDES if config[name] != default[name]}
        if self.settings.device == "null":
            changed["device"] = "null"  # the null runner's vectors must not be mixed with real ones
        dense = [kind for kind in options.kinds if kind is not VectorKind.SPARSE]
        return Stamp(
            model=self.spec.name,
            revision=content_revision(self.spec),
            kinds=tuple(kind.value for kind in options.kinds),
            dimension=self._dimensions(dense[0]) if dense else None,
            dtype=options.dtype.value,
            prompt=self._prompt,
            normalize=self.spec.pooling.normalize if options.normalize is None else options.normalize,
            truncation=options.truncation_side if options.truncate else "none",
            max_tokens=self._max_tokens,
            similarity=self.spec.similarity,
            adapter=self._adapter,
            overrides=changed,
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return all settings that affect the vectors, without settings that only affect speed."""
        options, settings = self.options, self.settings
        return {
            "model": self.spec.name,
            "revision": content_revision(self.spec),
            "device": settings.device.partition(":")[0],
            "dtype": settings.dtype,
            "quantization": settings.quantization,
            "unquantized_layers": list(settings.unquantized_layers) or None,
            "load_format": settings.load_format,
            "seed": settings.seed,
            "max_model_len": settings.max_model_len,
            "pooler_config": msgspec.to_builtins(self._described.config.pooler_config),
            "hf_overrides": self._described.config.hf_overrides,
            "vectors": options.kinds,
            "dimensions": options.dimensions,
            "normalize": options.normalize,
            "embed_dtype": options.dtype.value,
            "prompt": self._prompt,
            "truncate": options.truncate,
            "truncation_side": options.truncation_side,
        } | ({"adapter": self._adapter} if self._adapter else {})

    def __enter__(self) -> Embedder:
        self._local = self._described.load(self._text)
        self._loop = LoopThread()
        if (name := self.options.adapter) is not None and name not in self.spec.adapters:
            self._adapter_id = self._held.enter_context(self._local.adapters.hold(name))
        return self

    def __exit__(self, *_: object) -> None:
        for _prepared, future in self._running:  # empty unless the run was interrupted
            if future is not None:
                future.cancel()
        self._held.close()
        self._local.close()
        self._loop.close()

    def embed(
        self, chunks: Iterator[Chunk], columns: Columns
    ) -> Iterator[tuple[PreparedChunk, dict[VectorKind, Any]]]:
        """Yield chunks with their vectors, in order."""
        running = self._running
        for prepared in read_ahead(self.prepare(chunk, columns) for chunk in chunks):
            running.append((prepared, self.submit(prepared)))
            if len(running) == MAX_CHUNKS_IN_FLIGHT:
                yield self._complete(*running.popleft())
        while running:
            yield self._complete(*running.popleft())

    def run(self, chunk: Chunk, columns: Columns) -> tuple[PreparedChunk, dict[VectorKind, Any]]:
        """Embed one chunk. Several threads may call this at the same time."""
        prepared = self.prepare(chunk, columns)
        return self._complete(prepared, self.submit(prepared))

    def submit(self, prepared: PreparedChunk) -> Future[PooledOutput] | None:
        if prepared.prepared is None:
            return None
        return self._loop.submit(run_prepared(self._local.engine, prepared.prepared, DEFAULT_SCHEDULING))

    def _complete(
        self, prepared: PreparedChunk, future: Future[PooledOutput] | None
    ) -> tuple[PreparedChunk, dict[VectorKind, Any]]:
        kinds = self.options.kinds
        if future is None or prepared.prepared is None:
            return prepared, {}
        result = prepared.prepared.finish(future.result())
        return prepared, dict(zip(kinds, result if len(kinds) > 1 else [result], strict=True))

    def prepare(self, chunk: Chunk, columns: Columns) -> PreparedChunk:
        """Tokenise a chunk. Rows that the model cannot read become bad rows if they are skipped, or raise."""
        num_truncated = 0

        def check(lengths: list[int]) -> None:
            nonlocal num_truncated
            num_truncated = self._check_lengths(lengths, chunk, columns)

        while chunk.texts:
            inputs: list[Any] = chunk.texts
            if isinstance(inputs[0], ImageRef):
                chunk, inputs = self._prepare_images(chunk, columns)
                if not inputs:
                    break
            task = self._task(inputs)
            task.check_lengths = check
            chosen = task if self._adapter_id < 0 else Adapted(task, self._adapter_id)
            try:
                prepared = self._loop.wait(chosen.prepare(self._text, f"rows-{chunk.first}"))
            except _BadRows as found:
                chunk = chunk.without(found.rows)
                continue
            return PreparedChunk(chunk, prepared, num_truncated)
        return PreparedChunk(chunk, None)

    def _prepare_images(self, chunk: Chunk, columns: Columns) -> tuple[Chunk, list[PreparedImage]]:
        """Decode and prepare the images of a chunk. Images that cannot be read become bad rows."""
        if self.spec.images is None:
            raise refuse_images(self.spec.name)
        prepared: list[PreparedImage] = []
        bad: list[tuple[int, BadRow]] = []
        refs: list[Any] = chunk.texts
        for at, ref in enumerate(refs):
            try:
                image = ref.load(self._images.sources.limits.max_pixels)
                prepared += self._images.prepare_now([image], self.spec.images)
            except BadValue as error:
                bad.append((at, self._bad_image(at, ref, error.message, chunk, columns)))
        return (chunk.without(bad) if bad else chunk), prepared

    def _bad_image(self, at: int, ref: ImageRef, reason: str, chunk: Chunk, columns: Columns) -> BadRow:
        row = chunk.numbers[at]
        if self.skips_bad_rows:
            return BadRow(row, chunk.id_of(at, columns), reason, columns.text)
        raise BadValue(
            f"row {row}, {ref.path}: {reason}; repair it, or skip it with --on-error skip", param="input"
        )

    @cached_property
    def _images(self) -> ImageLoader:
        from penstock.inputs.images.loader import ImageLoader, LoaderLimits

        return ImageLoader(limits=LoaderLimits(cache_bytes=0))

    def _task(self, texts: list[Any]) -> TextTask[Any]:
        first, *more = self._params
        if more:
            return MultiTask(inputs=texts, params=first, options=self._input_options, more=tuple(more))
        return _TASK_TYPES[first.task](inputs=texts, params=first, options=self._input_options)

    def _check_lengths(self, lengths: list[int], chunk: Chunk, columns: Columns) -> int:
        """Count the rows that exceed the limit. Raises `_BadRows` for rows that cannot be embedded."""
        limit = self._max_tokens
        long = [at for at, length in enumerate(lengths) if length > limit] if max(lengths) > limit else []
        bad: list[tuple[int, BadRow]] = []
        if 0 in lengths and self.spec.static is None:  # static models have a vector for empty rows
            bad += [
                (at, self._bad(at, "has no tokens", "input", chunk, columns))
                for at, length in enumerate(lengths)
                if length == 0
            ]
        if long and not self.options.truncate:
            bad += [(at, self._too_long(at, lengths[at], chunk, columns)) for at in long]
        if bad:
            raise _BadRows(sorted(bad, key=lambda each: each[0]))
        return len(long)

    def _too_long(self, at: int, length: int, chunk: Chunk, columns: Columns) -> BadRow:
        reason = f"has {length} tokens, but the model takes at most {self._max_tokens}"
        return self._bad(at, reason, "--no-truncate", chunk, columns)

    def _bad(self, at: int, reason: str, flag: str, chunk: Chunk, columns: Columns) -> BadRow:
        """Make a bad row. Raises unless bad rows are skipped."""
        row = chunk.numbers[at]
        if self.skips_bad_rows:
            return BadRow(row, chunk.id_of(at, columns), reason, columns.text)
        advice = "shorten it, leave out --no-truncate, " if flag == "--no-truncate" else "give it a text, "
        raise BadValue(f"row {row} {reason}; {advice}or skip it with --on-error skip", param=flag)


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield items in order. Another thread reads the next item while the caller works on the current one.

    The thread is a daemon, so that it does not keep the process alive while it waits for a line on stdin.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=1)
    is_abandoned = threading.Event()

    def work() -> None:
        try:
            for item in items:
                ready.put((item, None))
                if is_abandoned.is_set():
                    return
            ready.put((None, None))
        except BaseException as error:
            ready.put((None, error))

    threading.Thread(target=work, name="penstock-read", daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        is_abandoned.set()
        with suppress(queue.Empty):
            ready.get_nowait()  # unblock the thread's `put`, so that it sees the event

"""Embeds chunks of rows for `penstock embed`, in order.

A thread reads and tokenises the next chunk while the engine computes the two before it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from penstock.checkpoint.weight_files import model_weight_files
from penstock.errors import BadValue
from penstock.inputs.processor import InputOptions
from penstock.inputs.prompts import choose_prompt
from penstock.jobs.rows import Chunk
from penstock.jobs.vectors import Vectors
from penstock.offline.loop_thread import LoopThread
from penstock.offline.open import DescribedModel
from penstock.tasks.embed import Embed
from penstock.tasks.model import TextModel
from penstock.tasks.run import DEFAULT_SCHEDULING, submit
from penstock.types import PooledOutput, PoolingParams, Request

MAX_CHUNKS_IN_FLIGHT = 2  # the engine computes the second while the first is saved
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class PreparedChunk:
    chunk: Chunk
    request: Request
    num_truncated: int


class Embedder:
    """The model and how this run uses it. Weights are loaded on entering the context."""

    def __init__(self, engine: dict[str, Any], params: PoolingParams, options: InputOptions) -> None:
        self._described = DescribedModel.of(None, engine)
        self.spec, self.settings = self._described.spec, self._described.settings
        self.params = params
        self._options = options
        self._prompt = choose_prompt(self.spec, prompt_name=options.prompt_name, prompt=options.prompt)
        self._text = TextModel(self.spec)
        self._text.processor.check(params)
        self._running: deque[tuple[PreparedChunk, Future[PooledOutput]]] = deque()

    @property
    def truncates(self) -> bool:
        return self._options.truncate_prompt_tokens is not None

    @property
    def width(self) -> int:
        """Numbers in a stored vector."""
        dimensions = self.params.dimensions or self.spec.embed_dim
        return -(-dimensions // 8) if self.params.dtype.is_packed else dimensions

    @property
    def about(self) -> dict[str, str]:
        return {
            "model": self.spec.name,
            "dimensions": str(self.params.dimensions or self.spec.embed_dim),
            "embed_dtype": self.params.dtype.value,
        }

    def fingerprint(self) -> dict[str, Any]:
        """All settings that decide the vectors, without those that only decide the speed."""
        params, options, settings = self.params, self._options, self.settings
        weights = [(file, file.stat()) for file in model_weight_files(self.spec)]
        return {
            "model": str(self.spec.path.resolve()),
            "weights": [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in weights],
            "device": settings.device.partition(":")[0],
            "dtype": settings.dtype,
            "quantization": settings.quantization,
            "unquantized_layers": list(settings.unquantized_layers) or None,
            "load_format": settings.load_format,
            "seed": settings.seed,
            "max_model_len": settings.max_model_len,
            "pooler_config": msgspec.to_builtins(self._described.config.pooler_config),
            "hf_overrides": self._described.config.hf_overrides,
            "dimensions": params.dimensions,
            "normalize": params.normalize,
            "embed_dtype": params.dtype.value,
            "prompt": self._prompt,
            "truncate": self.truncates,
            "truncation_side": options.truncation_side,
        }

    def __enter__(self) -> Embedder:
        self._local = self._described.load(self._text)
        self._loop = LoopThread()
        return self

    def __exit__(self, *_: object) -> None:
        for _prepared, future in self._running:  # none, unless the run was interrupted
            future.cancel()
        self._local.close()
        self._loop.close()

    def embed(self, chunks: Iterator[Chunk]) -> Iterator[tuple[PreparedChunk, Vectors]]:
        """Chunks with their vectors, in order."""
        for prepared in read_ahead(self._prepare(chunk) for chunk in chunks):
            run = submit(self._local.engine, prepared.request, DEFAULT_SCHEDULING)
            self._running.append((prepared, self._loop.submit(run)))
            if len(self._running) == MAX_CHUNKS_IN_FLIGHT:
                yield self._next()
        while self._running:
            yield self._next()

    def _next(self) -> tuple[PreparedChunk, Vectors]:
        prepared, future = self._running[0]
        vectors = future.result().values
        self._running.popleft()
        return prepared, vectors

    def _prepare(self, chunk: Chunk) -> PreparedChunk:
        num_truncated = 0

        def check(lengths: list[int]) -> None:
            nonlocal num_truncated
            num_truncated = self._check_lengths(lengths, chunk.first)

        task = Embed(inputs=chunk.texts, params=self.params, options=self._options, check_lengths=check)
        prepared = self._loop.wait(task.prepare(self._text, f"rows-{chunk.first}"))
        return PreparedChunk(chunk, prepared.request, num_truncated)

    def _check_lengths(self, lengths: list[int], first: int) -> int:
        """The number of rows beyond the limit. Errors name the row by its number in the file."""
        limit = self.spec.max_model_len
        if 0 in lengths and self.spec.static is None:  # which have a vector for such rows
            raise BadValue(f"row {first + lengths.index(0)} has no tokens", param="input")
        long = [at for at, length in enumerate(lengths) if length > limit]
        if long and not self.truncates:
            raise BadValue(
                f"row {first + long[0]} has {lengths[long[0]]} tokens, but the model takes at most {limit}; "
                "shorten it or leave out --no-truncate",
                param="--no-truncate",
            )
        return len(long)


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """The items in order, read on another thread while the caller works on the item before.

    The thread is a daemon: while it waits for a line on stdin it must not keep the process alive.
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
            ready.get_nowait()  # room for the item that the thread holds, so that it sees the event

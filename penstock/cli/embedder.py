"""The model at work for `penstock embed`: chunks of rows in, vectors out, in order.

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
import numpy as np

from penstock.checkpoint.spec import describe, with_max_model_len
from penstock.cli.info import weight_files
from penstock.cli.rows import Chunk
from penstock.cli.vectors import Vectors
from penstock.config import EngineConfig, from_mapping
from penstock.errors import BadValue
from penstock.inputs.processor import InputOptions, InputProcessor
from penstock.inputs.prompts import choose_prompt
from penstock.inputs.tokenizer import Tokenizer
from penstock.offline.local import LocalEngine
from penstock.runner.load import settle
from penstock.types import Ints, PooledOutput, PoolingParams, Request

IN_FLIGHT = 2  # chunks with the engine: it goes on with the second while the first is saved
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    chunk: Chunk
    request: Request
    cut: int


class Embedder:
    """The model and how this run uses it. Weights are loaded on entering, not before."""

    def __init__(self, engine: dict[str, Any], params: PoolingParams, options: InputOptions) -> None:
        self._config = from_mapping(EngineConfig, engine)
        described = describe(self._config)
        self.settings = settle(self._config, described)
        self.spec = with_max_model_len(described, self.settings.max_model_len)
        self.params = params
        self._options = options
        self._prompt = choose_prompt(self.spec, prompt_name=options.prompt_name, prompt=options.prompt)
        self._processor = InputProcessor(self.spec, Tokenizer(self.spec.path))
        self._processor.check(params)
        self._running: deque[tuple[Prepared, Future[PooledOutput]]] = deque()

    @property
    def truncates(self) -> bool:
        return self._options.truncate_prompt_tokens is not None

    @property
    def width(self) -> int:
        """Numbers in a stored vector."""
        dimensions = self.params.dimensions or self.spec.embed_dim
        return -(-dimensions // 8) if self.params.dtype.packed else dimensions

    @property
    def about(self) -> dict[str, str]:
        return {
            "model": self.spec.name,
            "dimensions": str(self.params.dimensions or self.spec.embed_dim),
            "embed_dtype": self.params.dtype.value,
        }

    def fingerprint(self) -> dict[str, Any]:
        """All that decides the vectors; what only decides the speed is left out."""
        params, options, settings = self.params, self._options, self.settings
        weights = [(file, file.stat()) for file in weight_files(self.spec)]
        return {
            "model": str(self.spec.path.resolve()),
            "weights": [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in weights],
            "device": settings.device.partition(":")[0],
            "dtype": settings.dtype,
            "quantization": settings.quantization,
            "load_format": settings.load_format,
            "seed": settings.seed,
            "max_model_len": settings.max_model_len,
            "pooler_config": msgspec.to_builtins(self._config.pooler_config),
            "hf_overrides": self._config.hf_overrides,
            "dimensions": params.dimensions,
            "normalize": params.normalize,
            "embed_dtype": params.dtype.value,
            "prompt": self._prompt,
            "truncate": self.truncates,
            "truncation_side": options.truncation_side,
        }

    def __enter__(self) -> Embedder:
        self._engine = LocalEngine(self.spec, msgspec.structs.replace(self.settings, max_queued_tokens=2**62))
        return self

    def __exit__(self, *_: object) -> None:
        for prepared, _future in self._running:  # none, unless the run broke off
            self._engine.cancel(prepared.request.id)
        self._engine.close()

    def embed(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Prepared, Vectors]]:
        """Chunks with their vectors, in order."""
        for prepared in ahead(self._prepare(chunk) for chunk in chunks):
            self._running.append((prepared, self._engine.submit(prepared.request)))
            if len(self._running) == IN_FLIGHT:
                yield self._next()
        while self._running:
            yield self._next()

    def _next(self) -> tuple[Prepared, Vectors]:
        prepared, future = self._running[0]
        vectors = future.result().values
        self._running.popleft()
        return prepared, vectors

    def _prepare(self, chunk: Chunk) -> Prepared:
        texts = self._processor.with_prompt(chunk.texts, self._options)
        rows = self._processor.tokenizer.encode(texts, self._options.add_special_tokens)
        cut = self._check_lengths(rows, chunk.first)
        request = self._processor.join(
            f"rows-{chunk.first}", rows, self.params, self._options, from_text=True
        )
        return Prepared(chunk, request, cut)

    def _check_lengths(self, rows: list[Ints], first: int) -> int:
        """How many rows are too long; refuses, by their number in the file, rows that cannot be used."""
        limit, lengths = self.spec.max_model_len, np.array([len(row) for row in rows])
        if not lengths.all():
            raise BadValue(f"row {first + int(lengths.argmin())} has no tokens", param="input")
        long = lengths > limit
        if long.any() and not self.truncates:
            at = int(long.argmax())
            raise BadValue(
                f"row {first + at} has {lengths[at]} tokens, but the model takes at most {limit}; "
                "shorten it or leave out --no-truncate",
                param="--no-truncate",
            )
        return int(long.sum())


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The items in order, made on a thread of their own while the caller works on the one before.

    The thread is a daemon: one that waits for a line on stdin must not keep the process alive.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=1)
    left = threading.Event()

    def work() -> None:
        try:
            for item in items:
                ready.put((item, None))
                if left.is_set():
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
        left.set()
        with suppress(queue.Empty):
            ready.get_nowait()  # room for the item the thread holds, so that it can see that nobody waits

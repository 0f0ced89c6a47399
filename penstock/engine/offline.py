"""Offline use: `Engine` and `AsyncEngine`, the same core as the server's, in this process."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.spec import ModelSpec, describe, with_limit
from penstock.config import EngineConfig, from_mapping
from penstock.core import Answer, OutputDtype, PoolingParams, Request, Task
from penstock.engine.local import LocalEngine
from penstock.errors import BadValue
from penstock.inputs.processor import DEFAULT_OPTIONS, InputOptions, InputProcessor, Inputs, split_inputs
from penstock.inputs.tokenizer import Tokenizer
from penstock.outputs.sparse import SparseRow, Term, check_min_weight, sparse_rows, with_tokens
from penstock.runner.load import settle

WINDOW = 2048  # texts that are tokenised and ordered by length together
_PROGRESS_FROM = 2 * WINDOW


class Engine:
    """A model in this process.

    `model` is a folder, a hub id, or nothing for the embedded default; every field of
    `EngineConfig` can be given by name.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        config = from_mapping(EngineConfig, {"model": model, **options})
        described = describe(config)
        settings = settle(config, described)
        self.spec: ModelSpec = with_limit(described, settings.max_model_len)
        self.settings = settings
        self._processor = InputProcessor(self.spec, Tokenizer(self.spec.path))
        self._engine = LocalEngine(self.spec, msgspec.structs.replace(settings, max_queued_tokens=2**62))
        self._tokenize = ThreadPoolExecutor(1, thread_name_prefix="penstock-tokenize")
        self._numbers = itertools.count()

    def embed(
        self,
        texts: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        dtype: str = "float32",
        progress: bool | None = None,
        priority: int = 0,
        **options: Any,
    ) -> NDArray[Any]:
        """One vector a text, as an array [n, dimensions].

        `options` are those of `InputOptions`: prompt_name, prompt, instruction, input_type,
        truncate_prompt_tokens (-1: cut at the model's limit), truncation_side, add_special_tokens.
        A text beyond the model's limit is an error unless truncation is asked for. `progress` shows a
        bar; by default only for long calls on a terminal.
        """
        params = PoolingParams(Task.EMBED, dimensions, normalize, _output_dtype(dtype))
        return _joined(self._answers(texts, params, _options(options), progress, priority))

    def token_embed(
        self,
        texts: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        dtype: str = "float32",
        progress: bool | None = None,
        priority: int = 0,
        **options: Any,
    ) -> list[NDArray[Any]]:
        """One vector a token: for each text an array [tokens, dimensions], special tokens included."""
        params = PoolingParams(Task.TOKEN_EMBED, dimensions, normalize, _output_dtype(dtype))
        return self._token_rows(texts, params, _options(options), progress, priority)

    def classify(
        self, texts: Inputs, *, use_activation: bool = True, priority: int = 0, **options: Any
    ) -> NDArray[Any]:
        """The probability of each of `engine.labels`, [n, labels]; scores without `use_activation`."""
        params = PoolingParams(Task.CLASSIFY, normalize=use_activation)
        return _joined(self._answers(texts, params, _options(options), None, priority))

    def token_classify(
        self, texts: Inputs, *, use_activation: bool = True, priority: int = 0, **options: Any
    ) -> list[NDArray[Any]]:
        """The probability of each label for each token: for each text an array [tokens, labels]."""
        params = PoolingParams(Task.TOKEN_CLASSIFY, normalize=use_activation)
        return self._token_rows(texts, params, _options(options), None, priority)

    @overload
    def sparse(
        self, texts: Inputs, *, token_strings: Literal[False] = False, **options: Any
    ) -> list[dict[int, float]]: ...

    @overload
    def sparse(self, texts: Inputs, *, token_strings: Literal[True], **options: Any) -> list[list[Term]]: ...

    def sparse(
        self,
        texts: Inputs,
        *,
        top_k: int | None = None,
        min_weight: float = 0.0,
        token_strings: bool = False,
        progress: bool | None = None,
        priority: int = 0,
        **options: Any,
    ) -> list[dict[int, float]] | list[list[Term]]:
        """The tokens that matter to each text: {token id: weight}, heaviest first.

        `top_k` keeps so many, 1,024 at most where it is not given; `min_weight` drops lighter ones.
        `token_strings` gives lists of (token id, token, weight) instead.
        """
        check_min_weight(min_weight)
        params = PoolingParams(Task.SPARSE, top_k=top_k)
        rows: list[SparseRow] = []
        for request, answer in self._answers(texts, params, _options(options), progress, priority):
            rows += self._sparse_rows(request, answer, top_k, min_weight)
        return self._shown(rows, token_strings)

    def _sparse_rows(
        self, request: Request, answer: Answer, top_k: int | None, min_weight: float
    ) -> list[SparseRow]:
        special = self._processor.tokenizer.special_ids
        return sparse_rows(request, answer.values, special, top_k, min_weight)

    def _shown(self, rows: list[SparseRow], token_strings: bool) -> list[dict[int, float]] | list[list[Term]]:
        if token_strings:
            return with_tokens(rows, self._processor.tokenizer.token_strings)
        return [row.as_dict() for row in rows]

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a classifier's outputs."""
        return self.spec.labels

    def tokenize(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [row.tolist() for row in self._processor.tokenizer.encode(texts, add_special_tokens)]

    def close(self) -> None:
        self._tokenize.shutdown()
        self._engine.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _token_rows(
        self,
        inputs: Inputs,
        params: PoolingParams,
        options: InputOptions,
        progress: bool | None,
        priority: int,
    ) -> list[NDArray[Any]]:
        rows: list[NDArray[Any]] = []
        for request, answer in self._answers(inputs, params, options, progress, priority):
            rows += np.split(answer.values, request.starts[1:])
        return rows

    def _answers(
        self,
        inputs: Inputs,
        params: PoolingParams,
        options: InputOptions,
        progress: bool | None,
        priority: int,
    ) -> Iterator[tuple[Request, Answer]]:
        """Answers by window, in order: one window is tokenised while the one before it runs."""
        self._processor.check(params)
        texts, ids = split_inputs(inputs)
        rows: Sequence[Any] = ids if texts is None else texts
        windows = [rows[i : i + WINDOW] for i in range(0, len(rows), WINDOW)]
        with _bar(len(rows), progress) as advance:
            running: list[tuple[Request, Future[Answer]]] = []
            for window in windows:
                if len(running) == 2:
                    yield _finished(running, advance)
                request_id = f"local-{next(self._numbers)}"
                prepared = self._tokenize.submit(self._processor.prepare, request_id, window, params, options)
                request = prepared.result()
                request.priority = priority
                running.append((request, self._engine.submit(request)))
            while running:
                yield _finished(running, advance)


def _finished(
    running: list[tuple[Request, Future[Answer]]], advance: Callable[[int], None]
) -> tuple[Request, Answer]:
    request, future = running.pop(0)
    answer = future.result()
    advance(request.num_rows)
    return request, answer


def _joined(answers: Iterator[tuple[Request, Answer]]) -> NDArray[Any]:
    parts = [answer.values for _, answer in answers]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class AsyncEngine:
    """`Engine` for asyncio programs: calls from many tasks share the engine's steps."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._model, self._options = model, options
        self._inner: Engine | None = None

    async def __aenter__(self) -> AsyncEngine:
        self._inner = await asyncio.to_thread(Engine, self._model, **self._options)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def spec(self) -> ModelSpec:
        return self._open().spec

    async def embed(
        self,
        texts: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        dtype: str = "float32",
        priority: int = 0,
        **options: Any,
    ) -> NDArray[Any]:
        """As `Engine.embed`. Cancelling the task cancels its rows."""
        params = PoolingParams(Task.EMBED, dimensions, normalize, _output_dtype(dtype))
        _, answer = await self._run(texts, params, _options(options), priority)
        return answer.values

    async def token_embed(
        self,
        texts: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        dtype: str = "float32",
        priority: int = 0,
        **options: Any,
    ) -> list[NDArray[Any]]:
        """As `Engine.token_embed`."""
        params = PoolingParams(Task.TOKEN_EMBED, dimensions, normalize, _output_dtype(dtype))
        request, answer = await self._run(texts, params, _options(options), priority)
        return list(np.split(answer.values, request.starts[1:]))

    async def classify(
        self, texts: Inputs, *, use_activation: bool = True, priority: int = 0, **options: Any
    ) -> NDArray[Any]:
        """As `Engine.classify`."""
        params = PoolingParams(Task.CLASSIFY, normalize=use_activation)
        _, answer = await self._run(texts, params, _options(options), priority)
        return answer.values

    async def token_classify(
        self, texts: Inputs, *, use_activation: bool = True, priority: int = 0, **options: Any
    ) -> list[NDArray[Any]]:
        """As `Engine.token_classify`."""
        params = PoolingParams(Task.TOKEN_CLASSIFY, normalize=use_activation)
        request, answer = await self._run(texts, params, _options(options), priority)
        return list(np.split(answer.values, request.starts[1:]))

    @overload
    async def sparse(
        self, texts: Inputs, *, token_strings: Literal[False] = False, **options: Any
    ) -> list[dict[int, float]]: ...

    @overload
    async def sparse(
        self, texts: Inputs, *, token_strings: Literal[True], **options: Any
    ) -> list[list[Term]]: ...

    async def sparse(
        self,
        texts: Inputs,
        *,
        top_k: int | None = None,
        min_weight: float = 0.0,
        token_strings: bool = False,
        priority: int = 0,
        **options: Any,
    ) -> list[dict[int, float]] | list[list[Term]]:
        """As `Engine.sparse`."""
        check_min_weight(min_weight)
        params = PoolingParams(Task.SPARSE, top_k=top_k)
        request, answer = await self._run(texts, params, _options(options), priority)
        engine = self._open()
        return engine._shown(engine._sparse_rows(request, answer, top_k, min_weight), token_strings)

    async def _run(
        self, texts: Inputs, params: PoolingParams, options: InputOptions, priority: int
    ) -> tuple[Request, Answer]:
        engine = self._open()
        request_id = f"local-{next(engine._numbers)}"
        request = await asyncio.get_running_loop().run_in_executor(
            engine._tokenize, engine._processor.prepare, request_id, texts, params, options
        )
        request.priority = priority
        future = engine._engine.submit(request)
        try:
            return request, await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            engine._engine.cancel(request_id)
            raise

    async def close(self) -> None:
        if self._inner is not None:
            await asyncio.to_thread(self._inner.close)
            self._inner = None

    def _open(self) -> Engine:
        if self._inner is None:
            raise RuntimeError("use `async with AsyncEngine(...) as engine`")
        return self._inner


def _options(values: dict[str, Any]) -> InputOptions:
    if not values:
        return DEFAULT_OPTIONS
    try:
        return InputOptions(**values)
    except TypeError:
        unknown = sorted(set(values) - set(InputOptions.__dataclass_fields__))
        raise BadValue(f"unknown option {unknown[0]!r}", param=unknown[0]) from None


def _output_dtype(name: str) -> OutputDtype:
    try:
        return OutputDtype(name)
    except ValueError:
        raise BadValue(f"dtype {name!r} is unknown; use {', '.join(OutputDtype)}", param="dtype") from None


@contextmanager
def _bar(total: int, wanted: bool | None) -> Iterator[Any]:
    show = total > _PROGRESS_FROM and sys.stderr.isatty() if wanted is None else wanted
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("embedding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)

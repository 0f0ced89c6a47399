"""Offline use: `Engine` and `AsyncEngine`, the same core as the server's, in this process."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.spec import ModelSpec, describe, with_max_model_len
from penstock.config import EngineConfig, from_mapping
from penstock.errors import BadValue
from penstock.inputs.chunks import Chunker, Chunking, ChunkOptions
from penstock.inputs.multi_task import check_tasks, want_also
from penstock.inputs.offsets import Places, prepare_located
from penstock.inputs.processor import DEFAULT_OPTIONS, InputOptions, InputProcessor, Inputs, split_inputs
from penstock.inputs.tokenizer import Tokenizer
from penstock.offline.generation import AsyncGenerating, Generating
from penstock.offline.local import LocalEngine
from penstock.offline.ranking import AsyncRanking, Ranking
from penstock.outputs.chunks import combine
from penstock.outputs.entities import AGGREGATIONS, Aggregation, Entity, find_entities
from penstock.outputs.sparse import SparseRow, Term, check_min_weight, sparse_rows, with_tokens
from penstock.outputs.steps import check_steps, step_rows
from penstock.outputs.tokens import token_rows
from penstock.runner.load import settle
from penstock.types import Array, Chunks, Ints, OutputDtype, PooledOutput, PoolingParams, Request, Task

WINDOW = 2048  # texts that are tokenised and ordered by length together
_PROGRESS_FROM = 2 * WINDOW


@dataclass(frozen=True, slots=True, eq=False)
class TextChunks:
    """One text in late chunks."""

    vector: NDArray[Any]  # [dim], of the whole text
    vectors: NDArray[Any]  # [chunks, dim]
    tokens: Ints  # [chunks, 2], the tokens of each chunk in the row that the model saw
    chars: Ints | None  # [chunks, 2], its characters in the text; None for token ids


T = TypeVar("T")
_Prepare = Callable[[str, Any], tuple[Request, T]]  # with what is needed to read the answer


class Engine(Ranking, Generating):
    """A model in this process.

    `model` is a folder, a hub id, or nothing for the embedded default; every field of
    `EngineConfig` can be given by name.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        config = from_mapping(EngineConfig, {"model": model, **options})
        described = describe(config)
        settings = settle(config, described)
        self.spec: ModelSpec = with_max_model_len(described, settings.max_model_len)
        self.settings = settings
        self._processor = InputProcessor(self.spec, Tokenizer(self.spec.path))
        self._chunker = Chunker(self._processor)
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
        chunking: Chunking = "none",
        progress: bool | None = None,
        priority: int = 0,
        **options: Any,
    ) -> NDArray[Any]:
        """One vector a text, as an array [n, dimensions].

        `options` are those of `InputOptions`: prompt_name, prompt, instruction, input_type,
        truncate_prompt_tokens (-1: cut at the model's limit), truncation_side, add_special_tokens.
        A text beyond the model's limit is an error unless truncation is asked for, or `chunking="mean"`:
        then it is split into parts that fit, and their vectors' mean, weighted by tokens, is its own.
        `progress` shows a bar; by default only for long calls on a terminal.
        """
        params = PoolingParams(Task.EMBED, dimensions, normalize, _output_dtype(dtype))
        prepare = self._chunked(params, _options(options), _one_vector(chunking))
        answers = self._windows(texts, prepare, progress, priority)
        parts = [self._combined(*done, params)[0] for done in answers]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def embed_chunks(
        self,
        texts: Inputs,
        *,
        chunk_size: int | None = None,
        chunk_spans: Sequence[Sequence[tuple[int, int]]] | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        dtype: str = "float32",
        progress: bool | None = None,
        priority: int = 0,
        **options: Any,
    ) -> list[TextChunks]:
        """Late chunking: each text runs whole, and each `chunk_size` tokens of it (256 unless told), or
        each of its `chunk_spans` in characters, are pooled apart, so that a chunk's vector knows its
        surroundings."""
        params = PoolingParams(Task.EMBED, dimensions, normalize, _output_dtype(dtype))
        how = ChunkOptions(chunking="late", chunk_size=chunk_size, chunk_spans=chunk_spans)
        prepare = self._chunked(params, _options(options), how)
        count = 1 if isinstance(texts, str) else len(texts)
        if chunk_spans is not None and len(chunk_spans) != count:
            raise BadValue(
                f"chunk_spans has {len(chunk_spans)} lists for {count} texts; give one a text",
                param="chunk_spans",
            )
        out: list[TextChunks] = []
        for request, chunks, answer in self._windows(texts, prepare, progress, priority):
            out += _by_text(chunks, *self._combined(request, chunks, answer, params))
        return out

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
        """One vector a token: for each text an array [tokens, dimensions], special tokens included.

        A late-interaction model reads texts as documents and leaves out the tokens of its skip list;
        `input_type="query"` makes them queries.
        """
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

    def entities(
        self,
        texts: Inputs,
        *,
        aggregation: Aggregation = "simple",
        progress: bool | None = None,
        priority: int = 0,
        **options: Any,
    ) -> list[list[Entity]]:
        """What a token classifier finds in each text, with its place. `aggregation` is how tokens become
        entities: `none` lists labelled tokens, `simple` joins neighbours of one tag, and `first`,
        `average`, `max` settle one label a word before that."""
        prepare = self._located(_options(options), aggregation)
        found: list[list[Entity]] = []
        for request, places, answer in self._windows(texts, prepare, progress, priority):
            found += self._entities(request, places, answer, aggregation)
        return found

    def reward(
        self, texts: Inputs, *, use_activation: bool | None = None, priority: int = 0, **options: Any
    ) -> NDArray[Any] | list[NDArray[Any]]:
        """What a reward model thinks of each text, [n, outputs]; of one that judges steps, for each text
        an array [steps, labels]."""
        params = PoolingParams(Task.REWARD, normalize=use_activation)
        spec = self.spec.reward
        if spec is None or not spec.steps:
            return _joined(self._answers(texts, params, _options(options), None, priority))
        tag = self.spec.step_tag
        rows: list[NDArray[Any]] = []
        for request, answer in self._answers(texts, params, _options(options), None, priority, tag):
            rows += step_rows(request, answer.values, tag)
        return rows

    def outputs(
        self,
        texts: Inputs,
        tasks: Sequence[str],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
        priority: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """Several tasks from one forward: {task: what the method of that name gives}."""
        wanted = [_params_of(task, dimensions, normalize, top_k) for task in tasks]
        check_tasks([params.task for params in wanted])
        check_min_weight(min_weight)
        for params in wanted:
            self._processor.check(params)
        how = _options(options)

        def prepare(request_id: str, window: Any) -> tuple[Request, None]:
            request = self._processor.prepare(request_id, window, wanted[0], how)
            want_also(self._processor, request, wanted[1:])
            return request, None

        parts: list[list[Any]] = [[] for _ in wanted]
        for request, _, answer in self._windows(texts, prepare, None, priority):
            arrays = (answer.values, *answer.more)
            for part, params, array in zip(parts, request.wants, arrays, strict=True):
                part.append(self._shown_output(request, params, array, top_k, min_weight))
        return {params.task.value: _merged(part) for params, part in zip(wanted, parts, strict=True)}

    def _shown_output(
        self, request: Request, params: PoolingParams, values: Array, top_k: int | None, min_weight: float
    ) -> Any:
        if params.task is Task.SPARSE:
            special = self._processor.tokenizer.special_ids
            rows = sparse_rows(request, values, special, top_k, min_weight, params)
            return [row.as_dict() for row in rows]
        if params.steps:
            return step_rows(request, values, self.spec.step_tag)
        return token_rows(request, values) if params.per_token else values

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
        self, request: Request, answer: PooledOutput, top_k: int | None, min_weight: float
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

    def _new_id(self) -> str:
        return f"local-{next(self._numbers)}"

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
            rows += token_rows(request, answer.values)
        return rows

    def _answers(
        self,
        inputs: Inputs,
        params: PoolingParams,
        options: InputOptions,
        progress: bool | None,
        priority: int,
        step_tag: int | None = None,
    ) -> Iterator[tuple[Request, PooledOutput]]:
        self._processor.check(params)

        def prepare(request_id: str, window: Any) -> tuple[Request, None]:
            request = self._processor.prepare(request_id, window, params, options)
            if step_tag is not None:
                check_steps(request, step_tag)
            return request, None

        for request, _, answer in self._windows(inputs, prepare, progress, priority):
            yield request, answer

    def _chunked(
        self, params: PoolingParams, options: InputOptions, how: ChunkOptions
    ) -> _Prepare[Chunks | None]:
        """Checks now, prepares later: windows in their order, each with its part of the spans."""
        self._chunker.check(params, options, how)
        self._processor.check(params)
        spans = None if how.chunk_spans is None else iter(how.chunk_spans)

        def prepare(request_id: str, window: Any) -> tuple[Request, Chunks | None]:
            own = how if spans is None else replace(how, chunk_spans=[*itertools.islice(spans, len(window))])
            return self._chunker.prepare(request_id, window, params, options, own)

        return prepare

    def _combined(
        self, request: Request, chunks: Chunks | None, answer: PooledOutput, params: PoolingParams
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The vectors of the texts and of their chunks."""
        if chunks is None:
            return answer.values, answer.values
        return combine(answer.values, chunks, params, self.spec.pooling.normalize)

    def _located(self, options: InputOptions, aggregation: str) -> _Prepare[Places]:
        if aggregation not in AGGREGATIONS:
            raise BadValue(
                f"aggregation {aggregation!r} is unknown; use {', '.join(AGGREGATIONS)}", param="aggregation"
            )
        params = PoolingParams(Task.TOKEN_CLASSIFY)
        self._processor.check(params)

        def prepare(request_id: str, window: Any) -> tuple[Request, Places]:
            return prepare_located(self._processor, request_id, window, params, options)

        return prepare

    def _entities(
        self, request: Request, places: Places, answer: PooledOutput, aggregation: Aggregation
    ) -> list[list[Entity]]:
        where = (request.lengths, places.chars, places.words)
        return find_entities(places.texts, answer.values, *where, self.spec.labels, aggregation)

    def _windows(
        self, inputs: Inputs, prepare: _Prepare[T], progress: bool | None, priority: int
    ) -> Iterator[tuple[Request, T, PooledOutput]]:
        texts, ids = split_inputs(inputs)
        return self._in_windows(ids if texts is None else texts, prepare, progress, priority)

    def _in_windows(
        self, rows: Sequence[Any], prepare: _Prepare[T], progress: bool | None, priority: int
    ) -> Iterator[tuple[Request, T, PooledOutput]]:
        """Answers by window, in order: one window is tokenised while the one before it runs."""
        windows = [rows[i : i + WINDOW] for i in range(0, len(rows), WINDOW)]
        with _bar(len(rows), progress) as advance:
            running: list[tuple[Request, T, int, Future[PooledOutput]]] = []
            for window in windows:
                if len(running) == 2:
                    yield _finished(running, advance)
                request_id = f"local-{next(self._numbers)}"
                request, beside = self._tokenize.submit(prepare, request_id, window).result()
                request.priority = priority
                running.append((request, beside, len(window), self._engine.submit(request)))
            while running:
                yield _finished(running, advance)


def _finished(
    running: list[tuple[Request, T, int, Future[PooledOutput]]], advance: Callable[[int], None]
) -> tuple[Request, T, PooledOutput]:
    request, beside, count, future = running.pop(0)
    answer = future.result()
    advance(count)
    return request, beside, answer


def _one_vector(chunking: str) -> ChunkOptions:
    if chunking == "late":
        raise BadValue("late chunking gives several vectors a text; use embed_chunks", param="chunking")
    return ChunkOptions(chunking=chunking)


def _by_text(chunks: Chunks | None, texts: NDArray[Any], vectors: NDArray[Any]) -> list[TextChunks]:
    assert chunks is not None and chunks.spans is not None
    cuts = np.cumsum(chunks.counts)[:-1]
    count = len(chunks.counts)
    chars = [None] * count if chunks.chars is None else np.split(chunks.chars, cuts)
    parts = zip(texts, np.split(vectors, cuts), np.split(chunks.spans, cuts), chars, strict=True)
    return [TextChunks(*part) for part in parts]


def _params_of(task: str, dimensions: int | None, normalize: bool | None, top_k: int | None) -> PoolingParams:
    """The parameters as far as they mean something to the task."""
    try:
        kind = Task(task)
    except ValueError:
        raise BadValue(f"task {task!r} is unknown; use {', '.join(Task)}", param="task") from None
    if kind in (Task.EMBED, Task.TOKEN_EMBED):
        return PoolingParams(kind, dimensions, normalize)
    if kind is Task.SPARSE:
        return PoolingParams(kind, top_k=top_k)
    return PoolingParams(kind, normalize=normalize)


def _merged(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return [row for part in parts for row in part] if isinstance(parts[0], list) else np.concatenate(parts)


def _joined(answers: Iterator[tuple[Request, PooledOutput]]) -> NDArray[Any]:
    parts = [answer.values for _, answer in answers]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class AsyncEngine(AsyncRanking, AsyncGenerating):
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
        chunking: Chunking = "none",
        priority: int = 0,
        **options: Any,
    ) -> NDArray[Any]:
        """As `Engine.embed`. Cancelling the task cancels its rows."""
        params = PoolingParams(Task.EMBED, dimensions, normalize, _output_dtype(dtype))
        prepare = self._open()._chunked(params, _options(options), _one_vector(chunking))
        done = await self._submit(texts, prepare, priority)
        return self._open()._combined(*done, params)[0]

    async def embed_chunks(
        self,
        texts: Inputs,
        *,
        chunk_size: int | None = None,
        chunk_spans: Sequence[Sequence[tuple[int, int]]] | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        dtype: str = "float32",
        priority: int = 0,
        **options: Any,
    ) -> list[TextChunks]:
        """As `Engine.embed_chunks`."""
        params = PoolingParams(Task.EMBED, dimensions, normalize, _output_dtype(dtype))
        how = ChunkOptions(chunking="late", chunk_size=chunk_size, chunk_spans=chunk_spans)
        prepare = self._open()._chunked(params, _options(options), how)
        request, chunks, answer = await self._submit(texts, prepare, priority)
        return _by_text(chunks, *self._open()._combined(request, chunks, answer, params))

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
        return token_rows(request, answer.values)

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
        return token_rows(request, answer.values)

    async def entities(
        self, texts: Inputs, *, aggregation: Aggregation = "simple", priority: int = 0, **options: Any
    ) -> list[list[Entity]]:
        """As `Engine.entities`."""
        prepare = self._open()._located(_options(options), aggregation)
        done = await self._submit(texts, prepare, priority)
        return self._open()._entities(*done, aggregation)

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
    ) -> tuple[Request, PooledOutput]:
        def prepare(request_id: str, inputs: Any) -> tuple[Request, None]:
            return self._open()._processor.prepare(request_id, inputs, params, options), None

        request, _, answer = await self._submit(texts, prepare, priority)
        return request, answer

    async def _submit(
        self, texts: Any, prepare: _Prepare[T], priority: int
    ) -> tuple[Request, T, PooledOutput]:
        engine = self._open()
        request_id = f"local-{next(engine._numbers)}"
        request, beside = await asyncio.get_running_loop().run_in_executor(
            engine._tokenize, prepare, request_id, texts
        )
        request.priority = priority
        future = engine._engine.submit(request)
        try:
            return request, beside, await asyncio.wrap_future(future)
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

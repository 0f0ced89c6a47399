"""`AsyncEngine`: a model in this process for asyncio programs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.errors import BadValue, NotPossible
from penstock.inputs.chunks import Chunking, ChunkOptions
from penstock.inputs.generation import DEFAULT_MAX_TOKENS, SamplingParams
from penstock.inputs.offsets import require_texts
from penstock.inputs.pair_options import Pair, are_pairs, make_pairs
from penstock.inputs.processor import InputOptions, Inputs, num_inputs
from penstock.inputs.vectors import comparison_from_arrays
from penstock.offline.images import LocalImages, require_images
from penstock.offline.keywords import (
    InputKeywords,
    PairKeywords,
    Unpack,
    explicit_signature,
    input_options,
    pair_options,
)
from penstock.offline.open import DescribedModel, LocalModel
from penstock.offline.progress import progress_bar
from penstock.outputs.entities import Aggregation, Entity
from penstock.outputs.ranking import check_top_n
from penstock.outputs.spans import SpanOptions
from penstock.outputs.sparse import SparseRow, Term, with_tokens
from penstock.tasks.adapted import Adapted
from penstock.tasks.classify import Classify, ClassifyPairs, TokenClassify
from penstock.tasks.embed import ChunkedEmbeddings, Embed, EmbedInChunks, TextChunks
from penstock.tasks.entities import FindEntities, FindLabelledEntities
from penstock.tasks.generate import ChatPrompt, Completion, Generate, Message, TextPrompts
from penstock.tasks.labels import row_options
from penstock.tasks.multi_task import MultiTask
from penstock.tasks.reward import Reward, StepRewards, rewards_steps
from penstock.tasks.run import PoolingTask, Scheduling, TaskRunner, request_ids
from penstock.tasks.score import RankedDocument, Score, rank
from penstock.tasks.sparse import Sparse
from penstock.tasks.text_stream import TextDelta
from penstock.tasks.token_embed import TokenEmbed
from penstock.tasks.zero_shot import DEFAULT_HYPOTHESIS, LabelScores, ZeroShotOptions, zero_shot_task
from penstock.types import OutputDtype, PoolingParams, Task

R = TypeVar("R")
Texts = str | Sequence[str]
Sampling = SamplingParams | Sequence[SamplingParams] | None


class AsyncEngine:
    """A model in this process. Calls from many tasks share the engine's steps.

    `model` is a folder, a hub id, or nothing for the embedded default; `config` are fields of `EngineConfig`.
    Use it as `async with AsyncEngine(...) as engine`. Cancelling a call cancels its rows.
    """

    def __init__(self, model: str | None = None, **config: Any) -> None:
        self._model, self._config = model, config
        self._local: LocalModel | None = None

    @classmethod
    def over(cls, local: LocalModel) -> AsyncEngine:
        """Create an engine for a model that is already open."""
        engine = cls()
        engine._use(local)
        return engine

    def _use(self, local: LocalModel) -> None:
        self._local = local
        self._ids = request_ids("local")
        self._runner = TaskRunner(local.text, local.engine, self._ids)
        self._local_images = LocalImages(local.text.spec)

    async def __aenter__(self) -> AsyncEngine:
        if self._local is None:
            described = await asyncio.to_thread(DescribedModel.of, self._model, self._config)
            self._use(await asyncio.to_thread(described.load))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish all submitted calls, then release the model."""
        if self._local is not None:
            local, self._local = self._local, None
            self._local_images.close()
            await asyncio.to_thread(local.close)

    @property
    def local(self) -> LocalModel:
        """The opened model: its description, settings, text side and engine handle."""
        if self._local is None:
            raise RuntimeError("the engine is not open; use `async with AsyncEngine(...) as engine`")
        return self._local

    @property
    def spec(self) -> ModelSpec:
        return self.local.spec

    @property
    def settings(self) -> Resolved:
        return self.local.settings

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a classifier's outputs."""
        return self.spec.labels

    @explicit_signature
    async def embed(
        self,
        texts: Inputs | None = None,
        *,
        images: Sequence[Any] | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        dtype: str = "float32",
        chunking: Chunking = "none",
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> NDArray[Any]:
        """Embed texts or images: one vector each, as an array [texts, dimensions].

        Images are paths, bytes, Pillow images or arrays. Give them as `images` or among the texts.

        A text that exceeds the model's limit is an error, unless `truncate_prompt_tokens` is set (-1 cuts at
        the limit) or `chunking` is "mean". That splits the text into parts that fit, and averages their
        vectors, weighted by tokens. `progress` shows a progress bar; by default only for long calls on a
        terminal.
        """
        params = PoolingParams(Task.EMBED, dimensions, normalize, output_dtype(dtype))
        given = input_options(options)
        if images is not None:
            if texts is not None or chunking != "none":
                raise BadValue("give texts or images, not both, and images without chunking", param="images")
            return await self._embed_images(require_images(images), params, given, priority)
        if texts is None:
            raise BadValue("give texts or images", param="texts")
        texts = await self._images.replace(texts)
        if chunking == "none":
            task = Embed(inputs=cast(Inputs, texts), params=params, options=given)
            return await self._run(task, priority, progress)
        if chunking == "late":
            raise BadValue("late chunking gives several vectors a text; use embed_chunks", param="chunking")
        how = ChunkOptions(chunking=chunking)
        long = EmbedInChunks(inputs=texts, params=params, options=given, chunking=how)
        windows: list[ChunkedEmbeddings] = await self._run(long, priority, progress)
        return _concatenated([window.vectors for window in windows])

    async def _embed_images(
        self, images: Sequence[Any], params: PoolingParams, options: InputOptions, priority: int
    ) -> NDArray[Any]:
        """Embed images in windows: the next window is prepared while one runs."""
        running: asyncio.Task[NDArray[Any]] | None = None
        parts: list[NDArray[Any]] = []
        try:
            async for window in self._images.windows(images):
                if running is not None:
                    parts.append(await running)
                task = Embed(inputs=window, params=params, options=options)
                running = asyncio.ensure_future(self._run(task, priority, progress=False))
            if running is not None:
                parts.append(await running)
        finally:
            if running is not None:
                running.cancel()
        return np.concatenate(parts)

    @explicit_signature
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
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> list[TextChunks]:
        """Embed each chunk of each text by late chunking.

        The model reads a text as a whole and each chunk is pooled separately, so a chunk's vector reflects
        its context. Chunks have `chunk_size` tokens (256 by default). Alternatively `chunk_spans` gives the
        chunks of each text, in characters.
        """
        params = PoolingParams(Task.EMBED, dimensions, normalize, output_dtype(dtype))
        how = ChunkOptions(chunking="late", chunk_size=chunk_size, chunk_spans=chunk_spans)
        task = EmbedInChunks(inputs=texts, params=params, options=input_options(options), chunking=how)
        windows = await self._run(task, priority, progress)
        return [text for window in windows for text in window.by_text()]

    @explicit_signature
    async def token_embed(
        self,
        texts: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        dtype: str = "float32",
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> list[NDArray[Any]]:
        """Embed every token: for each text an array [tokens, dimensions], special tokens included.

        Models that retrieve document pages accept images among the texts: paths, bytes, Pillow images or
        arrays. A late-interaction model treats texts as documents and omits the tokens of its skip list;
        `input_type="query"` makes them queries.
        """
        params = PoolingParams(Task.TOKEN_EMBED, dimensions, normalize, output_dtype(dtype))
        inputs = await self._images.replace(texts)
        task = TokenEmbed(inputs=inputs, params=params, options=input_options(options))
        return await self._run(task, priority, progress)

    @explicit_signature
    async def classify(
        self,
        texts: Inputs | Sequence[Pair],
        *,
        use_activation: bool = True,
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> NDArray[Any]:
        """Classify texts: the probability of each of `labels` as an array [texts, labels].

        With `use_activation=False` the values are logits. A text may be a pair of texts, which the model
        reads together.
        """
        params, given = PoolingParams(Task.CLASSIFY, normalize=use_activation), input_options(options)
        if are_pairs(texts):
            return await self._run(
                ClassifyPairs(pairs=texts, params=params, options=given), priority, progress
            )
        task = Classify(inputs=cast(Inputs, texts), params=params, options=given)
        return await self._run(task, priority, progress)

    async def zero_shot(
        self,
        texts: Texts,
        labels: Sequence[str],
        *,
        hypothesis_template: str = DEFAULT_HYPOTHESIS,
        multi_label: bool = False,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[LabelScores]:
        """Score how well each of `labels` fits each text, the best label first.

        An NLI model tests a sentence that `hypothesis_template` builds from each label. Scores sum to 1 over
        the labels; with `multi_label` each label is scored independently.
        """
        options = ZeroShotOptions(
            hypothesis_template=hypothesis_template,
            multi_label=multi_label,
            truncate_prompt_tokens=truncate_prompt_tokens,
            cache_salt=cache_salt,
        )
        inputs = await self._images.replace(texts)
        task = zero_shot_task(self.local.text, inputs, labels, options)
        return await self._run(task, priority, progress, adapter)

    @explicit_signature
    async def token_classify(
        self,
        texts: Inputs,
        *,
        use_activation: bool = True,
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> list[NDArray[Any]]:
        """Classify every token: for each text an array [tokens, labels] of probabilities."""
        params = PoolingParams(Task.TOKEN_CLASSIFY, normalize=use_activation)
        task = TokenClassify(inputs=texts, params=params, options=input_options(options))
        return await self._run(task, priority, progress)

    @explicit_signature
    async def entities(
        self,
        texts: Inputs,
        *,
        aggregation: Aggregation = "simple",
        labels: Sequence[str] | None = None,
        threshold: float = 0.5,
        flat: bool = True,
        multi_label: bool = False,
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> list[list[Entity]]:
        """Find the entities in each text with a token classifier, with their character offsets.

        `aggregation` joins tokens: `none` lists labelled tokens, `simple` joins neighbouring tokens with the
        same tag. `first`, `average` and `max` first choose one label for each word.

        A GLiNER model finds entities of your `labels` whose score exceeds `threshold`. By default entities do
        not overlap. `flat=False` allows nested entities; `multi_label=True` allows several labels for the
        same words.
        """
        given = input_options(options)
        if labels is None:
            task = FindEntities(inputs=texts, options=given, aggregation=aggregation)
            return await self._run(task, priority, progress)
        spans = SpanOptions(threshold=threshold, flat=flat, multi_label=multi_label)
        rows = row_options(replace(given, adapter=None))
        labelled = FindLabelledEntities(texts=require_texts(texts), labels=labels, options=spans, rows=rows)
        return await self._run(labelled, priority, progress, given.adapter)

    @explicit_signature
    async def reward(
        self,
        texts: Inputs,
        *,
        use_activation: bool | None = None,
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> NDArray[Any] | list[NDArray[Any]]:
        """Compute a reward model's outputs for each text, [texts, outputs].

        A process reward model judges steps: the result is one array [steps, labels] per text.
        """
        params, given = PoolingParams(Task.REWARD, normalize=use_activation), input_options(options)
        if rewards_steps(self.local.text):
            return await self._run(
                StepRewards(inputs=texts, params=params, options=given), priority, progress
            )
        return await self._run(Reward(inputs=texts, params=params, options=given), priority, progress)

    @explicit_signature
    async def sparse(
        self,
        texts: Inputs,
        *,
        top_k: int | None = None,
        min_weight: float = 0.0,
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> list[dict[int, float]]:
        """Embed texts as sparse vectors: {token id: weight} for each text, heaviest first.

        `top_k` keeps the heaviest terms (at most 1,024 by default); `min_weight` drops terms below it.
        """
        rows = await self._sparse_rows(texts, top_k, min_weight, priority, progress, input_options(options))
        return [row.as_dict() for row in rows]

    @explicit_signature
    async def sparse_terms(
        self,
        texts: Inputs,
        *,
        top_k: int | None = None,
        min_weight: float = 0.0,
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> list[list[Term]]:
        """Like `sparse`, with token strings: for each text a list of `Term(token_id, token, weight)`."""
        rows = await self._sparse_rows(texts, top_k, min_weight, priority, progress, input_options(options))
        return with_tokens(rows, self.local.text.tokenizer.token_strings)

    async def _sparse_rows(
        self,
        texts: Inputs,
        top_k: int | None,
        min_weight: float,
        priority: int,
        progress: bool | None,
        options: InputOptions,
    ) -> list[SparseRow]:
        params = PoolingParams(Task.SPARSE, top_k=top_k)
        task = Sparse(inputs=texts, params=params, options=options, min_weight=min_weight)
        return await self._run(task, priority, progress)

    @explicit_signature
    async def outputs(
        self,
        texts: Inputs,
        tasks: Sequence[str],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> dict[str, Any]:
        """Compute several tasks in one forward pass: {task: result of the method with that name}."""
        if not tasks:
            raise BadValue("tasks is empty; name at least one", param="tasks")
        first, *more = [_task_params(task, dimensions, normalize, top_k) for task in tasks]
        given = input_options(options)
        task = MultiTask(inputs=texts, params=first, options=given, more=tuple(more), min_weight=min_weight)
        columns = await self._run(task, priority, progress)
        return {name: _plain(column) for name, column in zip(tasks, columns, strict=True)}

    @explicit_signature
    async def score(
        self,
        queries: Texts,
        documents: Texts,
        *,
        use_activation: bool | None = None,
        adapter: str | None = None,
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[PairKeywords],
    ) -> NDArray[Any]:
        """Score how well each document answers its query, [documents].

        `queries` is one query for all documents, or a list with one for each. Cross-encoders read each pair
        together; embedders compare vectors. `use_activation=False` returns raw scores; by default the model's
        configuration decides whether an activation is applied.
        """
        params = PoolingParams(Task.SCORE, normalize=use_activation)
        given = (await self._images.replace(queries), await self._images.replace(documents))
        task = Score(pairs=make_pairs(*given), params=params, options=pair_options(options))
        return await self._run(task, priority, progress, adapter)

    @explicit_signature
    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        use_activation: bool | None = None,
        adapter: str | None = None,
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[PairKeywords],
    ) -> list[RankedDocument]:
        """Rank documents from best to worst, at most `top_n`. Equal scores keep the caller's order."""
        check_top_n(top_n)
        scores = await self.score(
            query,
            list(documents),
            use_activation=use_activation,
            adapter=adapter,
            priority=priority,
            progress=progress,
            **options,
        )
        return rank(scores, documents, top_n)

    async def maxsim(
        self,
        queries: Any,
        documents: Sequence[Any],
        *,
        query_scales: Sequence[Any] | None = None,
        document_scales: Sequence[Any] | None = None,
    ) -> NDArray[Any]:
        """Compute late-interaction scores of given token vectors, [documents].

        `queries` is one matrix [tokens, dim] for all documents, or a list with one for each. `documents` is a
        list of matrices. Vectors are float32, float16, or int8 with optional scales, one for each vector.
        """
        comparison = comparison_from_arrays(
            next(self._ids), queries, documents, query_scales, document_scales
        )
        comparison.arrival_s = time.monotonic()
        output = await self.local.engine.compare(comparison)
        return output.values[:, 0]

    async def generate(
        self,
        prompts: Inputs,
        sampling: Sampling = None,
        *,
        add_special_tokens: bool = True,
        adapter: str | None = None,
        priority: int = 0,
    ) -> list[Completion]:
        """Generate completions of prompts, as the server's `/v1/completions` does.

        A prompt is a text or its token ids. `sampling` applies to all prompts, or is a list with one for
        each. With `n` above 1 the completions of a prompt are adjacent in the result.
        """
        local, scheduling = self.local, Scheduling(priority=priority)
        with self._held(adapter) as adapter_id:
            calls = _generate_calls(prompts, sampling, add_special_tokens)
            calls = [replace(call, adapter=adapter_id) for call in calls]
            runs = [call.run(local.text, local.engine, next(self._ids), scheduling) for call in calls]
            if len(runs) == 1:
                return await runs[0]
            groups = await _all(runs)
        return [replace(each, prompt_index=at) for at, group in enumerate(groups) for each in group]

    async def generate_stream(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        adapter: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[TextDelta, None]:
        """Stream the completion of one prompt as it is generated. Closing the iterator cancels the rest."""
        inputs: Any = prompt if isinstance(prompt, str) else [list(prompt)]
        source = TextPrompts(prompts=inputs, add_special_tokens=add_special_tokens)
        async with aclosing(self._stream(_generate(source, sampling), priority, adapter)) as stream:
            async for delta in stream:
                yield delta

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> list[Completion]:
        """Generate the reply to a conversation, as `/v1/chat/completions` does with the chat template."""
        local, scheduling = self.local, Scheduling(priority=priority)
        with self._held(adapter) as adapter_id:
            call = replace(_chat(messages, sampling, chat_template_kwargs), adapter=adapter_id)
            return await call.run(local.text, local.engine, next(self._ids), scheduling)

    async def chat_stream(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[TextDelta, None]:
        """Stream the reply to a conversation as it is generated. Closing the iterator cancels the rest."""
        call = _chat(messages, sampling, chat_template_kwargs)
        async with aclosing(self._stream(call, priority, adapter)) as stream:
            async for delta in stream:
                yield delta

    async def tokenize(self, texts: Texts, *, add_special_tokens: bool = True) -> list[list[int]]:
        """Tokenise texts: the token ids of each."""
        given = [texts] if isinstance(texts, str) else list(texts)
        return [row.tolist() for row in await self.local.text.batcher.encode(given, add_special_tokens)]

    async def detokenize(
        self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
    ) -> list[str]:
        """Convert each list of token ids to text."""
        ids = [list(row) for row in rows]
        decode = partial(self.local.text.tokenizer.decode_rows, ids, skip_special_tokens)
        return await self.local.text.batcher.call(decode, sum(map(len, ids)))

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load a LoRA adapter from its folder. Calls select it with `adapter=name`.

        `replace` replaces a loaded adapter of the same name.
        """
        await asyncio.to_thread(self.local.adapters.load, name, path, replace=replace)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Running calls that use it finish."""
        self.local.adapters.unload(name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded LoRA adapters."""
        return self.local.adapters.names

    async def _run(
        self, task: PoolingTask[R], priority: int, progress: bool | None, adapter: str | None = None
    ) -> R:
        """Run a task. `adapter` is for tasks whose options cannot name an adapter."""
        options = getattr(task, "options", None)
        if isinstance(options, InputOptions) and options.adapter not in (None, *self.spec.adapters):
            adapter = options.adapter
            task = replace(task, options=replace(options, adapter=None))  # type: ignore[type-var]
        with progress_bar(task.num_rows, progress) as advance, self._held(adapter) as adapter_id:
            chosen = task if adapter_id < 0 else Adapted(task, adapter_id)
            return await self._open_runner().run(chosen, Scheduling(priority=priority), advance)

    @contextmanager
    def _held(self, adapter: str | None) -> Iterator[int]:
        """Yield the id of a LoRA adapter (-1 for none). The adapter stays loaded until the block ends."""
        if adapter is None:
            yield -1
        elif adapter in self.spec.adapters:
            raise NotPossible(
                f"this method does not choose among the adapters of model {self.spec.name}; use embed",
                param="adapter",
            )
        else:
            with self.local.adapters.hold(adapter) as adapter_id:
                yield adapter_id

    @property
    def _images(self) -> LocalImages:
        _ = self.local  # raises if the engine is not open
        return self._local_images

    def _open_runner(self) -> TaskRunner:
        _ = self.local  # raises if the engine is not open
        return self._runner

    async def _stream(
        self, call: Generate, priority: int, adapter: str | None
    ) -> AsyncGenerator[TextDelta, None]:
        local, scheduling = self.local, Scheduling(priority=priority)
        with self._held(adapter) as adapter_id:
            chosen = replace(call, adapter=adapter_id)
            async with aclosing(
                chosen.stream(local.text, local.engine, next(self._ids), scheduling)
            ) as stream:
                async for deltas in stream:
                    for delta in deltas:
                        yield delta


def output_dtype(name: str) -> OutputDtype:
    try:
        return OutputDtype(name)
    except ValueError:
        raise BadValue(f"dtype {name!r} is unknown; use {', '.join(OutputDtype)}", param="dtype") from None


def _generate(source: TextPrompts | ChatPrompt, sampling: SamplingParams | None) -> Generate:
    params = SamplingParams() if sampling is None else _checked(sampling)
    default = DEFAULT_MAX_TOKENS if isinstance(source, TextPrompts) else None
    return Generate(source=source, fields=params, logprobs=params.logprobs, default_max_tokens=default)


def _checked(sampling: object) -> SamplingParams:
    if not isinstance(sampling, SamplingParams):
        raise _wrong_sampling(sampling)
    return sampling


def _wrong_sampling(given: object) -> TypeError:
    kind = type(given)
    return TypeError(
        f"sampling is of type {kind.__module__}.{kind.__qualname__}; use penstock.SamplingParams, such as "
        "SamplingParams(max_tokens=64, temperature=0)"
    )


def _generate_calls(prompts: Inputs, sampling: Sampling, add_special_tokens: bool) -> list[Generate]:
    """Make one call for all prompts, or one per prompt if each has its own parameters."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [_generate(TextPrompts(prompts=prompts, add_special_tokens=add_special_tokens), sampling)]
    given: object = sampling
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise _wrong_sampling(given)
    rows: list[Any] = [prompts] if num_inputs(prompts) == 1 and not _is_nested(prompts) else list(prompts)
    if len(sampling) != len(rows):
        raise BadValue(f"{len(sampling)} sampling parameters for {len(rows)} prompts", param="sampling")
    sources = (TextPrompts(prompts=row, add_special_tokens=add_special_tokens) for row in rows)
    return [_generate(source, params) for source, params in zip(sources, sampling, strict=True)]


def _is_nested(prompts: Inputs) -> bool:
    """Whether the prompts are a list of texts or of lists of token ids, even with one item."""
    return not isinstance(prompts, str) and len(prompts) > 0 and hasattr(prompts[0], "__len__")


def _chat(
    messages: Sequence[Message],
    sampling: SamplingParams | None,
    template_kwargs: Mapping[str, Any] | None,
) -> Generate:
    return _generate(ChatPrompt(messages=messages, template_kwargs=template_kwargs), sampling)


async def _all(runs: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Await all results. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _task_params(
    task: str, dimensions: int | None, normalize: bool | None, top_k: int | None
) -> PoolingParams:
    """Build the pooling parameters of a task from the parameters that apply to it."""
    try:
        kind = Task(task)
    except ValueError:
        raise BadValue(f"task {task!r} is unknown; use {', '.join(Task)}", param="task") from None
    if kind in (Task.EMBED, Task.TOKEN_EMBED):
        return PoolingParams(kind, dimensions, normalize)
    if kind is Task.SPARSE:
        return PoolingParams(kind, top_k=top_k)
    return PoolingParams(kind, normalize=normalize)


def _plain(column: Any) -> Any:
    """Convert sparse rows to dicts, as `sparse` returns them. Other results are unchanged."""
    if isinstance(column, list) and column and isinstance(column[0], SparseRow):
        return [row.as_dict() for row in column]
    return column


def _concatenated(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

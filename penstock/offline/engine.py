"""`Engine`: a model in this process for synchronous programs.

Each method runs the `AsyncEngine` method of the same name and waits for its result.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from numpy.typing import NDArray

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.inputs.chunks import Chunking
from penstock.inputs.generation import SamplingParams
from penstock.inputs.pair_options import Pair
from penstock.inputs.processor import Inputs
from penstock.offline.async_engine import AsyncEngine, Sampling, Texts
from penstock.offline.keywords import InputKeywords, PairKeywords, Unpack, explicit_signature
from penstock.offline.loop_thread import LoopThread
from penstock.offline.open import DescribedModel, LocalModel
from penstock.outputs.entities import Aggregation, Entity
from penstock.outputs.sparse import Term
from penstock.tasks.embed import TextChunks
from penstock.tasks.generate import Completion, Message
from penstock.tasks.score import RankedDocument
from penstock.tasks.text_stream import TextDelta
from penstock.tasks.zero_shot import DEFAULT_HYPOTHESIS, LabelScores

T = TypeVar("T")
_END: Any = object()


class Engine:
    """A model in this process. Several threads may call it at once; their calls share the engine's steps.

    `model` is a folder, a hub id, or nothing for the embedded default; `config` are fields of `EngineConfig`.
    """

    def __init__(self, model: str | None = None, **config: Any) -> None:
        self._use(DescribedModel.of(model, config).load())

    @classmethod
    def over(cls, local: LocalModel) -> Engine:
        """Create an engine for a model that is already open."""
        engine = cls.__new__(cls)
        engine._use(local)
        return engine

    def _use(self, local: LocalModel) -> None:
        self.local = local
        self._async = AsyncEngine.over(local)
        self._loop = LoopThread()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish all submitted calls, then release the model."""
        if not self._loop.closed:
            self.local.close()
            self._loop.close()

    @property
    def spec(self) -> ModelSpec:
        return self.local.spec

    @property
    def settings(self) -> Resolved:
        return self.local.settings

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load a LoRA adapter from its folder. Calls select it with `adapter=name`.

        `replace` replaces a loaded adapter of the same name.
        """
        self.local.adapters.load(name, path, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Running calls that use it finish."""
        self.local.adapters.unload(name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded LoRA adapters."""
        return self.local.adapters.names

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a classifier's outputs."""
        return self.spec.labels

    @explicit_signature
    def embed(
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
        return self._loop.wait(
            self._async.embed(
                texts,
                images=images,
                dimensions=dimensions,
                normalize=normalize,
                dtype=dtype,
                chunking=chunking,
                priority=priority,
                progress=progress,
                **options,
            )
        )

    @explicit_signature
    def embed_chunks(
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
        return self._loop.wait(
            self._async.embed_chunks(
                texts,
                chunk_size=chunk_size,
                chunk_spans=chunk_spans,
                dimensions=dimensions,
                normalize=normalize,
                dtype=dtype,
                priority=priority,
                progress=progress,
                **options,
            )
        )

    @explicit_signature
    def token_embed(
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
        return self._loop.wait(
            self._async.token_embed(
                texts,
                dimensions=dimensions,
                normalize=normalize,
                dtype=dtype,
                priority=priority,
                progress=progress,
                **options,
            )
        )

    @explicit_signature
    def classify(
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
        return self._loop.wait(
            self._async.classify(
                texts, use_activation=use_activation, priority=priority, progress=progress, **options
            )
        )

    def zero_shot(
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
        return self._loop.wait(
            self._async.zero_shot(
                texts,
                labels,
                hypothesis_template=hypothesis_template,
                multi_label=multi_label,
                truncate_prompt_tokens=truncate_prompt_tokens,
                cache_salt=cache_salt,
                adapter=adapter,
                priority=priority,
                progress=progress,
            )
        )

    @explicit_signature
    def token_classify(
        self,
        texts: Inputs,
        *,
        use_activation: bool = True,
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> list[NDArray[Any]]:
        """Classify every token: for each text an array [tokens, labels] of probabilities."""
        return self._loop.wait(
            self._async.token_classify(
                texts, use_activation=use_activation, priority=priority, progress=progress, **options
            )
        )

    @explicit_signature
    def entities(
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
        return self._loop.wait(
            self._async.entities(
                texts,
                aggregation=aggregation,
                labels=labels,
                threshold=threshold,
                flat=flat,
                multi_label=multi_label,
                priority=priority,
                progress=progress,
                **options,
            )
        )

    @explicit_signature
    def reward(
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
        return self._loop.wait(
            self._async.reward(
                texts, use_activation=use_activation, priority=priority, progress=progress, **options
            )
        )

    @explicit_signature
    def sparse(
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
        return self._loop.wait(
            self._async.sparse(
                texts, top_k=top_k, min_weight=min_weight, priority=priority, progress=progress, **options
            )
        )

    @explicit_signature
    def sparse_terms(
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
        return self._loop.wait(
            self._async.sparse_terms(
                texts, top_k=top_k, min_weight=min_weight, priority=priority, progress=progress, **options
            )
        )

    @explicit_signature
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
        progress: bool | None = None,
        **options: Unpack[InputKeywords],
    ) -> dict[str, Any]:
        """Compute several tasks in one forward pass: {task: result of the method with that name}."""
        return self._loop.wait(
            self._async.outputs(
                texts,
                tasks,
                dimensions=dimensions,
                normalize=normalize,
                top_k=top_k,
                min_weight=min_weight,
                priority=priority,
                progress=progress,
                **options,
            )
        )

    @explicit_signature
    def score(
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
        return self._loop.wait(
            self._async.score(
                queries,
                documents,
                use_activation=use_activation,
                adapter=adapter,
                priority=priority,
                progress=progress,
                **options,
            )
        )

    @explicit_signature
    def rerank(
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
        return self._loop.wait(
            self._async.rerank(
                query,
                documents,
                top_n=top_n,
                use_activation=use_activation,
                adapter=adapter,
                priority=priority,
                progress=progress,
                **options,
            )
        )

    def maxsim(
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
        return self._loop.wait(
            self._async.maxsim(queries, documents, query_scales=query_scales, document_scales=document_scales)
        )

    def generate(
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
        return self._loop.wait(
            self._async.generate(
                prompts, sampling, add_special_tokens=add_special_tokens, adapter=adapter, priority=priority
            )
        )

    def generate_stream(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        adapter: str | None = None,
        priority: int = 0,
    ) -> Iterator[TextDelta]:
        """Stream the completion of one prompt as it is generated. Closing the iterator cancels the rest."""
        return self._iterate(
            self._async.generate_stream(
                prompt, sampling, add_special_tokens=add_special_tokens, adapter=adapter, priority=priority
            )
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> list[Completion]:
        """Generate the reply to a conversation, as `/v1/chat/completions` does with the chat template."""
        return self._loop.wait(
            self._async.chat(
                messages,
                sampling,
                chat_template_kwargs=chat_template_kwargs,
                adapter=adapter,
                priority=priority,
            )
        )

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> Iterator[TextDelta]:
        """Stream the reply to a conversation as it is generated. Closing the iterator cancels the rest."""
        return self._iterate(
            self._async.chat_stream(
                messages,
                sampling,
                chat_template_kwargs=chat_template_kwargs,
                adapter=adapter,
                priority=priority,
            )
        )

    def tokenize(self, texts: Texts, *, add_special_tokens: bool = True) -> list[list[int]]:
        """Tokenise texts: the token ids of each."""
        return self._loop.wait(self._async.tokenize(texts, add_special_tokens=add_special_tokens))

    def detokenize(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Convert each list of token ids to text."""
        return self._loop.wait(self._async.detokenize(rows, skip_special_tokens=skip_special_tokens))

    def _iterate(self, stream: AsyncGenerator[T, None]) -> Iterator[T]:
        async def step() -> T:
            return await anext(stream, _END)

        try:
            while (item := self._loop.wait(step())) is not _END:
                yield item
        finally:
            if not self._loop.closed:
                self._loop.wait(stream.aclose())

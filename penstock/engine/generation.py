"""Continuing texts offline: the part of `Engine` and `AsyncEngine` that generates."""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.spec import ModelSpec
from penstock.core import Generated, Ints, PoolingParams, Request, SamplingParams, Task, Timings
from penstock.engine.local import LocalEngine
from penstock.engine.stream import Parts, Receive
from penstock.errors import BadValue, PenstockError
from penstock.inputs.processor import InputProcessor, Inputs, split_inputs

Sampling = SamplingParams | Sequence[SamplingParams] | None
_PARAMS = PoolingParams(Task.GENERATE)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What was generated after one prompt."""

    token_ids: list[int]
    text: str
    finish_reason: str  # "stop" | "length"
    stop_token: int | None  # the token that ended it, where one did
    # Where asked for, [tokens, 1 + logprobs]: the chosen token first, then the likeliest, falling.
    logprob_ids: Ints | None = None
    logprobs: NDArray[np.float32] | None = None
    ranks: Ints | None = None  # [tokens], of the chosen tokens, from 1
    timings: Timings = field(default_factory=Timings)


class Generating(ABC):
    spec: ModelSpec
    _processor: InputProcessor
    _engine: LocalEngine
    _numbers: Iterator[int]

    def generate(
        self,
        prompts: Inputs,
        sampling: Sampling = None,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[Completion]:
        """What follows each prompt, a text or its token ids. `sampling` is for all prompts, or one each."""
        requests = self._requests(prompts, sampling, add_special_tokens, priority, cache_salt)
        inbox: queue.SimpleQueue[tuple[str, Parts | PenstockError]] = queue.SimpleQueue()

        def receiver(name: str) -> Receive:
            return lambda parts: inbox.put((name, parts))

        for request in requests:
            self._engine.stream(request, receiver(request.id))
        parts: dict[str, Parts] = {request.id: [] for request in requests}
        left = sum(request.num_rows for request in requests)
        try:
            while left:
                name, found = inbox.get()
                if isinstance(found, PenstockError):
                    raise found
                parts[name] += found
                left -= sum(part.finish is not None for part in found)
        finally:
            for request in requests if left else ():
                self._engine.cancel(request.id)
        return [done for request in requests for done in self._completions(request, parts[request.id])]

    def _requests(
        self, prompts: Inputs, sampling: Sampling, special: bool, priority: int, salt: str
    ) -> list[Request]:
        """One for all prompts, or one each where they are continued differently."""
        if Task.GENERATE not in self.spec.tasks:
            raise BadValue(
                f"model {self.spec.name} does not generate; it has: "
                + ", ".join(task.value for task in self.spec.tasks),
                param="model",
            )
        rows = self._prompt_rows(prompts, special)
        if not rows:
            return []
        if sampling is None or isinstance(sampling, SamplingParams):
            groups = [(sampling or SamplingParams(), rows)]
        elif len(sampling) != len(rows):
            raise BadValue(f"{len(sampling)} sampling parameters for {len(rows)} prompts", param="sampling")
        else:
            groups = [(params, [row]) for params, row in zip(sampling, rows, strict=True)]
        return [
            Request(
                f"local-{next(self._numbers)}",
                np.concatenate(group),
                np.array([len(row) for row in group], dtype=np.int32),
                _PARAMS,
                sampling=with_eos(params, self.spec),
                priority=priority,
                cache_salt=salt,
            )
            for params, group in groups
        ]

    def _prompt_rows(self, prompts: Inputs, special: bool) -> list[Ints]:
        texts, ids = split_inputs(prompts)
        if texts is not None:
            return self._processor.tokenizer.encode(texts, special)
        rows = [np.asarray(row, dtype=np.int32) for row in ids or ()]
        for row in rows:
            if len(row) and not 0 <= int(row.min()) <= int(row.max()) < self.spec.vocab_size:
                raise BadValue(f"token ids must be from 0 to {self.spec.vocab_size - 1}", param="prompt")
        return rows

    def _completions(self, request: Request, parts: Iterable[Generated]) -> list[Completion]:
        by_row: list[Parts] = [[] for _ in range(request.num_rows)]
        for part in parts:
            by_row[part.row].append(part)
        return [self._completion(row) for row in by_row]

    def _completion(self, parts: Parts) -> Completion:
        last = parts[-1]
        ids = np.concatenate([part.token_ids for part in parts]).tolist()
        assert last.finish is not None
        logprob_ids, logprobs, ranks = (
            _joined((getattr(part, name) for part in parts), len(ids))
            for name in ("logprob_ids", "logprobs", "ranks")
        )
        text = self._processor.tokenizer.decode(ids, skip_special_tokens=True)
        timings = last.timings or Timings()
        return Completion(ids, text, last.finish, last.stop_token, logprob_ids, logprobs, ranks, timings)


def with_eos(params: SamplingParams, spec: ModelSpec) -> SamplingParams:
    """The tokens that end a text of this model, unless the caller names others."""
    if params.eos_token_ids:
        return params
    return msgspec.structs.replace(params, eos_token_ids=spec.eos_token_ids)


def _joined(arrays: Iterable[Any], count: int) -> Any:
    """Of the tokens that are shown: the one that ended the row is not."""
    found = [array for array in arrays if array is not None]
    return np.concatenate(found)[:count] if found else None


class AsyncGenerating(ABC):
    @abstractmethod
    def _open(self) -> Any: ...

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[Generated]:
        """Tokens that follow one prompt, as they come; the last part says why it ended. Closing the
        iterator, or cancelling its task, cancels the rest."""
        engine: Generating = self._open()
        inputs: Any = prompt if isinstance(prompt, str) else [list(prompt)]
        (request,) = engine._requests(inputs, sampling, add_special_tokens, priority, cache_salt)
        stream = engine._engine.generate(request)
        try:
            async for parts in stream:
                for part in parts:
                    yield part
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

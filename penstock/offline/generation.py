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
from penstock.errors import BadValue, PenstockError
from penstock.inputs.processor import InputProcessor, Inputs, split_inputs
from penstock.offline.local import LocalEngine
from penstock.types import (
    DecodedTokens,
    GeneratedTokens,
    Ints,
    PoolingParams,
    Request,
    SamplingParams,
    Task,
    Timings,
)
from penstock.wire.router import Told

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


class _Row:
    """What has come of one row."""

    __slots__ = ("parts", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parts: list[GeneratedTokens] = []  # those that say more than a token

    def take(self, part: GeneratedTokens) -> None:
        self.token_ids += part.token_ids.tolist()
        self.parts.append(part)


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
        inbox: queue.SimpleQueue[Told | PenstockError] = queue.SimpleQueue()
        self._engine.stream_all(requests, inbox.put)
        rows = {(request.id, row): _Row() for request in requests for row in range(request.num_rows)}
        left = len(rows)
        try:
            while left:
                told = inbox.get()
                if isinstance(told, PenstockError):
                    raise told
                for some in told:
                    if isinstance(some, DecodedTokens):
                        for name, number in zip(some.rows, some.token_ids.tolist(), strict=True):
                            rows[name].token_ids.append(number)
                        continue
                    rows[some.id, some.row].take(some)
                    left -= some.finish is not None
        finally:
            if left:
                for request in requests:
                    self._engine.cancel(request.id)
        return [self._completion(row) for row in rows.values()]

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

    def _completion(self, row: _Row) -> Completion:
        ids, last = row.token_ids, row.parts[-1]
        assert last.finish is not None
        logprob_ids, logprobs, ranks = (
            _joined((getattr(part, name) for part in row.parts), len(ids))
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
    ) -> AsyncIterator[GeneratedTokens]:
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

"""What crosses the wire between an API process and an engine process.

A message is a typed header (msgpack) and, where it has bulk, one raw frame: token ids as int32 on
the way in, vectors as they are on the way out. One header carries all requests that became ready
together, and all answers of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.errors import revive
from penstock.types import (
    Array,
    Comparison,
    DecodedTokens,
    Failure,
    GeneratedTokens,
    Ints,
    Outcome,
    PooledOutput,
    PoolingParams,
    Request,
    SamplerParams,
    SequenceIds,
    Timings,
)
from penstock.wire.shared_memory import Region, SharedMemoryInfo


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """An API process wants to know whether the engine is ready."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine can serve. `settings` are the resolved values, for information."""

    pid: int
    settings: dict[str, Any]
    shared: SharedMemoryInfo | None = None  # memory in which large answers lie for those who have mapped it


class MemoryMapped(msgspec.Struct, tag="attached", array_like=True):
    """This API process has mapped the engine's memory."""

    shared: str  # the memory's name
    reader: str  # the process's, for as long as it lives
    pid: int


class BlocksReleased(msgspec.Struct, tag="given_back", array_like=True):
    """Blocks of the engine's memory that this API process reads no more, as often as it was told of them."""

    shared: str
    blocks: list[int]


class RequestHeader(msgspec.Struct, array_like=True):
    """One request; its integers lie in the frame: lengths, token ids, then the optional arrays."""

    id: str
    rows: int
    tokens: int
    params: PoolingParams
    priority: int
    arrival_s: float
    deadline_s: float | None
    arrays: dict[str, int]  # name and size of each optional array
    reuse_prefix: bool
    cache_salt: str
    also: tuple[PoolingParams, ...]
    sampling: SamplerParams | None = None


class Submit(msgspec.Struct, tag="submit", array_like=True):
    entries: list[RequestHeader]


class Compare(msgspec.Struct, tag="compare", array_like=True):
    """Vectors to be compared; their arrays lie in a frame each, in the order of these."""

    id: str
    arrival_s: float
    arrays: dict[str, tuple[str, tuple[int, ...]]]  # name → dtype, shape


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    ids: list[str]


class PooledItem(msgspec.Struct, tag="done", array_like=True):
    """A result; the bytes of its arrays lie in the frames. In the first they lie one after another; a large
    array has one of its own, which answers that are alike share."""

    id: str
    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    frames: list[int]  # the frame of each array
    queue_s: float
    device_s: float


class GeneratedItem(msgspec.Struct, tag="part", array_like=True):
    """Further tokens of a row; what is known of each of them is raw bytes, a row of equal size a token."""

    id: str
    row: int
    token_ids: list[int]
    finish: str | None = None
    stop_token: int | None = None
    logprob_ids: bytes | None = None
    logprobs: bytes | None = None
    ranks: bytes | None = None
    timings: tuple[float, float] | None = None
    prompt_logprob_ids: bytes | None = None
    prompt_logprobs: bytes | None = None
    prompt_ranks: bytes | None = None


class DecodedItem(msgspec.Struct, tag="more", array_like=True):
    """One further token of each of some rows."""

    token_ids: bytes  # int32
    rows: list[tuple[str, int]] | None = None  # None: those of the last such message to this process


class FailedItem(msgspec.Struct, tag="failed", array_like=True):
    id: str
    error: str
    message: str
    param: str | None


Item = PooledItem | GeneratedItem | DecodedItem | FailedItem


class Outcomes(msgspec.Struct, tag="outcomes", array_like=True):
    items: list[Item]
    shared: dict[int, Region] = {}  # frames that do not travel, and where in the engine's memory they lie


OPTIONAL = ("type_ids", "skip", "keys", "keep", "pairs", "adapters")  # arrays that a request may have

ToEngine = Hello | MemoryMapped | Submit | Compare | Cancel | BlocksReleased
FromEngine = Ready | Outcomes

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def pack_requests(requests: Sequence[Request]) -> list[Any]:
    """Frames of one `Submit`."""
    entries, parts = [], []
    for request in requests:
        arrays = {name: array for name in OPTIONAL if (array := getattr(request, name)) is not None}
        entries.append(
            RequestHeader(
                request.id,
                request.num_rows,
                request.num_tokens,
                request.params,
                request.priority,
                request.arrival_s,
                request.deadline_s,
                {name: len(array) for name, array in arrays.items()},
                request.reuse_prefix,
                request.cache_salt,
                request.also,
                request.sampling,
            )
        )
        parts += [request.lengths, request.token_ids, *arrays.values()]
    return [encode(Submit(entries)), np.concatenate(parts)]


def unpack_requests(entries: Iterable[RequestHeader], frame: Any) -> list[Request]:
    flat: Ints = np.frombuffer(frame, dtype=np.int32)
    same: dict[PoolingParams, PoolingParams] = {}  # equal parameters become one object: quick to compare
    requests, at = [], 0
    for entry in entries:
        tokens_at = at + entry.rows
        end = tokens_at + entry.tokens
        request = Request(
            entry.id,
            flat[tokens_at:end],
            flat[at:tokens_at],
            same.setdefault(entry.params, entry.params),
            also=entry.also,
            priority=entry.priority,
            arrival_s=entry.arrival_s,
            deadline_s=entry.deadline_s,
            reuse_prefix=entry.reuse_prefix,
            cache_salt=entry.cache_salt,
            sampling=entry.sampling,
        )
        at = end
        for name, size in entry.arrays.items():
            setattr(request, name, flat[at : at + size])
            at += size
        requests.append(request)
    return requests


_COMPARED = (
    "queries",
    "query_lengths",
    "documents",
    "document_lengths",
    "pairs",
    "query_scales",
    "document_scales",
)


def pack_comparison(comparison: Comparison) -> list[Any]:
    """Frames of one `Compare`: the header, then one for each array."""
    arrays = {name: array for name in _COMPARED if (array := getattr(comparison, name)) is not None}
    shapes = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    frames = [np.ascontiguousarray(array) for array in arrays.values()]
    return [encode(Compare(comparison.id, comparison.arrival_s, shapes)), *frames]


def unpack_comparison(header: Compare, frames: Sequence[Any]) -> Comparison:
    arrays = {
        name: np.frombuffer(frame, dtype=np.dtype(dtype)).reshape(shape)
        for (name, (dtype, shape)), frame in zip(header.arrays.items(), frames, strict=True)
    }
    return Comparison(header.id, **arrays, arrival_s=header.arrival_s)


Lend = Callable[[Array], Region | None]


def pack_outcomes(
    outcomes: Sequence[Outcome], told: SequenceIds = (), lend: Lend = lambda array: None
) -> list[Any]:
    """Frames of one `Outcomes`: the header, then one for all small arrays and one for each large one. `told`
    are the rows of the last `DecodedTokens` that this receiver got: they need not be named again.
    `lend` says where the receiver finds an array that need not travel."""
    items: list[Item] = []
    small: list[bytes] = []
    large: list[Array] = []
    number_of: dict[int, int] = {}  # array → its frame: requests that are alike have the same arrays
    shared: dict[int, Region] = {}
    for outcome in outcomes:
        if isinstance(outcome, DecodedTokens):
            same = outcome.rows is told or outcome.rows == told
            items.append(DecodedItem(outcome.token_ids.tobytes(), None if same else list(outcome.rows)))
            told = outcome.rows
        elif isinstance(outcome, Failure):
            error = outcome.error
            items.append(FailedItem(outcome.id, type(error).__name__, error.message, error.param))
        elif isinstance(outcome, GeneratedTokens):
            items.append(_part(outcome))
        else:
            arrays, timings = (outcome.values, *outcome.more), outcome.timings
            shapes, dtypes = [array.shape for array in arrays], [array.dtype.str for array in arrays]
            frames = []
            for array in arrays:
                if array.nbytes < MIN_OWN_FRAME_BYTES:
                    small.append(array.tobytes())
                    frames.append(0)
                    continue
                if id(array) not in number_of:
                    number = number_of[id(array)] = 1 + len(number_of)
                    if (place := lend(array)) is not None:
                        shared[number] = place
                    else:
                        large.append(array)
                frames.append(number_of[id(array)])
            items.append(PooledItem(outcome.id, shapes, dtypes, frames, timings.queue_s, timings.device_s))
    return [encode(Outcomes(items, shared)), b"".join(small), *map(np.ascontiguousarray, large)]


MIN_OWN_FRAME_BYTES = 1 << 16  # small answers travel in one frame, large ones by reference
MIN_OWN_MESSAGE_BYTES = (
    1 << 20
)  # a message is there when all of it is: large answers do not wait for each other


def split_into_messages(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Outcomes that travel together: all small ones, and each large answer with those that are alike."""
    together: list[Outcome] = []
    apart: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        if isinstance(outcome, PooledOutput) and outcome.values.nbytes >= MIN_OWN_MESSAGE_BYTES:
            apart.setdefault(id(outcome.values), []).append(outcome)
        else:
            together.append(outcome)
    return [*([together] if together else []), *apart.values()]


def _part(generated: GeneratedTokens) -> GeneratedItem:
    timings = generated.timings
    if (
        generated.finish is None and generated.ranks is None and generated.prompt_ranks is None
    ):  # almost all are so
        return GeneratedItem(generated.id, generated.row, generated.token_ids.tolist())
    scores = {
        name: None if (array := getattr(generated, name)) is None else array.tobytes() for name in _SCORES
    }
    return GeneratedItem(
        generated.id,
        generated.row,
        generated.token_ids.tolist(),
        generated.finish,
        generated.stop_token,
        timings=None if timings is None else (timings.queue_s, timings.device_s),
        **scores,
    )


# Arrays of a part: their type, and whether a token has a row of them rather than one number.
_SCORES: dict[str, tuple[type[Any], bool]] = {
    "logprob_ids": (np.int32, True),
    "logprobs": (np.float32, True),
    "ranks": (np.int32, False),
    "prompt_logprob_ids": (np.int32, True),
    "prompt_logprobs": (np.float32, True),
    "prompt_ranks": (np.int32, False),
}


def _generated(part: GeneratedItem) -> GeneratedTokens:
    scores: dict[str, Any] = {}
    for name, (dtype, wide) in _SCORES.items():
        if (raw := getattr(part, name)) is not None:
            array = np.frombuffer(raw, dtype=dtype)
            ranks = part.prompt_ranks if name.startswith("prompt") else part.ranks
            count = len(ranks or b"") // 4
            scores[name] = array.reshape(count, -1 if count else 1) if wide else array
    return GeneratedTokens(
        part.id,
        part.row,
        np.array(part.token_ids, dtype=np.int32),
        part.finish,
        part.stop_token,
        timings=None if part.timings is None else Timings(*part.timings),
        **scores,
    )


def merge_shared_frames(
    frames: Sequence[Any], shared: dict[int, Region], block: Callable[[Region], Any]
) -> list[Any]:
    """The frames that came, and in their places those that did not."""
    came = iter(frames)
    count = len(frames) + len(shared)
    return [block(shared[number]) if number in shared else next(came) for number in range(count)]


def unpack_outcomes(items: Iterable[Item], frames: Sequence[Any], told: SequenceIds = ()) -> list[Outcome]:
    """`told` are the rows of the last `DecodedTokens` from this sender."""
    small, at = memoryview(frames[0]), 0
    outcomes: list[Outcome] = []
    for item in items:
        if isinstance(item, DecodedItem):
            told = told if item.rows is None else tuple(item.rows)
            outcomes.append(DecodedTokens(told, np.frombuffer(item.token_ids, dtype=np.int32)))
            continue
        if isinstance(item, FailedItem):
            outcomes.append(Failure(item.id, revive(item.error, item.message, item.param)))
            continue
        if isinstance(item, GeneratedItem):
            outcomes.append(_generated(item))
            continue
        arrays = []
        for shape, dtype, frame in zip(item.shapes, map(np.dtype, item.dtypes), item.frames, strict=True):
            raw: Any = frames[frame]
            if not frame:
                count = math.prod(shape) * dtype.itemsize
                raw = small[at : at + count]
                at += count
            arrays.append(np.frombuffer(raw, dtype=dtype).reshape(shape))
        timings = Timings(item.queue_s, item.device_s)
        outcomes.append(PooledOutput(item.id, arrays[0], timings, tuple(arrays[1:])))
    return outcomes


def last_decoded_rows(outcomes: Sequence[Outcome], last: SequenceIds) -> SequenceIds:
    """The rows of the last `DecodedTokens` after these outcomes; the next one need not repeat them."""
    return next((o.rows for o in reversed(outcomes) if isinstance(o, DecodedTokens)), last)

"""Messages between an API process and an engine process.

A message is a typed header (msgpack) followed by raw frames. Token ids travel to the engine as int32 in one
frame; vectors return in their own dtype. One header carries all requests that became ready together, or all
outcomes of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadValue, revive
from penstock.types import (
    Array,
    Comparison,
    DecodedTokens,
    Failure,
    GeneratedTokens,
    Ints,
    Outcome,
    PooledOutput,
    PooledRows,
    PoolingParams,
    Request,
    RequestImages,
    SamplerParams,
    SequenceIds,
    Timings,
)
from penstock.wire.images import INTS_PER_IMAGE, check_images, image_integers, read_images
from penstock.wire.shared_memory import Region, SharedMemoryInfo

MIN_OWN_FRAME_BYTES = 1 << 16  # smaller arrays are copied into one frame; larger ones are sent by reference
# A message arrives as a whole. Larger outputs have their own messages, so they do not wait for each other.
MIN_OWN_MESSAGE_BYTES = 1 << 20


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """An API process introduces itself and asks whether the engine is ready.

    It is the first message on a connection: the engine ignores work from a process that has not sent it.
    """

    client: str  # name of the client, the same on every connection it makes
    pid: int


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine can serve."""

    pid: int
    settings: dict[str, Any]  # the resolved configuration, for information
    shared: SharedMemoryInfo | None = None  # memory for large outputs, for processes that map it
    engine: int = 0  # random number that identifies the engine process in all its messages
    revision: str = ""  # revision of the loaded model, see `checkpoint.revision`; "": unknown


class MemoryMapped(msgspec.Struct, tag="memory_mapped", array_like=True):
    """This API process has mapped the engine's shared memory."""

    memory: str  # name of the memory
    reader: str  # name of the process, the same on every connection it makes
    pid: int


class BlocksReleased(msgspec.Struct, tag="blocks_released", array_like=True):
    """This API process no longer reads these blocks. A block that it was given twice has two entries."""

    memory: str
    blocks: list[int]


class ArrayLengths(msgspec.Struct, array_like=True):
    """Lengths of a request's optional arrays, in the order of their values in the frame; None: absent."""

    type_ids: int | None
    skip: int | None
    key_limits: int | None
    token_mask: int | None
    pairs: int | None
    adapters: int | None
    rope_positions: int | None


class ImagesHeader(msgspec.Struct, array_like=True):
    """The images of a request. Their integers follow its other integers; their patches have a frame."""

    num_images: int
    values_per_patch: int
    are_rows: bool


class RequestHeader(msgspec.Struct, array_like=True):
    """One request. Its integers are in the frame: row lengths, token ids, then the optional arrays."""

    id: str
    num_rows: int
    num_tokens: int
    params: PoolingParams
    priority: int
    arrival_s: float
    deadline_s: float | None
    optional: ArrayLengths | None  # None: the request has no optional array
    images: ImagesHeader | None
    reuse_prefix: bool
    cache_salt: str
    extra_params: tuple[PoolingParams, ...]
    sampling: SamplerParams | None = None
    client: tuple[str, float] | None = None  # name and weight; None: the unnamed client
    is_background: bool = False


class Submit(msgspec.Struct, tag="submit", array_like=True):
    requests: list[RequestHeader]


class ArrayHeader(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]


class Compare(msgspec.Struct, tag="compare", array_like=True):
    """A comparison of given vectors. Each array has a frame, in the order of these fields."""

    id: str
    arrival_s: float
    deadline_s: float | None
    queries: ArrayHeader
    query_lengths: ArrayHeader
    documents: ArrayHeader
    document_lengths: ArrayHeader
    pairs: ArrayHeader
    query_scales: ArrayHeader | None
    document_scales: ArrayHeader | None


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    ids: list[str]


class FramedArray(msgspec.Struct, array_like=True):
    """An array of an output. Frame 0 holds all small arrays in order; a large array has its own frame."""

    dtype: str
    shape: tuple[int, ...]
    frame: int


class PooledItem(msgspec.Struct, tag="pooled", array_like=True):
    id: str
    arrays: list[FramedArray]  # the values, then the values of the request's further outputs
    queue_s: float
    device_s: float


class PooledRowsItem(msgspec.Struct, tag="pooled_rows", array_like=True):
    """The outputs of several requests of one row each, in one array."""

    ids: list[str]
    values: FramedArray
    queue_s: list[float]
    device_s: float


class LogprobBytes(msgspec.Struct, array_like=True):
    """Log probabilities of some tokens, as raw bytes."""

    ids: bytes  # int32 [tokens, 1 + top]
    logprobs: bytes  # float32 [tokens, 1 + top]
    ranks: bytes  # int32 [tokens]


class GeneratedItem(msgspec.Struct, tag="generated", array_like=True):
    id: str
    row: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token: int | None = None
    logprobs: LogprobBytes | None = None
    timings: tuple[float, float] | None = None  # queue_s, device_s
    prompt_logprobs: LogprobBytes | None = None


class DecodedItem(msgspec.Struct, tag="decoded", array_like=True):
    """One new token for each of several sequences."""

    token_ids: bytes  # int32
    rows: list[tuple[str, int]] | None = None  # None: as in this connection's last `DecodedItem`


class FailedItem(msgspec.Struct, tag="failed", array_like=True):
    id: str
    error: str
    message: str
    param: str | None


Item = PooledItem | PooledRowsItem | GeneratedItem | DecodedItem | FailedItem


class Outcomes(msgspec.Struct, tag="outcomes", array_like=True):
    items: list[Item]
    shared: dict[int, Region] = {}  # frames that are in shared memory instead of the message
    engine: int = 0  # as in `Ready`


ToEngine = Hello | MemoryMapped | Submit | Compare | Cancel | BlocksReleased
FromEngine = Ready | Outcomes

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def pack_requests(requests: Sequence[Request]) -> list[Any]:
    """The frames of one `Submit`: the header, all integers, then the patches of each request with images."""
    headers, arrays, patches = [], [], list[NDArray[np.uint8]]()
    for request in requests:
        arrays += [request.lengths, request.token_ids]
        optional = (
            request.type_ids,
            request.skip,
            request.key_limits,
            request.token_mask,
            request.pairs,
            request.adapters,
            request.rope_positions,
        )
        present = [array for array in optional if array is not None]
        arrays += present
        lengths = [None if array is None else len(array) for array in optional] if present else None
        if request.images is not None:
            arrays += image_integers(request.images)
            patches.append(np.ascontiguousarray(request.images.patches))
        headers.append(
            RequestHeader(
                request.id,
                request.num_rows,
                request.num_tokens,
                request.params,
                request.priority,
                request.arrival_s,
                request.deadline_s,
                None if lengths is None else ArrayLengths(*lengths),
                None if request.images is None else _images_header(request.images),
                request.reuse_prefix,
                request.cache_salt,
                request.extra_params,
                request.sampling,
                (request.client, request.weight) if request.client else None,
                request.is_background,
            )
        )
    ints = np.concatenate(arrays)
    if ints.dtype != np.int32:  # one array of another dtype changes the dtype of the joined array
        raise TypeError(f"token ids and lengths must be int32; joined, they are {ints.dtype}")
    return [encode(Submit(headers)), ints, *patches]


def _images_header(images: RequestImages) -> ImagesHeader:
    return ImagesHeader(images.num_images, images.patches.shape[1], images.are_rows)


def unpack_requests(
    headers: Iterable[RequestHeader], frame: Any, patches: Sequence[Any] = ()
) -> list[Request]:
    """Decode the requests of a `Submit`. Raises if anything is inconsistent; `unpack_each` then finds the
    requests at fault."""
    remaining = iter(patches)
    ints: Ints = np.frombuffer(frame, dtype=np.int32)
    # Equal parameters become one object, which compares quickly.
    interned: dict[PoolingParams, PoolingParams] = {}
    requests, start = [], 0
    for header in headers:
        tokens_start = start + header.num_rows
        end = tokens_start + header.num_tokens
        request = Request(
            header.id,
            ints[tokens_start:end],
            ints[start:tokens_start],
            interned.setdefault(header.params, header.params),
            extra_params=header.extra_params,
            priority=header.priority,
            arrival_s=header.arrival_s,
            deadline_s=header.deadline_s,
            reuse_prefix=header.reuse_prefix,
            cache_salt=header.cache_salt,
            sampling=header.sampling,
            is_background=header.is_background,
        )
        if header.client is not None:
            request.client, request.weight = header.client
        start = end if header.optional is None else _read_optional(request, header.optional, ints, end)
        if (images := header.images) is not None:
            begin, start = start, start + INTS_PER_IMAGE * images.num_images
            request.images = read_images(
                ints[begin:start], next(remaining), images.values_per_patch, are_rows=images.are_rows
            )
            check_images(request, request.images)
        fits = (
            ints.item(tokens_start - 1) == header.num_tokens  # faster, for the most common case
            if header.num_rows == 1
            else _lengths_fit(request, header.num_tokens)
        )
        if not fits:
            raise ValueError("the lengths of its rows do not add up to its tokens")
        requests.append(request)
    if start != len(ints):
        raise ValueError(f"{start} integers are announced and {len(ints)} were sent")
    return requests


def _lengths_fit(request: Request, num_tokens: int) -> bool:
    lengths = request.lengths
    total = int(request.starts[-1]) + int(lengths[-1]) if len(lengths) else 0
    return total == num_tokens == len(request.token_ids) and (not total or int(lengths.min()) >= 0)


class LooseSubmit(msgspec.Struct, tag="submit", array_like=True):
    """A `Submit` whose requests are decoded one by one."""

    requests: list[msgspec.Raw]


class RequestExtent(msgspec.Struct, array_like=True):
    """The leading fields of a `RequestHeader`: its id, and the fields that give its number of integers."""

    id: str
    num_rows: int
    num_tokens: int
    params: msgspec.Raw
    priority: msgspec.Raw
    arrival_s: msgspec.Raw
    deadline_s: msgspec.Raw
    optional: ArrayLengths | None
    images: ImagesHeader | None

    @property
    def num_ints(self) -> int:
        optional = () if self.optional is None else msgspec.structs.astuple(self.optional)
        num_images = 0 if self.images is None else self.images.num_images
        counts = [self.num_rows, self.num_tokens, *(length or 0 for length in optional)]
        counts.append(INTS_PER_IMAGE * num_images)
        if min(counts) < 0:
            raise ValueError("a length is negative")
        return sum(counts)


def unpack_each(
    submit: bytes, frame: Any, patches: Sequence[Any] = ()
) -> tuple[list[Request], list[Failure]]:
    """The readable requests of an encoded `Submit`, and a failure for each of the others.

    For messages that cannot be read as a whole. Raises if even the list of requests cannot be read.
    """
    ints: Ints = np.frombuffer(memoryview(frame)[: len(frame) // 4 * 4], dtype=np.int32)
    requests: list[Request] = []
    failures: list[Failure] = []
    remaining = list(reversed(patches))
    start: int | None = 0  # None: the end of a request could not be read, so later ones cannot be located
    for raw in msgspec.msgpack.decode(submit, type=LooseSubmit).requests:
        request_id = str(msgspec.msgpack.decode(raw)[0])
        try:
            if start is None:
                raise ValueError("a request before it is damaged")
            begin, start = start, None
            extent = msgspec.msgpack.decode(raw, type=RequestExtent)
            start = begin + extent.num_ints
            own = [remaining.pop()] if extent.images is not None else []
            header = msgspec.msgpack.decode(raw, type=RequestHeader)
            requests += unpack_requests([header], ints[begin:start], own)
        except Exception as error:
            failures.append(Failure(request_id, BadValue(f"the engine cannot read this request: {error}")))
    return requests, failures


def _read_optional(request: Request, lengths: ArrayLengths, ints: Ints, start: int) -> int:
    """Set the optional arrays of a request. Returns the end of the last one."""

    def read(length: int | None) -> Ints | None:
        nonlocal start
        if length is None:
            return None
        if length < 0:
            raise ValueError("a length is negative")
        start += length
        return ints[start - length : start]

    request.type_ids = read(lengths.type_ids)
    request.skip = read(lengths.skip)
    request.key_limits = read(lengths.key_limits)
    request.token_mask = read(lengths.token_mask)
    request.pairs = read(lengths.pairs)
    request.adapters = read(lengths.adapters)
    request.rope_positions = read(lengths.rope_positions)
    return start


def pack_comparison(comparison: Comparison) -> list[Any]:
    """The frames of one `Compare`: the header, then one frame for each array."""
    frames: list[Array] = []

    def add(array: Array) -> ArrayHeader:
        frames.append(np.ascontiguousarray(array))
        return ArrayHeader(array.dtype.str, array.shape)

    header = Compare(
        comparison.id,
        comparison.arrival_s,
        comparison.deadline_s,
        add(comparison.queries),
        add(comparison.query_lengths),
        add(comparison.documents),
        add(comparison.document_lengths),
        add(comparison.pairs),
        None if comparison.query_scales is None else add(comparison.query_scales),
        None if comparison.document_scales is None else add(comparison.document_scales),
    )
    return [encode(header), *frames]


def unpack_comparison(header: Compare, frames: Sequence[Any]) -> Comparison:
    """Raises `ValueError` if the frames do not match the header."""
    remaining = list(reversed(frames))

    def read(array: ArrayHeader) -> Any:
        if not remaining:
            raise ValueError("an array of the comparison was not sent")
        return np.frombuffer(remaining.pop(), dtype=np.dtype(array.dtype)).reshape(array.shape)

    return Comparison(
        header.id,
        queries=read(header.queries),
        query_lengths=read(header.query_lengths),
        documents=read(header.documents),
        document_lengths=read(header.document_lengths),
        pairs=read(header.pairs),
        query_scales=None if header.query_scales is None else read(header.query_scales),
        document_scales=None if header.document_scales is None else read(header.document_scales),
        arrival_s=header.arrival_s,
        deadline_s=header.deadline_s,
    )


ShareArray = Callable[[Array], Region | None]  # None: the receiver cannot read the array in shared memory


def _share_nothing(array: Array) -> Region | None:
    return None


class _ArrayFrames:
    """Assigns arrays to frames. Arrays that deduplicated requests share are assigned to one frame."""

    def __init__(self, share: ShareArray) -> None:
        self.shared: dict[int, Region] = {}
        self._share = share
        self._small: list[bytes] = []
        self._large: list[Array] = []
        self._frame_of: dict[int, int] = {}  # by `id` of the array

    def add(self, array: Array) -> FramedArray:
        if array.nbytes < MIN_OWN_FRAME_BYTES:
            self._small.append(array.tobytes())
            return FramedArray(array.dtype.str, array.shape, 0)
        if (frame := self._frame_of.get(id(array))) is None:
            frame = self._frame_of[id(array)] = 1 + len(self._frame_of)
            if (region := self._share(array)) is not None:
                self.shared[frame] = region
            else:
                self._large.append(array)
        return FramedArray(array.dtype.str, array.shape, frame)

    def frames(self) -> list[Any]:
        return [b"".join(self._small), *map(np.ascontiguousarray, self._large)]


def pack_outcomes(
    outcomes: Sequence[Outcome],
    last_rows: SequenceIds = (),
    share: ShareArray = _share_nothing,
    engine: int = 0,
) -> list[Any]:
    """The frames of one `Outcomes`: the header, one for all small arrays, and one for each large array.

    `last_rows` are the rows of the last `DecodedTokens` on this connection; they are not sent again. `share`
    returns where the receiver finds an array in shared memory.
    """
    items: list[Item] = []
    arrays = _ArrayFrames(share)
    for outcome in outcomes:
        if isinstance(outcome, DecodedTokens):
            is_same = outcome.rows is last_rows or outcome.rows == last_rows
            items.append(DecodedItem(outcome.token_ids.tobytes(), None if is_same else list(outcome.rows)))
            last_rows = outcome.rows
        elif isinstance(outcome, GeneratedTokens):
            items.append(_pack_generated(outcome))
        elif isinstance(outcome, Failure):
            error = outcome.error
            items.append(FailedItem(outcome.id, type(error).__name__, error.message, error.param))
        elif isinstance(outcome, PooledRows):
            values, queue_s = arrays.add(outcome.values), list(outcome.queue_s)
            items.append(PooledRowsItem(list(outcome.ids), values, queue_s, outcome.device_s))
        else:
            framed = [arrays.add(array) for array in (outcome.values, *outcome.extra_values)]
            timings = outcome.timings
            items.append(PooledItem(outcome.id, framed, timings.queue_s, timings.device_s))
    return [encode(Outcomes(items, arrays.shared, engine)), *arrays.frames()]


def split_into_messages(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Outcomes grouped by message: the small ones together, each large output with its duplicates."""
    small: list[Outcome] = []
    large: dict[int, list[Outcome]] = {}  # by `id` of the values
    for outcome in outcomes:
        if isinstance(outcome, PooledOutput) and outcome.values.nbytes >= MIN_OWN_MESSAGE_BYTES:
            large.setdefault(id(outcome.values), []).append(outcome)
        else:
            small.append(outcome)
    return [*([small] if small else []), *large.values()]


def last_decoded_rows(outcomes: Sequence[Outcome], last_rows: SequenceIds) -> SequenceIds:
    """The rows of the last `DecodedTokens` on a connection after these outcomes."""
    return next((o.rows for o in reversed(outcomes) if isinstance(o, DecodedTokens)), last_rows)


def merge_shared_frames(
    frames: Sequence[Any], shared: dict[int, Region], read: Callable[[Region], Any]
) -> list[Any]:
    """All frames of a message: those that were sent, and those in shared memory."""
    sent = iter(frames)
    num_frames = len(frames) + len(shared)
    return [read(shared[frame]) if frame in shared else next(sent) for frame in range(num_frames)]


def unpack_outcomes(
    items: Iterable[Item], frames: Sequence[Any], last_rows: SequenceIds = ()
) -> list[Outcome]:
    """Decode outcomes. `last_rows` are the rows of the last `DecodedTokens` on this connection."""
    small, start = memoryview(frames[0]), 0
    outcomes: list[Outcome] = []
    for item in items:
        if isinstance(item, DecodedItem):
            last_rows = last_rows if item.rows is None else tuple(item.rows)
            outcomes.append(DecodedTokens(last_rows, np.frombuffer(item.token_ids, dtype=np.int32)))
            continue
        if isinstance(item, GeneratedItem):
            outcomes.append(_unpack_generated(item))
            continue
        if isinstance(item, FailedItem):
            outcomes.append(Failure(item.id, revive(item.error, item.message, item.param)))
            continue
        arrays = []
        for header in item.arrays if isinstance(item, PooledItem) else (item.values,):
            dtype, raw = np.dtype(header.dtype), frames[header.frame]
            if header.frame == 0:
                size = math.prod(header.shape) * dtype.itemsize
                raw = small[start : start + size]
                start += size
            arrays.append(np.frombuffer(raw, dtype=dtype).reshape(header.shape))
        if isinstance(item, PooledRowsItem):
            if not len(item.ids) == len(item.queue_s) == len(arrays[0]):
                raise ValueError(f"{len(item.ids)} requests have {len(arrays[0])} rows")
            outcomes.append(PooledRows(item.ids, arrays[0], item.queue_s, item.device_s))
            continue
        timings = Timings(item.queue_s, item.device_s)
        outcomes.append(PooledOutput(item.id, arrays[0], timings, tuple(arrays[1:])))
    return outcomes


def _pack_generated(tokens: GeneratedTokens) -> GeneratedItem:
    if tokens.finish_reason is None and tokens.ranks is None and tokens.prompt_ranks is None:
        return GeneratedItem(tokens.id, tokens.row, tokens.token_ids.tolist())
    timings = tokens.timings
    return GeneratedItem(
        tokens.id,
        tokens.row,
        tokens.token_ids.tolist(),
        tokens.finish_reason,
        tokens.stop_token,
        _pack_logprobs(tokens.logprob_ids, tokens.logprobs, tokens.ranks),
        None if timings is None else (timings.queue_s, timings.device_s),
        _pack_logprobs(tokens.prompt_logprob_ids, tokens.prompt_logprobs, tokens.prompt_ranks),
    )


def _pack_logprobs(ids: Array | None, logprobs: Array | None, ranks: Array | None) -> LogprobBytes | None:
    if ids is None or logprobs is None or ranks is None:
        return None
    return LogprobBytes(ids.tobytes(), logprobs.tobytes(), ranks.tobytes())


def _unpack_generated(item: GeneratedItem) -> GeneratedTokens:
    token_ids: Ints = np.array(item.token_ids, dtype=np.int32)
    if item.finish_reason is None and item.logprobs is None and item.prompt_logprobs is None:
        return GeneratedTokens(item.id, item.row, token_ids)
    chosen, prompt = _unpack_logprobs(item.logprobs), _unpack_logprobs(item.prompt_logprobs)
    return GeneratedTokens(
        item.id,
        item.row,
        token_ids,
        item.finish_reason,
        item.stop_token,
        logprob_ids=chosen.ids,
        logprobs=chosen.logprobs,
        ranks=chosen.ranks,
        timings=None if item.timings is None else Timings(*item.timings),
        prompt_logprob_ids=prompt.ids,
        prompt_logprobs=prompt.logprobs,
        prompt_ranks=prompt.ranks,
    )


class _Logprobs(NamedTuple):
    ids: Ints | None = None
    logprobs: NDArray[np.float32] | None = None
    ranks: Ints | None = None


def _unpack_logprobs(raw: LogprobBytes | None) -> _Logprobs:
    if raw is None:
        return _Logprobs()
    ranks: Ints = np.frombuffer(raw.ranks, dtype=np.int32)
    shape = (len(ranks), -1 if len(ranks) else 1)
    ids: Ints = np.frombuffer(raw.ids, dtype=np.int32).reshape(shape)
    return _Logprobs(ids, np.frombuffer(raw.logprobs, dtype=np.float32).reshape(shape), ranks)

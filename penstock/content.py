"""What makes two rows the same work: their tokens and everything that changes what a model sees of them."""

from __future__ import annotations

from penstock.types import Ints, Request


def contents(request: Request) -> list[bytes]:
    """One key for each row. Equal keys of requests with an equal `context` mean equal results."""
    if request.num_rows == 1:
        return [_one(request)]
    ends = request.starts + request.lengths
    keys = _cut(request.token_ids, request.starts, ends)
    for more in (request.type_ids, request.keep):
        if more is not None:
            keys = [key + part for key, part in zip(keys, _cut(more, request.starts, ends), strict=True)]
    for numbers in (request.skip, request.keys, request.adapters):
        if numbers is not None:
            each = (n.to_bytes(4, "little", signed=True) for n in numbers.tolist())
            keys = [key + number for key, number in zip(keys, each, strict=True)]
    return keys


def context(request: Request) -> tuple[object, ...]:
    """What rows of different requests must share besides their contents."""
    optional = (request.type_ids, request.keep, request.skip, request.keys, request.adapters)
    return (request.cache_salt, *(array is not None for array in optional))


def _one(request: Request) -> bytes:
    """The key of an only row: all that the request has, in the same order."""
    key = request.token_ids.tobytes()
    for more in (request.type_ids, request.keep, request.skip, request.keys, request.adapters):
        if more is not None:
            key += more.tobytes()
    return key


def _cut(array: Ints, starts: Ints, ends: Ints) -> list[bytes]:
    raw, size = array.tobytes(), array.itemsize
    return [
        raw[begin:end] for begin, end in zip((starts * size).tolist(), (ends * size).tolist(), strict=True)
    ]

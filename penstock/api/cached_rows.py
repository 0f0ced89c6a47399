"""Rows of an engine's output as bytes: splits outputs for a cache, and joins cached rows to outputs."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import ParamSpec, Protocol, TypeVar

import msgspec
import numpy as np

from penstock.api.adapters import ServedAdapter
from penstock.checkpoint.spec import ModelSpec
from penstock.content import row_keys, scope
from penstock.handle import EngineHandle
from penstock.types import Array, PooledOutput, PoolingParams, Request, Task, Timings

P = ParamSpec("P")
T = TypeVar("T")

KEY_BYTES = 32
MAC_BYTES = 16
_FORMAT = 1  # version of stored rows; other versions are ignored
_DTYPES = frozenset({"<f4", "<f2", "<u2", "|i1", "|u1"})
_MAX_DIMS = 3

Layout = tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, shape of a row or token) of each output


async def off_loop(is_large: bool, work: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Run large work on a thread, because it would stall the event loop, and small work inline."""
    return await asyncio.to_thread(work, *args, **keywords) if is_large else work(*args, **keywords)


class CachedModel(Protocol):
    """A model whose results are cached."""

    engine: EngineHandle
    adapter: ServedAdapter | None

    @property
    def spec(self) -> ModelSpec: ...


class CachedRow(msgspec.Struct, frozen=True, gc=False):
    """The result of one row: the bytes of each of its outputs. Hidden from the garbage collector, because a
    cache has very many rows."""

    layout: Layout
    parts: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))


class _StoredRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A row as it is serialised for other processes."""

    format: int
    layout: Layout
    parts: tuple[bytes, ...]


_decoder = msgspec.msgpack.Decoder(_StoredRow)


def row_digests(request: Request, secret: bytes = b"") -> list[bytes]:
    """One key per row, from its content and all parameters of the request. The model is not part of it."""
    asked = msgspec.msgpack.encode((request.all_params, scope(request)))
    base = hashlib.blake2b(asked, digest_size=KEY_BYTES, key=secret)
    return [_digest(base, key) for key in row_keys(request)]


def _digest(base: hashlib.blake2b, key: bytes) -> bytes:
    own = base.copy()
    own.update(key)
    return own.digest()


def split_output(request: Request, output: PooledOutput) -> list[CachedRow] | None:
    """The rows of an output; None if a value is not finite, because such a result must not be cached."""
    arrays = (output.values, *output.extra_values)
    if not all(map(_is_finite, arrays)):
        return None
    columns = [
        _split(request, params, array) for params, array in zip(request.all_params, arrays, strict=True)
    ]
    layout = _shared(tuple((array.dtype.str, array.shape[1:]) for array in arrays))
    return [CachedRow(layout, parts) for parts in zip(*columns, strict=True)]


@lru_cache(256)
def _shared(layout: Layout) -> Layout:
    """Return the same object for equal layouts, because every row refers to one."""
    return layout


def _is_finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _split(request: Request, params: PoolingParams, array: Array) -> list[bytes]:
    """The bytes of each row, copied because the engine reuses its memory."""
    raw, width = array.tobytes(), array.nbytes // max(1, len(array))
    if not params.per_token:
        return [raw[at : at + width] for at in range(0, len(raw), width)]
    begins = (request.starts * width).tolist()
    ends = ((request.starts + request.lengths) * width).tolist()
    return [raw[begin:end] for begin, end in zip(begins, ends, strict=True)]


def join_rows(request: Request, rows: Sequence[CachedRow], timings: Timings) -> PooledOutput:
    """Join rows of one layout to an output."""
    arrays = [
        np.frombuffer(b"".join([row.parts[number] for row in rows]), dtype=dtype).reshape(
            request.num_tokens if params.per_token else len(rows), *shape
        )
        for number, (params, (dtype, shape)) in enumerate(
            zip(request.all_params, rows[0].layout, strict=True)
        )
    ]
    return PooledOutput(request.id, arrays[0], timings, tuple(arrays[1:]))


def encode_row(row: CachedRow, key: bytes, secret: bytes = b"") -> bytes:
    """Serialise a row, with an authentication code over its key and content."""
    content = msgspec.msgpack.encode(_StoredRow(_FORMAT, row.layout, row.parts))
    return _code(key, content, secret) + content


def decode_row(stored: bytes, key: bytes, secret: bytes = b"") -> CachedRow | None:
    """Deserialise a row. None if it is damaged, has another format version, or was written for another key or
    with another secret."""
    content = memoryview(stored)[MAC_BYTES:]
    if stored[:MAC_BYTES] != _code(key, content, secret):
        return None
    try:
        row = _decoder.decode(content)
    except msgspec.MsgspecError:
        return None
    return CachedRow(_shared(row.layout), row.parts) if row.format == _FORMAT else None


def _code(key: bytes, content: bytes | memoryview, secret: bytes) -> bytes:
    code = hashlib.blake2b(key, digest_size=MAC_BYTES, key=secret)
    code.update(content)
    return code.digest()


def fits(row: CachedRow, all_params: tuple[PoolingParams, ...], num_tokens: int, embed_dim: int) -> bool:
    """Whether a row of unknown origin has the shape of a result of `num_tokens` with these parameters."""
    sizes = _part_sizes(row.layout, all_params, embed_dim)
    if sizes is None or len(row.parts) != len(sizes):
        return False
    return all(
        len(part) == size * (num_tokens if params.per_token else 1)
        for part, size, params in zip(row.parts, sizes, all_params, strict=True)
    )


@lru_cache(256)
def _part_sizes(
    layout: Layout, all_params: tuple[PoolingParams, ...], embed_dim: int
) -> tuple[int, ...] | None:
    """Bytes per row or token of each output; None if results with these parameters have another layout."""
    if len(layout) != len(all_params):
        return None
    for (dtype, shape), params in zip(layout, all_params, strict=True):
        if dtype not in _DTYPES or len(shape) >= _MAX_DIMS or min(shape, default=1) < 1:
            return None
        if params.task is Task.EMBED:
            width = params.dimensions or embed_dim
            expected = width // 8 if params.dtype.is_packed else width
            if shape != (expected,) or dtype != params.dtype.numpy.str:
                return None
    return tuple(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in layout)


def are_finite(rows: Sequence[CachedRow]) -> bool:
    """Whether all values of these rows, which have one layout, are finite."""
    return all(
        _is_finite(np.frombuffer(b"".join([row.parts[number] for row in rows]), dtype=dtype))
        for number, (dtype, _) in enumerate(rows[0].layout)
    )

"""Encoding of requests and outcomes between ingress and replicas: the frames of `wire`, with relative times.

Token ids and vectors are raw bytes. Times are sent relative to now, because machines do not share a clock.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from penstock.errors import BadValue, EngineError
from penstock.types import Comparison, Failure, Outcome, Request
from penstock.wire.messages import (
    Compare,
    Outcomes,
    Submit,
    decode_from_engine,
    decode_to_engine,
    pack_comparison,
    pack_outcomes,
    pack_requests,
    unpack_comparison,
    unpack_outcomes,
    unpack_requests,
)

Frames = list[Any]  # bytes and arrays; Ray sends large ones without copying them
Work = TypeVar("Work", Request, Comparison)


def pack_work(work: Request | Comparison, name: str) -> Frames:
    """Encode a request or a comparison as frames, with `name` as its id on the replica."""
    now_s = time.monotonic()
    try:
        if isinstance(work, Request):
            return pack_requests([_named(_shifted(work, -now_s), name)])
        return pack_comparison(_named(_shifted(work, -now_s), name))
    except Exception as error:
        raise BadValue(f"the request has a value that cannot be sent to the engine: {error}") from None


def unpack_work(frames: Sequence[Any]) -> Request | Comparison:
    """Decode a request or a comparison. Raises `BadValue` if the frames are not consistent."""
    try:
        message = decode_to_engine(frames[0])
        if isinstance(message, Submit):
            (request,) = unpack_requests(message.requests, frames[1], frames[2:])
            return _shifted(request, time.monotonic())
        if isinstance(message, Compare):
            return _shifted(unpack_comparison(message, frames[1:]), time.monotonic())
    except Exception as error:
        raise BadValue(f"the engine cannot read this request: {error}") from None
    raise BadValue(f"the engine cannot run a message of the kind {type(message).__name__}")


def pack_results(outcomes: Sequence[Outcome]) -> Frames:
    return pack_outcomes(outcomes)


def unpack_results(frames: Sequence[Any]) -> list[Outcome]:
    message = decode_from_engine(frames[0])
    if not isinstance(message, Outcomes):
        raise EngineError(f"a replica answered with {type(message).__name__}, not with outcomes")
    return unpack_outcomes(message.items, frames[1:])


def failure(request_id: str, error: Exception) -> Failure:
    """Convert an exception of a replica to an outcome. Penstock's errors keep their class."""
    from penstock.errors import PenstockError

    if isinstance(error, PenstockError):
        return Failure(request_id, error)
    return Failure(request_id, EngineError(f"{type(error).__name__}: {error}"))


def _named(work: Work, name: str) -> Work:
    work.id = name
    return work


def _shifted(work: Work, seconds: float) -> Work:
    moved = copy.copy(work)
    moved.arrival_s = work.arrival_s + seconds
    moved.deadline_s = None if work.deadline_s is None else work.deadline_s + seconds
    return moved

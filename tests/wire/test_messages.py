from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadValue, DeadlineExceeded, EngineError, PenstockError
from penstock.types import (
    Failure,
    OutputDtype,
    PooledOutput,
    PooledRows,
    PoolingParams,
    Request,
    RequestImages,
    Timings,
)
from penstock.wire.messages import (
    Cancel,
    Hello,
    Outcomes,
    Ready,
    Submit,
    decode_from_engine,
    decode_to_engine,
    encode,
    merge_shared_frames,
    pack_outcomes,
    pack_requests,
    split_into_messages,
    unpack_each,
    unpack_outcomes,
    unpack_requests,
)
from penstock.wire.shared_memory import Region
from tests.helpers import ints, make_images, make_request

OPTIONAL_ARRAYS = ("type_ids", "skip", "key_limits", "token_mask", "pairs", "adapters", "rope_positions")


def sent_and_received(frames: list[Any]) -> list[bytes]:
    return [bytes(memoryview(frame).cast("B")) if len(frame) else b"" for frame in frames]


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    out = []
    for number in range(draw(st.integers(1, 6))):
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        request = make_request(
            f"id-{number}-é",
            lengths,
            first_token=100 * number,
            params=PoolingParams(
                dimensions=draw(st.none() | st.integers(1, 9)),
                normalize=draw(st.none() | st.booleans()),
                dtype=draw(st.sampled_from(OutputDtype)),
            ),
            priority=draw(st.integers(-5, 5)),
            arrival_s=draw(st.floats(0, 1e6)),
            deadline_s=draw(st.none() | st.floats(0, 1e6)),
            client=draw(st.sampled_from(["", "key é"])),
        )
        request.weight = draw(st.floats(0.1, 10)) if request.client else 1.0
        for value, name in enumerate(OPTIONAL_ARRAYS[:-1]):
            if draw(st.booleans()):
                size = (
                    sum(lengths) if name in ("type_ids", "token_mask") else len(lengths) - (name == "pairs")
                )
                setattr(request, name, ints([value] * size))
        if draw(st.booleans()):
            rows = sorted(draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
            request.images = make_images([(2, 1 + row) for row in rows], rows, seed=number)
            request.rope_positions = ints(range(3 * sum(lengths)))
        out.append(request)
    return out


def check_images_are_equal(before: RequestImages | None, after: RequestImages | None) -> None:
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert before.are_rows == after.are_rows
        for name in ("patches", "grids", "rows", "starts", "num_tokens", "digests", "cu_patches"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"grids": ints([2, 3]).reshape(1, 2)}, "do not add up to their patches"),
        ({"grids": ints([0, 4]).reshape(1, 2)}, "no patches"),
        ({"rows": ints([1])}, "rows that it does not have"),
        ({"starts": ints([4])}, "not in their rows"),
        ({"num_tokens": ints([0])}, "not in their rows"),
    ],
)
def test_images_that_do_not_fit_their_request_fail_it_alone(changes: dict[str, Any], reason: str) -> None:
    good, bad = make_request("good", [4]), make_request("bad", [4])
    good.images = make_images([(2, 2)], [0])
    bad.images = replace(make_images([(2, 2)], [0], seed=1), **changes)
    header, frame, *patches = sent_and_received(pack_requests([bad, good]))
    requests, failures = unpack_each(header, frame, patches)
    assert [request.id for request in requests] == ["good"]
    check_images_are_equal(good.images, requests[0].images)
    assert [failure.id for failure in failures] == ["bad"] and reason in str(failures[0].error)


@given(requests())
@settings(max_examples=100, deadline=None)
def test_requests_are_received_as_sent(sent: list[Request]) -> None:
    header, frame, *patches = sent_and_received(pack_requests(sent))
    message = decode_to_engine(header)
    assert isinstance(message, Submit)
    for before, after in zip(sent, unpack_requests(message.requests, frame, patches), strict=True):
        check_images_are_equal(before.images, after.images)
        for name in ("id", "params", "priority", "arrival_s", "deadline_s", "client", "weight"):
            assert getattr(before, name) == getattr(after, name)
        for name in ("token_ids", "lengths", "starts", *OPTIONAL_ARRAYS):
            assert (getattr(before, name) is None) == (getattr(after, name) is None)
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([1, 8, 4096]), st.sampled_from(["<f4", "<u2", "i1"])),
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_small_and_large_outputs_are_received_as_sent(shapes: list[tuple[int, int, str]]) -> None:
    generator = np.random.default_rng(0)
    sent = [
        PooledOutput(
            str(i),
            generator.integers(0, 100, (8 * rows if width > 8 else rows, width)).astype(kind),
            Timings(0.25 * i, 0.5),
        )
        for i, (rows, width, kind) in enumerate(shapes)
    ]
    header, *frames = sent_and_received(pack_outcomes(sent))
    message = decode_from_engine(header)
    assert isinstance(message, Outcomes)
    for before, after in zip(sent, unpack_outcomes(message.items, frames), strict=True):
        assert isinstance(after, PooledOutput)
        assert (after.id, after.timings) == (before.id, before.timings)
        assert after.values.dtype == before.values.dtype
        np.testing.assert_array_equal(after.values, before.values)


def test_shared_arrays_are_sent_once_and_large_outputs_in_messages_of_their_own() -> None:
    shared, other = (np.full((300, 1024), value, dtype=np.float32) for value in (1, 2))
    small = np.zeros((2, 4), dtype=np.float32)
    sent = [
        PooledOutput(name, values, Timings())
        for name, values in (("a", shared), ("b", small), ("c", other), ("d", shared), ("e", small))
    ]
    groups = split_into_messages([*sent, Failure("f", BadValue("no"))])
    assert [[outcome.id for outcome in group] for group in groups] == [["b", "e", "f"], ["a", "d"], ["c"]]
    header, *frames = sent_and_received(pack_outcomes(sent))
    assert [len(frame) for frame in frames] == [2 * small.nbytes, shared.nbytes, other.nbytes]
    message = decode_from_engine(header)
    assert isinstance(message, Outcomes)
    for before, after in zip(sent, unpack_outcomes(message.items, frames), strict=True):
        assert isinstance(after, PooledOutput) and after.id == before.id
        np.testing.assert_array_equal(after.values, before.values)


@pytest.mark.parametrize("width", [3, 40_000])
def test_joined_answers_are_received_beside_other_outputs(width: int) -> None:
    """Their arrays travel in the frame of all small arrays, or in a frame of their own."""
    rows = np.arange(2 * width, dtype=np.float16).reshape(2, width)
    other = PooledOutput("c", np.ones((2, 3), dtype=np.float32), Timings(1.0, 2.0))
    sent = [PooledRows(["a", "b"], rows, [0.25, 0.5], 3.0), other]
    header, *frames = sent_and_received(pack_outcomes(sent))
    message = decode_from_engine(header)
    assert isinstance(message, Outcomes)
    received, after = unpack_outcomes(message.items, frames)
    assert isinstance(received, PooledRows) and isinstance(after, PooledOutput)
    for at, part in enumerate(received.parts()):
        assert (part.id, part.timings) == ("ab"[at], Timings((0.25, 0.5)[at], 3.0))
        np.testing.assert_array_equal(part.values, rows[at : at + 1])
    np.testing.assert_array_equal(after.values, other.values)


def test_joined_answers_with_too_few_rows_are_refused() -> None:
    rows = PooledRows(["a", "b"], np.zeros((1, 3), dtype=np.float32), [0.0, 0.0], 0.0)
    header, *frames = sent_and_received(pack_outcomes([rows]))
    message = decode_from_engine(header)
    assert isinstance(message, Outcomes)
    with pytest.raises(ValueError, match="2 requests have 1 rows"):
        unpack_outcomes(message.items, frames)


@pytest.mark.parametrize(
    "error", [BadValue("no", param="input"), DeadlineExceeded("late"), EngineError("oh")]
)
def test_failures_are_received_as_the_same_error(error: PenstockError) -> None:
    answer = PooledOutput("b", np.ones((2, 3), dtype=np.float32), Timings())
    header, *frames = sent_and_received(pack_outcomes([Failure("a", error), answer]))
    message = decode_from_engine(header)
    assert isinstance(message, Outcomes)
    failure, other = unpack_outcomes(message.items, frames)
    assert isinstance(failure, Failure)
    assert type(failure.error) is type(error)
    assert (failure.error.message, failure.error.param) == (error.message, error.param)
    assert isinstance(other, PooledOutput)
    np.testing.assert_array_equal(other.values, answer.values)


def test_control_messages_keep_their_type() -> None:
    hello = decode_to_engine(encode(Hello("me", 7)))
    assert isinstance(hello, Hello) and (hello.client, hello.pid) == ("me", 7)
    cancel = decode_to_engine(encode(Cancel(["a", "b"])))
    assert isinstance(cancel, Cancel) and cancel.ids == ["a", "b"]
    ready = decode_from_engine(encode(Ready(7, {"device": "cpu"})))
    assert isinstance(ready, Ready) and ready.settings == {"device": "cpu"}


def test_invalid_messages_are_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(b"\xc1 nonsense")
    with pytest.raises(msgspec.ValidationError):
        decode_to_engine(encode(["explode"]))


@pytest.mark.parametrize("shared", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_arrays_in_shared_memory_replace_the_frames_that_are_not_sent(
    shared: tuple[int, ...],
) -> None:
    large = [np.full(40_000, number, dtype=np.float32) for number in range(3)]
    small = np.arange(4, dtype=np.float32)
    in_memory: dict[int, Any] = {}

    def share(array: Any) -> Region | None:
        number = next(number for number, one in enumerate(large) if one is array)
        if number not in shared:
            return None
        assert number not in in_memory, "outputs with the same array share one region"
        in_memory[number] = array
        return Region(number, array.nbytes)

    outcomes = [
        PooledOutput("a", large[0], Timings(), (small, large[1])),
        Failure("b", BadValue("no")),
        PooledOutput("c", small, Timings(), (large[2], large[0])),
    ]
    header, *frames = sent_and_received(pack_outcomes(outcomes, (), share))
    message = decode_from_engine(header)
    assert isinstance(message, Outcomes) and len(frames) == 4 - len(shared)
    whole = merge_shared_frames(frames, message.shared, lambda region: in_memory[region.start])
    a, _, c = unpack_outcomes(message.items, whole)
    assert isinstance(a, PooledOutput) and isinstance(c, PooledOutput)
    expected = [large[0], small, large[1], small, large[2], large[0]]
    for got, wanted in zip([a.values, *a.extra_values, c.values, *c.extra_values], expected, strict=True):
        np.testing.assert_array_equal(got, wanted)

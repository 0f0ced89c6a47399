from __future__ import annotations

import base64

import numpy as np
import orjson
import pytest

from penstock.outputs.encoders import MIN_LARGE_BYTES, Endianness, LargeRow, as_bytes, encode_rows
from penstock.types import Array, OutputDtype

VALUES = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)


def test_numbers_are_encoded_as_the_rows() -> None:
    assert [row.tolist() for row in encode_rows(VALUES, "float", OutputDtype.FLOAT32)] == VALUES.tolist()


def test_half_precision_is_widened_to_numbers_without_loss() -> None:
    half = VALUES.astype(np.float16)
    rows = encode_rows(half, "float", OutputDtype.FLOAT16)
    assert [row.tolist() for row in rows] == half.astype(np.float32).tolist()


def test_bfloat16_bits_become_their_numbers() -> None:
    bits = (VALUES.view(np.uint32) >> 16).astype(np.uint16)
    rows = np.stack(encode_rows(bits, "float", OutputDtype.BFLOAT16))
    np.testing.assert_array_equal(rows.view(np.uint32), VALUES.view(np.uint32) & 0xFFFF0000)


@pytest.mark.parametrize("dtype", [OutputDtype.INT8, OutputDtype.UBINARY])
def test_integers_stay_integers(dtype: OutputDtype) -> None:
    values = np.arange(6, dtype=dtype.numpy).reshape(2, 3)
    rows = encode_rows(values, "float", dtype)
    assert [row.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5]]
    assert all(row.dtype.kind in "iu" for row in rows)


@pytest.mark.parametrize(("endianness", "order"), [("little", "<"), ("big", ">")])
@pytest.mark.parametrize("kind", ["f4", "f2", "u2", "i1", "u1"])
def test_bytes_and_base64_have_the_requested_byte_order(
    endianness: Endianness, order: str, kind: str
) -> None:
    values: Array = (
        (VALUES * 20).astype(np.dtype("<" + kind) if kind != "u2" else np.int32).astype("<" + kind)
    )
    raw = as_bytes(values, endianness)
    np.testing.assert_array_equal(np.frombuffer(raw, dtype=order + kind).reshape(3, 8), values)
    for row, text in zip(values, encode_rows(values, "base64", OutputDtype.FLOAT32, endianness), strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), dtype=order + kind), row)


def test_a_view_of_a_larger_array_is_encoded_like_its_copy() -> None:
    view = VALUES[:, ::2]
    assert as_bytes(view) == view.copy().tobytes()
    both = [encode_rows(rows, "base64", OutputDtype.FLOAT32) for rows in (view, view.copy())]
    assert both[0] == both[1]


def widen(values: Array, dtype: OutputDtype) -> Array:
    if dtype is OutputDtype.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if dtype is OutputDtype.FLOAT16 else values


def whole(row: LargeRow) -> bytes:
    return b"".join(row.pieces())


@pytest.mark.parametrize("dtype", list(OutputDtype))
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
@pytest.mark.parametrize("shape", [(700, 257), (3, 5), (1, 1), (0, 4), (65537,)])
def test_a_large_row_encodes_the_same_in_pieces_as_at_once(
    dtype: OutputDtype, endianness: Endianness, shape: tuple[int, ...]
) -> None:
    values = np.random.default_rng(1).integers(0, 100, shape).astype(dtype.numpy)
    text = LargeRow(values, "base64", dtype, endianness)
    assert base64.b64decode(whole(text)[1:-1]) == as_bytes(values, endianness)
    assert whole(text)[:1] == whole(text)[-1:] == b'"'
    raw = LargeRow(values, "bytes", dtype, endianness)
    assert whole(raw) == as_bytes(values, endianness)
    assert [row.size for row in (text, raw)] == [len(whole(row)) for row in (text, raw)]
    numbers = LargeRow(values, "float", dtype)
    widened = widen(values, dtype)
    assert whole(numbers) == orjson.dumps(widened, option=orjson.OPT_SERIALIZE_NUMPY)
    assert numbers.size is None


def test_no_piece_of_a_large_row_is_large() -> None:
    values = np.random.default_rng(1).standard_normal((1024, 1024)).astype(np.float32)
    for encoding, most in (("base64", 1 << 19), ("bytes", 1 << 19), ("float", 1 << 18)):
        pieces = list(LargeRow(values, encoding, OutputDtype.FLOAT32).pieces())  # type: ignore[arg-type]
        assert max(len(piece) for piece in pieces) <= most


def test_only_large_answers_are_encoded_in_pieces() -> None:
    row = np.zeros(MIN_LARGE_BYTES // 4 // 2, dtype=np.float32)
    assert isinstance(encode_rows([row], "base64", OutputDtype.FLOAT32)[0], str)
    assert all(isinstance(each, LargeRow) for each in encode_rows([row, row], "base64", OutputDtype.FLOAT32))

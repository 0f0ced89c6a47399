"""Outputs: parts and how they are joined, for both formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import BadValue
from penstock.jobs.blocks import Block, VectorColumns
from penstock.jobs.formats import OutputFormat, VectorKind
from penstock.jobs.parts import Span
from penstock.jobs.stamp import Stamp
from penstock.jobs.vectors import check_storable, vector_format
from penstock.outputs.sparse import SparseRow
from penstock.types import OutputDtype
from tests.cli.runs import read_jsonl

RNG = np.random.default_rng(0)
DENSE = VectorKind.DENSE


def columns_of(dtype: OutputDtype = OutputDtype.FLOAT32, **widths: int) -> VectorColumns:
    kinds = {VectorKind(name.replace("_", "-")): width for name, width in (widths or {"dense": 5}).items()}
    return VectorColumns(kinds, dtype, Stamp(model="m", dimension=5))


def joined(
    folder: Path, form: OutputFormat, columns: list[dict[str, Any]], dtype: OutputDtype = OutputDtype.FLOAT32
) -> tuple[Path, np.ndarray]:
    """Write one part for each dict of columns, then join the parts. Return the file and the vectors."""
    writer = vector_format(form, columns_of(dtype))
    parts, vectors = [], []
    for number, carried in enumerate(columns):
        rows = len(next(iter(carried.values())))
        vectors.append(RNG.integers(-100, 100, (rows, 5)).astype(dtype.numpy))
        parts.append(folder / f"{number}{writer.suffix}")
        writer.write(parts[-1], Block(Span(0, rows), carried, {DENSE: vectors[-1]}))
    whole = folder / f"whole.{form}"
    writer.join(parts, whole)
    return whole, np.concatenate(vectors)


STORED = [dtype for dtype in OutputDtype if dtype is not OutputDtype.BFLOAT16]


@pytest.mark.parametrize("dtype", STORED)
def test_parquet_stores_fixed_size_lists_of_each_dtype(tmp_path: Path, dtype: OutputDtype) -> None:
    whole, vectors = joined(tmp_path, OutputFormat.PARQUET, [{"id": [0, 1]}, {"id": [2]}], dtype)
    table = pq.read_table(whole)
    assert table.schema.field("embedding").type == pa.list_(pa.from_numpy_dtype(dtype.numpy), 5)
    stored = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    np.testing.assert_array_equal(stored.reshape(-1, 5), vectors)
    assert table["id"].to_pylist() == [0, 1, 2]
    assert table.schema.metadata[b"penstock.model"] == b"m"


@pytest.mark.parametrize("dtype", STORED)
def test_jsonl_stores_numbers_of_each_dtype(tmp_path: Path, dtype: OutputDtype) -> None:
    whole, vectors = joined(tmp_path, OutputFormat.JSONL, [{"id": [0, 1]}, {"id": [2]}], dtype)
    rows = read_jsonl(whole)
    assert [list(row) for row in rows] == [["id", "embedding"]] * 3
    np.testing.assert_array_equal([row["embedding"] for row in rows], vectors)


def test_bfloat16_is_written_as_numbers_and_refused_by_parquet(tmp_path: Path) -> None:
    writer = vector_format(OutputFormat.JSONL, columns_of(OutputDtype.BFLOAT16, dense=3))
    bits = (np.array([[1.0, -0.5, 3.25]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    writer.write(tmp_path / "a.jsonl", Block(Span(0, 1), {"id": ["x"]}, {DENSE: bits}))
    assert read_jsonl(tmp_path / "a.jsonl") == [{"id": "x", "embedding": [1.0, -0.5, 3.25]}]
    with pytest.raises(BadValue, match="Parquet has no bfloat16"):
        check_storable(OutputFormat.PARQUET, OutputDtype.BFLOAT16)


@pytest.mark.parametrize(
    ("first", "second", "kind", "values"),
    [
        ([None, None], [1], pa.int64(), [None, None, 1]),
        ([1, 2], [0.5], pa.float64(), [1.0, 2.0, 0.5]),
        ([1, 2], ["x"], pa.string(), ["1", "2", "x"]),
        ([True, None], [3], pa.string(), ["true", None, "3"]),
        ([["a"], None], [{"b": 1}], pa.string(), ['["a"]', None, '{"b":1}']),
        ([1, "x"], [None], pa.string(), ["1", "x", None]),
        ([None, None], [None], pa.string(), [None, None, None]),
    ],
)
def test_a_column_whose_type_changes_between_parts_is_stored(
    tmp_path: Path, first: list[Any], second: list[Any], kind: pa.DataType, values: list[Any]
) -> None:
    columns = [{"id": [0, 1], "extra": first}, {"id": [2], "extra": second}]
    table = pq.read_table(joined(tmp_path, OutputFormat.PARQUET, columns)[0])
    assert table.schema.field("extra").type == kind
    assert table["extra"].to_pylist() == values


def test_arrow_columns_pass_through_to_both_formats(tmp_path: Path) -> None:
    when = pa.array([0, 1], pa.timestamp("s"))
    columns: list[dict[str, Any]] = [{"id": pa.array([5, 6], pa.int16()), "when": when}]
    schema = pq.read_schema(joined(tmp_path, OutputFormat.PARQUET, columns)[0])
    assert schema.field("id").type == pa.int16()
    assert pa.types.is_timestamp(schema.field("when").type)
    assert read_jsonl(joined(tmp_path, OutputFormat.JSONL, columns)[0])[1]["when"] == "1970-01-01T00:00:01"


def test_small_parts_become_few_row_groups(tmp_path: Path) -> None:
    whole, _ = joined(tmp_path, OutputFormat.PARQUET, [{"id": [i]} for i in range(50)])
    assert pq.ParquetFile(whole).metadata.num_row_groups == 1


ALL_KINDS = columns_of(dense=2, sparse=0, multi_vector=3)


def block_of_all_kinds() -> Block:
    vectors: dict[VectorKind, Any] = {
        DENSE: np.arange(4, dtype=np.float32).reshape(2, 2),
        VectorKind.SPARSE: [
            SparseRow(np.array([7, 3], np.int32), np.array([0.5, 0.25], np.float32)),
            SparseRow(np.zeros(0, np.int32), np.zeros(0, np.float32)),
        ],
        VectorKind.MULTI_VECTOR: [np.ones((2, 3), np.float32), np.zeros((1, 3), np.float32)],
    }
    return Block(Span(0, 2), {"id": [0, 1]}, vectors)


def test_sparse_and_multi_vector_columns_have_arrow_types() -> None:
    table = ALL_KINDS.table(block_of_all_kinds())
    assert table.schema.field("sparse").type == pa.struct(
        [("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))]
    )
    assert table.schema.field("multi_vector").type == pa.list_(pa.list_(pa.float32(), 3))
    assert table["sparse"].to_pylist() == [
        {"indices": [7, 3], "values": [0.5, 0.25]},
        {"indices": [], "values": []},
    ]
    assert table["multi_vector"].to_pylist() == [[[1.0] * 3] * 2, [[0.0] * 3]]
    assert Stamp.of_schema(table.schema) == ALL_KINDS.stamp
    empty = ALL_KINDS.table(Block(Span(0, 0), {"id": pa.array([], pa.int64())}, ALL_KINDS.empty()))
    assert empty.schema == table.schema


def test_every_kind_is_written_as_json(tmp_path: Path) -> None:
    vector_format(OutputFormat.JSONL, ALL_KINDS).write(tmp_path / "a.jsonl", block_of_all_kinds())
    assert read_jsonl(tmp_path / "a.jsonl")[0] == {
        "id": 0,
        "embedding": [0.0, 1.0],
        "sparse": {"indices": [7, 3], "values": [0.5, 0.25]},
        "multi_vector": [[1.0] * 3] * 2,
    }


def test_parts_become_one_lance_dataset(tmp_path: Path) -> None:
    lance = pytest.importorskip("lance")
    writer = vector_format(OutputFormat.LANCE, ALL_KINDS)
    for number in range(2):
        writer.write(tmp_path / f"{number}.parquet", block_of_all_kinds())
    writer.join([tmp_path / "0.parquet", tmp_path / "1.parquet"], tmp_path / "out.lance")
    table = lance.dataset(str(tmp_path / "out.lance")).to_table()
    assert table["id"].to_pylist() == [0, 1, 0, 1]
    assert table["sparse"].to_pylist()[0] == {"indices": [7, 3], "values": [0.5, 0.25]}
    assert Stamp.of_schema(table.schema) == ALL_KINDS.stamp

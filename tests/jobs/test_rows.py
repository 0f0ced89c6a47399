"""Inputs: the rows of each format, the choice of columns, and errors for bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import BadValue
from penstock.jobs.formats import InputFormat
from penstock.jobs.inputs import open_source
from penstock.jobs.rows import Chunk, Columns, choose_columns
from tests.cli.runs import write_jsonl


def chunks(
    file: Path,
    column: str | None = None,
    id_column: str | None = None,
    keep: tuple[str, ...] = (),
    start: int = 0,
    stop: int | None = None,
    size: int = 2,
) -> list[Chunk]:
    with open_source(str(file), None) as source:
        columns = choose_columns(source, column, id_column, keep)
        return list(source.chunks(columns, start=start, stop=stop, size=size))


def texts(found: list[Chunk]) -> list[str]:
    return [text for chunk in found for text in chunk.texts]


def values(found: list[Chunk], name: str) -> list[Any]:
    columns = [chunk.carried[name] for chunk in found]
    return [
        value for column in columns for value in (column if isinstance(column, list) else column.to_pylist())
    ]


def refused(file: Path, *args: Any, **options: Any) -> str:
    with pytest.raises(BadValue) as caught:
        chunks(file, *args, **options)
    return caught.value.message


@pytest.fixture(params=["jsonl", "csv", "parquet"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Five rows with the columns key, body and n, in each format that has columns."""
    rows = [{"key": f"k{i}", "body": f"text, {i}", "n": i} for i in range(5)]
    file = tmp_path / f"table.{request.param}"
    if request.param == "jsonl":
        return write_jsonl(file, rows)
    if request.param == "csv":
        lines = ["key,body,n", *(f'{row["key"]},"{row["body"]}",{row["n"]}' for row in rows)]
        file.write_text("\r\n".join(lines) + "\r\n")
        return file
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=2)
    return file


def test_rows_come_in_order_and_in_chunks(table: Path) -> None:
    found = chunks(table, "body", "key", ("n",))
    assert texts(found) == [f"text, {i}" for i in range(5)]
    assert [chunk.first for chunk in found] == [0, 2, 4]
    assert values(found, "key") == [f"k{i}" for i in range(5)]
    assert [int(n) for n in values(found, "n")] == [0, 1, 2, 3, 4]
    assert found[-1].read == 1.0


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("stop", [None, 1, 3, 9])
def test_rows_are_cut_at_the_same_places_from_any_start(table: Path, start: int, stop: int | None) -> None:
    found = chunks(table, "body", "key", start=start, stop=stop, size=3)
    assert texts(found) == [f"text, {i}" for i in range(5)][start - start % 3 : stop]
    assert all(chunk.first % 3 == 0 for chunk in found)


def test_an_error_about_a_missing_column_lists_the_columns(table: Path) -> None:
    for flag, message in [
        ({"column": "text"}, "no column 'text' for --column; it has: key, body, n"),
        ({"column": "body", "id_column": "x"}, "no column 'x' for --id-column"),
        ({"column": "body", "keep": ("y",)}, "no column 'y' for --keep"),
    ]:
        assert message in refused(table, **flag)


def test_several_columns_with_text_need_a_choice(table: Path) -> None:
    message = refused(table)
    assert "2 columns with text" in message and "--column: key, body, n" in message


def test_the_only_column_with_text_is_taken(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"n": 1, "body": "one"}, {"n": 2, "body": "two"}])
    assert texts(chunks(file)) == ["one", "two"]
    (tmp_path / "a.csv").write_text("n,body\n1,one\n2,two\n")
    assert texts(chunks(tmp_path / "a.csv")) == ["one", "two"]
    pq.write_table(pa.table({"n": [1, 2], "body": ["one", "two"]}), tmp_path / "a.parquet")
    assert texts(chunks(tmp_path / "a.parquet")) == ["one", "two"]


def test_a_column_named_text_is_preferred(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"title": "no", "text": "yes"}])
    assert texts(chunks(file)) == ["yes"]


def test_columns_whose_names_the_output_needs_cannot_be_kept(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "id": 1, "embedding": [1]}])
    assert "--id-column id" in refused(file, keep=("id",))
    assert "'embedding' cannot be kept" in refused(file, keep=("embedding",))
    assert values(chunks(file, id_column="id", keep=("id",)), "id") == [1]


def test_every_line_of_plain_text_is_a_row_also_blank_ones(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\n  three \nfour")
    assert texts(chunks(file)) == ["one", "", "  three ", "four"]


def test_csv_keeps_quoted_newlines_leading_zeros_and_long_fields(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    long = "word " * 60_000
    file.write_text(f'code,text\n007,"two\nlines"\n\n008,"{long}"\n009,\n')
    found = chunks(file, id_column="code")
    assert texts(found) == ["two\nlines", long, ""]
    assert values(found, "code") == ["007", "008", "009"]


def test_jsonl_skips_blank_lines_and_keeps_values_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "tags": ["x"]}\n\n{"text": ""}\n')
    found = chunks(file, keep=("tags",))
    assert texts(found) == ["a", ""]
    assert values(found, "tags") == [["x"], None]


def test_parquet_reads_every_type_of_text(tmp_path: Path) -> None:
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(
            pa.table({"text": pa.array(["a", "b", "a"], pa.string()).cast(kind)}), tmp_path / "a.parquet"
        )
        assert texts(chunks(tmp_path / "a.parquet")) == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "line 2 is not valid JSON"),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', "line 2 holds a list; each line must be a JSON object"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": null}\n', "row 1 (line 3): 'text' is null, not a text"),
        ("a.jsonl", '{"text": "a"}\n{"text": 3}\n', "row 1 (line 2): 'text' is a number, not a text"),
        ("a.jsonl", '{"text": "a"}\n{"body": "b"}\n', "row 1 (line 2): 'text' is missing"),
        ("a.csv", "id,text\n1,a\n2\n", "line 3 has 1 fields, but the header has 2"),
        ("a.csv", "text,text\na,b\n", "the header names 'text' twice"),
        ("a.txt", "fine\n\udcff\n", "line 2 is not UTF-8"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, errors="surrogateescape")
    assert message in refused(tmp_path / name)


def test_every_row_needs_an_id(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "key": 1}, {"text": "b"}])
    assert "row 1 (line 2): 'key' is missing" in refused(file, id_column="key")


def test_errors_name_parquet_nulls_and_wrong_types(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c", None], "n": [1, 2, None, 4]}), file)
    assert "row 3: 'text' is null" in refused(file)
    assert "row 2: 'n' is null" in refused(file, id_column="n", size=4, stop=3)
    assert "column 'n' holds int64, not text" in refused(file, "n")


def test_files_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    assert "there is no file" in refused(tmp_path / "none.txt")
    (tmp_path / "empty").mkdir()
    assert "holds no file of a known format" in refused(tmp_path / "empty")
    (tmp_path / "a.docx").write_text("x")
    assert "a.docx has no known extension (.jsonl" in refused(tmp_path / "a.docx")
    (tmp_path / "a.parquet").write_text("not parquet")
    assert "is not a readable Parquet file" in refused(tmp_path / "a.parquet")


def test_stdin_needs_a_format_that_streams() -> None:
    for form in (None, InputFormat.PARQUET):
        with pytest.raises(BadValue, match="stdin needs --format"):
            open_source("-", form)


def test_an_empty_input_has_no_rows_and_no_columns_to_check(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv", "a.txt"):
        (tmp_path / name).write_text("")
        assert chunks(tmp_path / name) == []
    with open_source(str(tmp_path / "a.jsonl"), None) as source:
        empty = source.empty_chunk(Columns("text", "key", ("n",)))
    assert (empty.texts, empty.carried) == ([], {"key": [], "n": []})

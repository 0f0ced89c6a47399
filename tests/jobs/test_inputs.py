"""Inputs from several files, folders, patterns, Lance datasets and URIs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import BadValue
from penstock.jobs.formats import InputFormat
from penstock.jobs.inputs import describe_files, find_files, open_inputs
from penstock.jobs.rows import Chunk, Columns, choose_columns
from tests.cli.runs import write_jsonl

COLUMNS = Columns("text", None, ())


def read(
    *inputs: object, start: int = 0, stop: int | None = None, size: int = 2, skips: bool = False
) -> list[Chunk]:
    with open_inputs(find_files([str(each) for each in inputs], None), None) as source:
        source.skips_bad_rows = skips
        columns = choose_columns(source, "text", None, ())
        return list(source.chunks(columns, start=start, stop=stop, size=size))


def refused(*inputs: object, form: InputFormat | None = None) -> str:
    with pytest.raises(BadValue) as caught:
        find_files([str(each) for each in inputs], form)
    return caught.value.message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven rows in three files of three formats, and two files that are not read."""
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", [{"text": f"t{i}"} for i in range(3)])
    pq.write_table(pa.table({"text": ["t3", "t4"]}), folder / "b.parquet")
    (folder / "deep" / "c.csv").write_text("text\nt5\nt6\n")
    (folder / "_manifest.json").write_text("{}")
    (folder / "notes.md").write_text("no rows")
    return folder


def test_files_of_a_folder_are_read_by_name_and_numbered_through(folder: Path) -> None:
    chunks = read(folder)
    assert [text for chunk in chunks for text in chunk.texts] == [f"t{i}" for i in range(7)]
    assert [(chunk.first, chunk.count) for chunk in chunks] == [(0, 2), (2, 1), (3, 2), (5, 2)]
    assert chunks[-1].read == 1.0


@pytest.mark.parametrize("start", range(8))
def test_several_files_are_cut_at_the_same_places_from_any_start(folder: Path, start: int) -> None:
    expected = [(chunk.first, chunk.count) for chunk in read(folder) if chunk.end > start]
    assert [(chunk.first, chunk.count) for chunk in read(folder, start=start)] == expected


def test_a_limit_ends_within_a_file(folder: Path) -> None:
    assert [text for chunk in read(folder, stop=4) for text in chunk.texts] == ["t0", "t1", "t2", "t3"]


def test_several_inputs_and_patterns_come_in_the_order_given(folder: Path) -> None:
    chunks = read(folder / "deep" / "*.csv", folder / "a.jsonl")
    assert [text for chunk in chunks for text in chunk.texts] == ["t5", "t6", "t0", "t1", "t2"]


def test_bad_rows_of_later_files_have_the_number_of_the_whole_input(folder: Path) -> None:
    pq.write_table(pa.table({"text": pa.array(["t3", None])}), folder / "b.parquet")
    bad = [each for chunk in read(folder, skips=True) for each in chunk.bad]
    assert [(each.row, each.reason, each.column) for each in bad] == [(4, "'text' is null", "text")]


def test_rows_of_each_file_are_known_for_tables(tmp_path: Path) -> None:
    for name, rows in (("a", 3), ("b", 2)):
        pq.write_table(pa.table({"text": ["x"] * rows}), tmp_path / f"{name}.parquet")
    with open_inputs(find_files([str(tmp_path)], None), None) as source:
        assert source.file_rows == (3, 2)


def test_a_file_without_the_column_is_named(folder: Path) -> None:
    (folder / "deep" / "c.csv").write_text("body\nt5\n")
    with pytest.raises(BadValue, match=r"c.csv has no column 'text' for --column; it has: body"):
        read(folder)


def test_a_changed_file_changes_the_description(folder: Path) -> None:
    before = describe_files(find_files([str(folder)], None))
    assert before == describe_files(find_files([str(folder)], None))
    write_jsonl(folder / "a.jsonl", [{"text": "other"}])
    assert before != describe_files(find_files([str(folder)], None))


def test_lance_datasets_are_read_by_range(tmp_path: Path) -> None:
    lance = pytest.importorskip("lance")
    where = str(tmp_path / "in.lance")
    lance.write_dataset(pa.table({"text": [f"t{i}" for i in range(5)]}), where)
    assert [text for chunk in read(where) for text in chunk.texts] == [f"t{i}" for i in range(5)]
    assert [chunk.first for chunk in read(where, start=3)] == [2, 4]
    assert "is not a readable Lance dataset" in refused(tmp_path, form=InputFormat.LANCE)


def test_uris_are_read_through_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/penstock-inputs/a.jsonl", b'{"text": "t0"}\n{"text": "t1"}\n')
    pq.write_table(pa.table({"text": ["t2"]}), tmp_path / "b.parquet")
    memory.put_file(str(tmp_path / "b.parquet"), "/penstock-inputs/b.parquet")
    for given in ("memory://penstock-inputs/", "memory://penstock-inputs/*"):
        assert [text for chunk in read(given) for text in chunk.texts] == ["t0", "t1", "t2"]
    assert "there is no file" in refused("memory://penstock-inputs/none.jsonl")
    assert [chunk.texts for chunk in read(f"file://{tmp_path}/b.parquet")] == [["t2"]]


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")

    def fails(*_: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fails)
    assert (
        refused("s3://bucket/a.jsonl") == "s3://bucket/a.jsonl needs the package s3fs, which is not installed"
    )


def test_an_unknown_scheme_is_refused() -> None:
    pytest.importorskip("fsspec")
    assert "cannot be opened: Protocol not known: nowhere" in refused("nowhere://x/a.jsonl")


def test_inputs_that_name_nothing_are_refused(tmp_path: Path) -> None:
    assert "no file matches" in refused(tmp_path / "*.jsonl")
    assert "stdin (-) cannot be combined with files" in refused("-", tmp_path / "a.jsonl")


def test_chunks_of_long_texts_are_split(tmp_path: Path) -> None:
    chunk = Chunk(4, 5, ["a" * 10, "b" * 10, "c" * 30, "d", "e"], {"n": [0, 1, 2, 3, 4]}, 1.0)
    pieces = list(chunk.split(20))
    assert [(piece.first, piece.count, piece.carried["n"]) for piece in pieces] == [
        (4, 2, [0, 1]),
        (6, 1, [2]),
        (7, 2, [3, 4]),
    ]

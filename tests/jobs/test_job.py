"""Jobs end to end: kinds of vectors, bad rows, folders, stores, and resuming after any interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import Engine
from penstock.errors import BadValue
from penstock.jobs.formats import OnError
from penstock.jobs.job import Job, Sink, run
from penstock.jobs.parts import PartWriter
from penstock.jobs.stamp import Stamp
from tests.checkpoints import write_m3
from tests.cli.runs import NULL, error_of, invoke, read_jsonl, write_jsonl

TEXTS = ["a river", "a turbine that turns", "the gate", "water flows down the pipe"]


class Killed(BaseException):
    """Stands in for the death of the process."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", [{"key": f"k{i}", "text": t} for i, t in enumerate(TEXTS)])


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_m3(tmp_path_factory.mktemp("m3"))


def test_dense_sparse_and_multi_vectors_come_from_one_run(tmp_path: Path, source: Path, m3: Path) -> None:
    output = tmp_path / "out.parquet"
    kinds = ("--vectors", "dense", "--vectors", "sparse", "--vectors", "multi-vector")
    result = invoke("embed", source, "-o", output, "--model", m3, "--device", "cpu", *kinds)
    assert result.exit_code == 0, result.output
    table = pq.read_table(output)
    assert table.schema.names == ["id", "embedding", "sparse", "multi_vector"]
    with Engine(str(m3), device="cpu") as engine:
        dense, tokens = engine.embed(TEXTS), engine.token_embed(TEXTS)
        sparse = engine.sparse(TEXTS)
    np.testing.assert_allclose(np.array(table["embedding"].to_pylist()), dense, atol=2e-5)
    for row, (stored, expected) in enumerate(zip(table["multi_vector"].to_pylist(), tokens, strict=True)):
        np.testing.assert_allclose(np.array(stored), expected, atol=2e-5)
        terms = table["sparse"][row].as_py()
        assert sorted(terms["indices"]) == sorted(sparse[row])
    stamp = Stamp.of_schema(table.schema)
    assert stamp is not None and stamp.kinds == ("dense", "sparse", "multi-vector") and stamp.revision


def test_a_kind_that_the_model_lacks_is_refused(tmp_path: Path, source: Path) -> None:
    message = error_of("embed", source, "-o", tmp_path / "o.jsonl", "--vectors", "sparse", *NULL)
    assert "has no task 'sparse'; its tasks are: " in message


BAD_LINES = '{"text": "a"}\n{"text": null}\n{"text": 3}\n{"body": "b"}\n{"tex\n{"text": "f"}\n'


def test_bad_rows_are_skipped_and_listed_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(BAD_LINES + json.dumps({"text": "word " * 300}) + "\n")
    output = tmp_path / "out.jsonl"
    args = ("embed", tmp_path / "in.jsonl", "-o", output, *NULL, "--batch-rows", 4, "--no-truncate")
    result = invoke(*args, "--on-error", "skip")
    assert result.exit_code == 0, result.output
    assert [row["id"] for row in read_jsonl(output)] == [0, 5]
    assert f"5 bad rows are listed in {output}.errors.jsonl" in result.stderr
    listed = read_jsonl(tmp_path / "out.jsonl.errors.jsonl")
    assert [(each["row"], each["id"], each["column"]) for each in listed] == [
        (1, 1, "text"),
        (2, 2, "text"),
        (3, 3, "text"),
        (4, 4, None),
        (6, 6, "text"),
    ]
    reasons = [each["reason"] for each in listed]
    assert reasons[:3] == [
        "line 2: 'text' is null, not a text",
        "line 3: 'text' is a number, not a text",
        "line 4: 'text' is missing",
    ]
    assert "is not valid JSON" in reasons[3]
    assert reasons[4] == "has 302 tokens, but the model takes at most 256"
    assert "row 1 (line 2): 'text' is null" in error_of(*args, "--overwrite")


def test_a_stopped_run_can_be_resumed_with_bad_rows_skipped(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": f"t{i}"} for i in range(10)]
    rows[7] = {"text": None}
    write_jsonl(tmp_path / "in.jsonl", rows)
    args = ("embed", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *NULL, "--batch-rows", 2)
    assert "row 7" in error_of(*args)
    assert invoke(*args, "--resume", "--on-error", "skip").exit_code == 0
    assert [row["id"] for row in read_jsonl(tmp_path / "out.jsonl")] == [0, 1, 2, 3, 4, 5, 6, 8, 9]


def test_a_block_of_bad_rows_only_is_empty(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([None, None, "c"])}), tmp_path / "in.parquet")
    output = tmp_path / "out.parquet"
    args = ("embed", tmp_path / "in.parquet", "-o", output, *NULL, "--batch-rows", 2, "--on-error", "skip")
    assert invoke(*args).exit_code == 0
    assert pq.read_table(output)["id"].to_pylist() == [2]


def test_a_folder_of_parts_has_a_manifest(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "vectors"
    args = ("embed", source, "-o", f"{folder}/", *NULL, "--batch-rows", 3, "--id-column", "key")
    assert invoke(*args).exit_code == 0
    manifest = json.loads((folder / "_manifest.json").read_text())
    assert (manifest["state"], manifest["input_rows"], manifest["bad_rows"]) == ("complete", 4, 0)
    assert [file["name"] for file in manifest["files"]] == [
        "000000000000-3.parquet",
        "000000000003-1.parquet",
    ]
    assert manifest["stamp"]["dimension"] == 384 and manifest["settings"]["id_column"] == "key"
    assert pq.read_table(folder)["key"].to_pylist() == ["k0", "k1", "k2", "k3"]
    assert "exists; replace it with --overwrite" in error_of(*args)
    assert invoke(*args, "--resume").exit_code == 0  # nothing is left to do


def test_an_object_store_holds_a_folder_of_parts(source: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    where = "memory://penstock-outputs/vectors"
    args = ("embed", source, *NULL, "--batch-rows", 3)
    assert "end it with /" in error_of(*args, "-o", f"{where}.parquet")
    assert invoke(*args, "-o", f"{where}/").exit_code == 0
    memory = fsspec.filesystem("memory")
    names = sorted(name.rsplit("/", 1)[-1] for name in memory.ls("/penstock-outputs/vectors", detail=False))
    assert names == ["000000000000-3.parquet", "000000000003-1.parquet", "_manifest.json"]
    with memory.open("/penstock-outputs/vectors/000000000003-1.parquet") as part:
        assert pq.read_table(part)["id"].to_pylist() == [3]


def test_a_lance_output_is_a_dataset(tmp_path: Path, source: Path) -> None:
    lance = pytest.importorskip("lance")
    output = tmp_path / "out.lance"
    for flags in ((), ("--overwrite",)):
        args = ("embed", source, "-o", output, *NULL, "--batch-rows", 3, *flags)
        assert invoke(*args).exit_code == 0
        assert lance.dataset(str(output)).to_table()["id"].to_pylist() == [0, 1, 2, 3]
    assert "exists; replace it" in error_of("embed", source, "-o", output, *NULL)
    assert "name it OUT.lance" in error_of(
        "embed", source, "-o", tmp_path / "x/", "--output-format", "lance", *NULL
    )


@pytest.mark.parametrize("moment", range(5))
def test_a_run_killed_at_any_commit_repeats_no_row_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    (tmp_path / "in.txt").write_text("".join(f"line {i}\n" for i in range(9)))
    job = {"inputs": (str(tmp_path / "in.txt"),), "output": str(tmp_path / "out.jsonl"), "batch_rows": 2}
    job |= {"engine": {"device": "null"}, "resume": True}
    commit, commits = PartWriter.commit, 0

    def dies(self: PartWriter, *args: Any) -> None:
        nonlocal commits
        if commits == moment:
            raise Killed
        commits += 1
        commit(self, *args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(PartWriter, "commit", dies)
        run(Job(**job))
    run(Job(**{**job, "batch_rows": 5}))  # blocks keep the size of the first run
    assert [row["id"] for row in read_jsonl(tmp_path / "out.jsonl")] == list(range(9))


class FakeStore:
    """An in-memory store, in place of one that `--to` opens."""

    rows: dict[Any, dict[str, Any]] = {}
    opened: list[tuple[pa.Schema, Stamp]] = []
    writes = 0
    finished = 0

    def open(self, schema: pa.Schema, stamp: Stamp) -> None:
        self.opened.append((schema, stamp))

    def write(self, table: pa.Table) -> None:
        FakeStore.writes += 1
        if FakeStore.writes == 2:
            raise Killed
        self.rows.update({row["id"]: row for row in table.to_pylist()})

    def finish(self) -> None:
        FakeStore.finished += 1


def test_a_store_gets_tables_and_only_those_that_it_lacks(tmp_path: Path, source: Path) -> None:
    job = Job(
        inputs=(str(source),),
        output=str(tmp_path / "docs.parts"),
        engine={"device": "null"},
        id_column="key",
        batch_rows=1,
        on_error=OnError.SKIP,
        resume=True,
    )
    sink = Sink(label="fake:docs", open=FakeStore, check=lambda *_: None)
    with pytest.raises(Killed):
        run(job, sink)
    assert sorted(FakeStore.rows) == ["k0"]
    run(job, sink)
    assert sorted(FakeStore.rows) == ["k0", "k1", "k2", "k3"] and FakeStore.writes == 1 + 1 + 3
    assert FakeStore.finished == 1 and not (tmp_path / "docs.parts").exists()
    schema, stamp = FakeStore.opened[0]
    assert schema.names == ["id", "vector"] and Stamp.of_schema(schema) == stamp
    with pytest.raises(BadValue, match="a store keeps the ids in 'id'"):
        write_jsonl(source, [{"key": 1, "id": 2, "text": "a"}])
        run(Job(**{**{f: getattr(job, f) for f in job.__struct_fields__}, "keep": ("id",)}), sink)


def test_ray_flags_need_ray(tmp_path: Path, source: Path) -> None:
    for flag, value in (("--workers", 2), ("--ray-address", "auto"), ("--gpus-per-worker", 1)):
        message = error_of("embed", source, "-o", tmp_path / "o.jsonl", *NULL, flag, value)
        assert message == f"{flag} needs --ray"

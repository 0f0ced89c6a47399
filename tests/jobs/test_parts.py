"""An unfinished output: what survives an interruption, and which runs are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadValue, EngineError
from penstock.jobs import outputs
from penstock.jobs.blocks import Block, VectorColumns
from penstock.jobs.formats import OutputFormat, VectorKind
from penstock.jobs.outputs import FileOutput, FolderOutput, RunFlags
from penstock.jobs.parts import MANIFEST, Cut, Parts, Span, check_output, parts_folder
from penstock.jobs.plan import first_missing
from penstock.jobs.rows import BadRow
from penstock.jobs.stamp import Stamp
from penstock.jobs.storage import LocalFolder
from penstock.types import OutputDtype
from tests.cli.runs import read_jsonl

SETTINGS: dict[str, Any] = {"model": "m", "dimensions": None, "keep": ("a",)}
COLUMNS = VectorColumns({VectorKind.DENSE: 2}, OutputDtype.FLOAT32, Stamp(model="m"))


class Killed(BaseException):
    """Stands in for the death of the process."""


def flags(resume: bool, overwrite: bool, settings: dict[str, Any]) -> RunFlags:
    return RunFlags(settings=settings, cut=Cut(rows=2), resume=resume, overwrite=overwrite)


def open_output(
    output: Path, *, resume: bool = False, overwrite: bool = False, settings: dict[str, Any] = SETTINGS
) -> FileOutput:
    return FileOutput(output, OutputFormat.JSONL, COLUMNS, flags(resume, overwrite, settings))


def add(output: outputs.Output, first: int, count: int = 1, *bad: BadRow) -> None:
    gone = {each.row for each in bad}
    ids = [row for row in range(first, first + count) if row not in gone]
    vectors = {VectorKind.DENSE: np.zeros((len(ids), 2), np.float32)}
    output.writer.commit(Block(Span(first, count), {"id": ids}, vectors, bad))
    output.parts.refresh()


def ids(output: Path) -> list[int]:
    return [row["id"] for row in read_jsonl(output)]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_parts_are_joined_into_the_output_and_the_folder_is_removed(output: Path) -> None:
    with open_output(output) as run:
        add(run, 0, 2)
        add(run, 2)
        assert run.parts.rows == 3 and not output.exists()
        run.finish()
    assert ids(output) == [0, 1, 2]
    assert list(output.parent.iterdir()) == [output]


def test_blocks_may_be_committed_in_any_order_and_twice(output: Path) -> None:
    with open_output(output) as run:
        for first in (4, 0, 2, 4):
            add(run, first, 2)
        run.finish()
    assert ids(output) == list(range(6))


def test_a_block_that_was_being_written_is_computed_again(output: Path) -> None:
    with open_output(output) as run:
        add(run, 0, 2)
    (parts_folder(output) / "draft-0123").write_text('{"id": 2}\n{"i')
    with open_output(output, resume=True) as run:
        assert run.parts.spans == {Span(0, 2)}
        add(run, 2, 2)
        run.finish()
    assert ids(output) == [0, 1, 2, 3]


def test_only_the_blocks_of_a_gap_are_missing(output: Path) -> None:
    with open_output(output) as run:
        for first in range(3):
            add(run, first)
    (parts_folder(output) / "000000000001-1.jsonl").unlink()
    with open_output(output, resume=True) as run:
        assert first_missing(run.parts.spans) == 1 and run.parts.rows == 2
        with pytest.raises(EngineError, match="rows 1 to 1 are missing"):
            run.finish()
        add(run, 1)
        run.finish()
    assert ids(output) == [0, 1, 2]


def test_a_run_killed_while_joining_joins_again(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise Killed

    with open_output(output) as run:
        add(run, 0)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr("penstock.jobs.vectors.JsonlVectors.join", dies)
            run.finish()
    with open_output(output, resume=True) as run:
        assert run.parts.rows == 1 and run.parts.is_running
        run.finish()
    assert ids(output) == [0]


@pytest.mark.parametrize("moment", ["move", "discard"])
def test_a_run_killed_after_joining_only_moves_its_output(
    output: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def dies(*_: object) -> None:
        raise Killed

    with open_output(output) as run:
        add(run, 0, 2)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            if moment == "discard":
                patch.setattr(Parts, "discard", dies)
            else:
                patch.setattr(outputs, "move", dies)
            run.finish()
    assert output.exists() == (moment == "discard")
    monkeypatch.setattr("penstock.jobs.vectors.JsonlVectors.join", dies)
    with open_output(output, resume=True) as run:
        assert not run.parts.is_running and run.parts.rows == 2
        run.finish()
    assert ids(output) == [0, 1]
    assert not parts_folder(output).exists()


def test_changed_settings_are_refused_by_name(output: Path) -> None:
    with open_output(output) as run:
        add(run, 0)
    with pytest.raises(
        BadValue, match=r'started with other settings \(model: "m", now "n"; keep: \["a"\], now \[\]\)'
    ):
        open_output(output, resume=True, settings={**SETTINGS, "model": "n", "keep": ()})
    with open_output(output, resume=True) as run:
        assert run.parts.rows == 1


def test_an_unfinished_run_needs_resume_or_overwrite(output: Path) -> None:
    with open_output(output) as run:
        add(run, 0)
    with pytest.raises(
        BadValue, match="unfinished run; continue with --resume, or start again with --overwrite"
    ):
        check_output(output, resume=False, overwrite=False)
    with open_output(output, overwrite=True) as run:
        assert run.parts.rows == 0


def test_an_existing_output_is_replaced_only_with_overwrite_and_only_at_the_end(output: Path) -> None:
    output.write_text("old")
    for resume in (False, True):
        with pytest.raises(BadValue, match="exists; replace it with --overwrite"):
            check_output(output, resume=resume, overwrite=False)
    with open_output(output, overwrite=True) as run:
        add(run, 0)
    assert output.read_text() == "old"
    with open_output(output, resume=True) as run:  # the resumed run already had the permission
        run.finish()
    assert ids(output) == [0]


def test_an_output_that_appears_during_a_run_is_not_replaced(output: Path) -> None:
    with open_output(output) as run:
        add(run, 0)
    output.write_text("someone else's")
    with pytest.raises(BadValue, match="exists; replace"):
        open_output(output, resume=True)


def test_only_one_process_writes_an_output(output: Path) -> None:
    with open_output(output) as run:
        add(run, 0)
        with pytest.raises(BadValue, match="another process is writing"):
            open_output(output, overwrite=True)
        assert run.parts.rows == 1


def test_foreign_files_are_never_removed(output: Path) -> None:
    parts_folder(output).mkdir()
    theirs = parts_folder(output) / "holiday.jpg"
    theirs.write_text("beach")
    with pytest.raises(BadValue, match=r"holds holiday.jpg, which is not part of an unfinished run"):
        open_output(output, overwrite=True)
    assert theirs.exists()


def test_a_damaged_manifest_can_only_be_overwritten(output: Path) -> None:
    with open_output(output):
        pass
    (parts_folder(output) / MANIFEST).write_text("{")
    with pytest.raises(BadValue, match="is damaged"):
        open_output(output, resume=True)
    with open_output(output, overwrite=True) as run:
        assert run.parts.rows == 0


def test_outputs_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadValue, match="there is no folder"):
        check_output(tmp_path / "none" / "out.jsonl", resume=False, overwrite=False)
    with pytest.raises(BadValue, match="is a folder"):
        check_output(tmp_path, resume=False, overwrite=False)
    monkeypatch.setattr("os.access", lambda *_: False)  # root can write anywhere, so chmod has no effect
    with pytest.raises(BadValue, match="is not writable"):
        check_output(tmp_path / "out.jsonl", resume=False, overwrite=False)


def test_bad_rows_are_listed_beside_the_output_in_order(output: Path) -> None:
    with open_output(output) as run:
        add(run, 2, 2, BadRow(3, "c", "has no text", "text"))
        add(run, 0, 2, BadRow(0, "a", "has no text", "text"))
        run.finish()
    assert ids(output) == [1, 2]
    listed = read_jsonl(output.with_name("out.jsonl.errors.jsonl"))
    assert listed == [
        {"row": 0, "id": "a", "reason": "has no text", "column": "text"},
        {"row": 3, "id": "c", "reason": "has no text", "column": "text"},
    ]


def test_bad_rows_of_a_block_that_was_not_finished_do_not_count(output: Path) -> None:
    with open_output(output) as run:
        add(run, 0)
        orphan = b'{"row": 1}\n'
        run.parts.folder.commit("_errors-000000000001-1.jsonl", lambda file: file.write_bytes(orphan))
    with open_output(output, resume=True) as run:
        add(run, 1, 2)
        run.finish()
    assert ids(output) == [0, 1, 2]
    assert list(output.parent.iterdir()) == [output]


def test_a_folder_is_complete_when_its_manifest_says_so(tmp_path: Path) -> None:
    where = str(tmp_path / "vectors")
    with FolderOutput(where, OutputFormat.PARQUET, COLUMNS, flags(False, False, SETTINGS)) as run:
        add(run, 0, 2)
        assert run.parts.manifest.state == "running"
        add(run, 2, 2, BadRow(3, 3, "has no text"))
        run.finish()
    names = sorted(file.name for file in Path(where).iterdir())
    assert names == [
        "000000000000-2.parquet",
        "000000000002-2.parquet",
        "_errors.jsonl",
        "_manifest.json",
    ]
    with FolderOutput(where, OutputFormat.PARQUET, COLUMNS, flags(True, False, SETTINGS)) as again:
        manifest = again.parts.manifest
        assert (manifest.state, manifest.input_rows, manifest.bad_rows) == ("complete", 4, 1)
        assert [file.name for file in manifest.files] == names[:2]
        assert manifest.stamp["model"] == "m"
    with pytest.raises(BadValue, match="exists; replace it with --overwrite"):
        FolderOutput(where, OutputFormat.PARQUET, COLUMNS, flags(False, False, SETTINGS))


def test_overlapping_parts_are_refused(output: Path) -> None:
    with open_output(output) as run:
        add(run, 0, 2)
        run.parts.writer.commit(Span(1, 2), lambda file: file.write_bytes(b""))
    with pytest.raises(BadValue, match="holds overlapping parts"):
        open_output(output, resume=True)


def test_a_failed_write_leaves_no_draft(tmp_path: Path) -> None:
    folder = LocalFolder(str(tmp_path))

    def fails(file: Path) -> None:
        file.write_text("hal")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        folder.commit("a", fails)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_of_a_run_that_was_given_up_writes_nothing(output: Path) -> None:
    with open_output(output) as old:
        add(old, 0)
    with open_output(output, overwrite=True) as run:
        with pytest.raises(EngineError, match="another run writes"):
            add(old, 2)
        add(run, 0)
        run.finish()
    with pytest.raises((EngineError, FileNotFoundError)):
        add(old, 2)
    assert ids(output) == [0]
    assert list(output.parent.iterdir()) == [output]


def test_a_worker_whose_draft_was_removed_writes_nothing(output: Path) -> None:
    with open_output(output) as old:
        pass

    def is_overtaken(file: Path) -> None:
        file.write_text("of the old run")
        with open_output(output, overwrite=True):
            pass

    with pytest.raises((EngineError, FileNotFoundError)):
        old.parts.writer.commit(Span(0, 1), is_overtaken)
    assert [file.name for file in parts_folder(output).iterdir()] == [MANIFEST]


def test_a_run_killed_while_it_clears_an_old_one_starts_from_the_beginning(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise Killed

    with open_output(output) as old:
        add(old, 0)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("penstock.jobs.parts._clear", dies)
        open_output(output, overwrite=True, settings={"model": "n"})
    with open_output(output, resume=True, settings={"model": "n"}) as run:
        assert run.parts.rows == 0

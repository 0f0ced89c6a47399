"""The folder of an unfinished output: what survives which interruption, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadValue
from penstock.jobs.parts import Parts, check_output, parts_folder

SETTINGS: dict[str, Any] = {"model": "m", "dimensions": None, "keep": ("a",)}


class Killed(BaseException):
    """Stands for the moment in which a process is gone."""


def open_parts(
    output: Path, *, resume: bool = False, overwrite: bool = False, settings: dict[str, Any] = SETTINGS
) -> Parts:
    return Parts(output, ".jsonl", settings, resume=resume, overwrite=overwrite)


def add(parts: Parts, *numbers: int) -> None:
    text = "".join(f"{number}\n" for number in numbers)
    parts.add(len(numbers), lambda file: file.write_text(text))


def concatenate(parts: Sequence[Path], file: Path) -> None:
    file.write_text("".join(part.read_text() for part in parts))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_parts_are_joined_into_the_output_and_the_folder_is_removed(output: Path) -> None:
    with open_parts(output) as parts:
        add(parts, 0, 1)
        add(parts, 2)
        assert parts.rows == 3 and not output.exists()
        parts.finish(concatenate)
    assert output.read_text() == "0\n1\n2\n"
    assert list(output.parent.iterdir()) == [output]


def test_resuming_continues_after_the_last_complete_part(output: Path) -> None:
    with open_parts(output) as parts:
        add(parts, 0, 1)

        def dies_while_writing(file: Path) -> None:
            file.write_text("2\nhal")
            raise Killed

        with pytest.raises(Killed):
            parts.add(2, dies_while_writing)
    with open_parts(output, resume=True) as parts:
        assert parts.rows == 2
        add(parts, 2, 3)
        parts.finish(concatenate)
    assert output.read_text() == "0\n1\n2\n3\n"


def test_parts_after_a_gap_are_computed_again(output: Path) -> None:
    with open_parts(output) as parts:
        for number in range(3):
            add(parts, number)
    (parts_folder(output) / "000000000001-1.jsonl").unlink()
    with open_parts(output, resume=True) as parts:
        assert parts.rows == 1
    assert len(list(parts_folder(output).glob("0*"))) == 1


def test_a_run_killed_while_joining_joins_again(output: Path) -> None:
    with open_parts(output) as parts:
        add(parts, 0)

        def dies(files: Sequence[Path], file: Path) -> None:
            file.write_text("hal")
            raise Killed

        with pytest.raises(Killed):
            parts.finish(dies)
    with open_parts(output, resume=True) as parts:
        assert parts.rows == 1 and not parts.joined
        parts.finish(concatenate)
    assert output.read_text() == "0\n"


@pytest.mark.parametrize("moment", ["replace", "discard"])
def test_a_run_killed_after_joining_only_moves_its_output(
    output: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def dies(*_: object) -> None:
        raise Killed

    replace = Path.replace
    with open_parts(output) as parts:
        add(parts, 0, 1)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            if moment == "discard":
                patch.setattr(Parts, "discard", dies)
            else:
                patch.setattr(Path, "replace", lambda a, b: dies() if b == output else replace(a, b))
            parts.finish(concatenate)
    assert output.exists() == (moment == "discard")
    with open_parts(output, resume=True) as parts:
        assert parts.joined and parts.rows == 2
        parts.finish(dies)
    assert output.read_text() == "0\n1\n"
    assert not parts_folder(output).exists()


def test_changed_settings_are_refused_by_name(output: Path) -> None:
    with open_parts(output) as parts:
        add(parts, 0)
    with pytest.raises(
        BadValue, match=r'started with other settings \(model: "m", now "n"; keep: \["a"\], now \[\]\)'
    ):
        open_parts(output, resume=True, settings={**SETTINGS, "model": "n", "keep": ()})
    with open_parts(output, resume=True) as parts:
        assert parts.rows == 1


def test_an_unfinished_run_needs_resume_or_overwrite(output: Path) -> None:
    with open_parts(output) as parts:
        add(parts, 0)
    with pytest.raises(
        BadValue, match="unfinished run; continue with --resume, or start again with --overwrite"
    ):
        check_output(output, resume=False, overwrite=False)
    with open_parts(output, overwrite=True) as parts:
        assert parts.rows == 0


def test_an_existing_output_is_replaced_only_with_overwrite_and_only_at_the_end(output: Path) -> None:
    output.write_text("old")
    for resume in (False, True):
        with pytest.raises(BadValue, match="exists; replace it with --overwrite"):
            check_output(output, resume=resume, overwrite=False)
    with open_parts(output, overwrite=True) as parts:
        add(parts, 0)
    assert output.read_text() == "old"
    with open_parts(output, resume=True) as parts:  # the permission was given to the run that is resumed
        parts.finish(concatenate)
    assert output.read_text() == "0\n"


def test_an_output_that_appears_during_a_run_is_not_replaced(output: Path) -> None:
    with open_parts(output) as parts:
        add(parts, 0)
    output.write_text("someone else's")
    with pytest.raises(BadValue, match="exists; replace"):
        open_parts(output, resume=True)


def test_only_one_process_writes_an_output(output: Path) -> None:
    with open_parts(output) as parts:
        add(parts, 0)
        with pytest.raises(BadValue, match="another process is writing"):
            open_parts(output, overwrite=True)
        assert parts.rows == 1


def test_foreign_files_are_never_removed(output: Path) -> None:
    parts_folder(output).mkdir()
    theirs = parts_folder(output) / "holiday.jpg"
    theirs.write_text("beach")
    with pytest.raises(BadValue, match=r"holds holiday.jpg, which is not part of an unfinished run"):
        open_parts(output, overwrite=True)
    assert theirs.exists()


def test_a_damaged_manifest_can_only_be_overwritten(output: Path) -> None:
    with open_parts(output):
        pass
    (parts_folder(output) / "manifest.json").write_text("{")
    with pytest.raises(BadValue, match="is damaged"):
        open_parts(output, resume=True)
    with open_parts(output, overwrite=True) as parts:
        assert parts.rows == 0


def test_outputs_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadValue, match="there is no folder"):
        check_output(tmp_path / "none" / "out.jsonl", resume=False, overwrite=False)
    with pytest.raises(BadValue, match="is a folder"):
        check_output(tmp_path, resume=False, overwrite=False)
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere, so chmod shows nothing
    with pytest.raises(BadValue, match="is not writable"):
        check_output(tmp_path / "out.jsonl", resume=False, overwrite=False)

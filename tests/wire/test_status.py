"""The page on which the engine publishes its status."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from penstock.backlog import Backlog
from penstock.wire.status import EngineStatus, StatusReader, StatusWriter, create_status_page


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "status"
    create_status_page(path)
    return path


def test_a_reader_sees_what_the_engine_publishes(page: Path) -> None:
    reader = StatusReader(page)
    assert reader.read() == EngineStatus()
    writer = StatusWriter(page)
    status = EngineStatus(4711, 12.5, 12.25, 11.0, 90_000_000, 2048, 1234.5)
    writer.publish(status)
    assert reader.read() == status


@pytest.mark.parametrize("name", ["queued_tokens", "queued_prompt_tokens"])
def test_a_reader_sees_whether_anything_waits_without_reading_the_page(page: Path, name: str) -> None:
    writer, reader = StatusWriter(page), StatusReader(page)
    writer.publish(EngineStatus(4711, 12.5, 12.25, 11.0, tokens_per_s=9.0, prompt_tokens_per_s=9.0))
    assert not reader.has_backlog
    writer.publish(EngineStatus(pid=4711, **{name: 1}))  # type: ignore[arg-type]
    assert reader.has_backlog


def test_the_page_tells_what_waits_in_small_and_large_requests_and_in_prompts(page: Path) -> None:
    StatusWriter(page).publish(
        EngineStatus(
            queued_tokens=70,
            tokens_per_s=10.0,
            queued_large_tokens=50,
            queued_prompt_tokens=6,
            prompt_tokens_per_s=3.0,
        )
    )
    status = StatusReader(page).read()
    assert status.backlog == Backlog(small_tokens=20, large_tokens=50, tokens_per_s=10.0)
    assert status.prompt_backlog.wait_s(is_large=True) == 2.0


def test_a_launch_changes_its_own_value_only(page: Path) -> None:
    writer, reader = StatusWriter(page), StatusReader(page)
    writer.publish(EngineStatus(pid=1, queued_tokens=7))
    writer.launching(3.25)
    assert reader.read() == EngineStatus(pid=1, launch_began_s=3.25, queued_tokens=7)


def test_a_new_engine_clears_what_the_old_one_wrote(page: Path) -> None:
    StatusWriter(page).publish(EngineStatus(pid=1, heartbeat_s=5.0, queued_tokens=9))
    reader = StatusReader(page)
    StatusWriter(page)
    assert reader.read() == EngineStatus()


def test_only_the_owner_can_open_the_page_and_no_existing_file_is_taken_over(page: Path) -> None:
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        create_status_page(page)

"""The runtime folder, through which the processes of a server find one another."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.serving.runtime_folder import (
    PREFIX,
    RuntimeFolder,
    choose_parent,
    hold_lock,
    remove_stale_folders,
)


@pytest.fixture
def parent() -> Iterator[Path]:
    """A folder with a short path: socket addresses are limited, and pytest's folders have long names."""
    folder = Path(f"/tmp/{PREFIX}test-{os.getpid()}")
    folder.mkdir(mode=0o700)
    yield folder
    folder.rmdir()


def test_only_the_owner_can_look_into_the_folder(parent: Path) -> None:
    folder = RuntimeFolder([parent])
    assert folder.path.parent == parent
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()
    assert not folder.path.exists()


def test_a_folder_of_which_no_process_is_left_is_removed_by_the_next_server(parent: Path) -> None:
    abandoned, used = RuntimeFolder([parent]), RuntimeFolder([parent])
    os.close(abandoned._lock_fd)  # as the system does when all processes are killed
    remove_stale_folders(parent)
    assert not abandoned.path.exists() and used.path.exists()
    used.remove()


def test_a_folder_stays_as_long_as_any_process_uses_it(parent: Path) -> None:
    folder = RuntimeFolder([parent])
    hold_lock(folder.path)  # as a child process does
    os.close(folder._lock_fd)
    remove_stale_folders(parent)
    assert folder.path.exists()
    folder.path.joinpath("lock").unlink()
    folder.path.rmdir()


def test_other_folders_and_links_are_left_alone(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    link, young = parent / f"{PREFIX}link", parent / f"{PREFIX}young"
    link.symlink_to(tmp_path)
    young.mkdir()  # another server's folder, not locked yet
    remove_stale_folders(parent)
    assert (tmp_path / "lock").exists() and link.is_symlink() and young.is_dir()
    link.unlink()
    young.rmdir()


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_place_in_which_others_can_replace_the_folder_is_passed_over(
    parent: Path, tmp_path: Path, mode: int
) -> None:
    shared = parent / "shared"
    shared.mkdir()
    shared.chmod(mode)
    assert choose_parent([shared, parent]) == parent
    (shared / "mine").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=r"TMPDIR.*other users can replace"):
        choose_parent([shared / "mine"])
    shared.chmod(mode | stat.S_ISVTX)  # sticky, as /tmp
    assert choose_parent([shared, parent]) == shared
    (shared / "mine").rmdir()
    shared.rmdir()


def test_a_path_too_long_for_a_socket_is_passed_over_or_refused(parent: Path, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    assert choose_parent([long, parent / "nothing", parent]) == parent
    with pytest.raises(ConfigError, match=r"TMPDIR.*too long for a Unix socket"):
        choose_parent([long])

"""The supervisor reports to systemd, if requested, that it is ready, alive or stopping."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.serving.systemd import READY, notify, notify_alive
from tests.waiting import PATIENCE_S


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a fake service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield receiver


def test_states_arrive_in_one_message(manager: socket.socket) -> None:
    notify(READY, "STATUS=serving 2 models")
    assert manager.recv(1000) == b"READY=1\nSTATUS=serving 2 models"


def test_an_abstract_socket_is_addressed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"penstock-test-{tmp_path.name}-{id(tmp_path)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        receiver.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        notify(READY)
        assert receiver.recv(1000) == b"READY=1"


def test_life_is_reported_only_to_a_watchdog(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    notify_alive()
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    notify_alive()
    notify(READY)
    assert [manager.recv(1000), manager.recv(1000)] == [b"WATCHDOG=1", b"READY=1"]


def test_nothing_happens_without_a_manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify(READY)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify(READY)

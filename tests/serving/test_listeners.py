"""The sockets that a server listens on."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from penstock.config import ServerConfig
from penstock.errors import ConfigError
from penstock.serving.listeners import Listeners, listen, listen_unix


def test_a_unix_socket_has_its_permissions_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listeners = Listeners(ServerConfig(uds=str(path), uds_permissions=0o660))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660 and listeners.port == 0
    assert listeners.address == f"unix:{path}" and len(listeners.fds) == 1
    assert os.get_inheritable(listeners.public.fileno())
    listeners.close()
    assert not path.exists()


def test_a_socket_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    listen_unix(path, 0o600).close()  # as after a crash, the file remains
    again = listen_unix(path, 0o600)
    with pytest.raises(ConfigError, match="another server listens on it"):
        listen_unix(path, 0o600)
    again.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "not a socket"),
        ("folder", "not a socket"),
        ("missing/socket", "No such file"),
        ("x" * 120, "more than 107 bytes"),
    ],
)
def test_a_path_that_cannot_be_a_socket_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=words) as refused:
        listen_unix(str(tmp_path / name), 0o600)
    assert "--uds" in refused.value.message and (tmp_path / "file").read_text() == "kept"


def test_a_socket_of_a_successor_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first = Listeners(ServerConfig(uds=str(path)))
    path.unlink()
    second = Listeners(ServerConfig(uds=str(path)))
    first.close()
    assert path.exists()
    second.close()


def test_the_admin_port_has_an_address_of_its_own() -> None:
    listeners = Listeners(ServerConfig(port=0, admin_port=0))
    assert listeners.admin is not None and listeners.admin_address != listeners.address
    taken = listeners.port
    listeners.close()
    with listen("127.0.0.1", 0) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ConfigError, match=r"--admin-port"):
            Listeners(ServerConfig(port=0, admin_port=taken))
    with pytest.raises(ConfigError, match="0 to 65535"):
        listen("127.0.0.1", 70_000)


def test_a_server_with_tls_has_an_address_that_says_so() -> None:
    listeners = Listeners(ServerConfig(port=0, ssl_certfile="certificate"))
    assert listeners.address.startswith("https://")
    listeners.close()

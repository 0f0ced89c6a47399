"""The listening sockets of a server. The supervisor opens them, and API processes inherit them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from penstock.config import ServerConfig
from penstock.errors import ConfigError

BACKLOG = 4096
MAX_UDS_BYTES = 107  # longest path of a Unix socket on Linux
PROBE_TIMEOUT_S = 1.0


class Listeners:
    """All listening sockets of a server."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._own_uds: tuple[str, int] | None = None  # path and inode
        self.admin: socket.socket | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if config.uds is None:
                self.public = listen(config.host, config.port)
            else:
                self.public = self._listen_unix(config.uds)
            if config.admin_port is not None:
                self.admin = listen(self._admin_host, config.admin_port, flag="--admin-port")
            undo.pop_all()

    def _listen_unix(self, path: str) -> socket.socket:
        made = listen_unix(path, self._config.uds_permissions)
        self._own_uds = (path, Path(path).stat().st_ino)
        return made

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        found = (getattr(self, "public", None), self.admin)
        return tuple(each for each in found if each is not None)

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(each.fileno() for each in self.sockets)

    @property
    def port(self) -> int:
        """The public port; 0 for a Unix socket."""
        return 0 if self._config.uds is not None else int(self.public.getsockname()[1])

    @property
    def _admin_host(self) -> str:
        return self._config.host if self._config.admin_host is None else self._config.admin_host

    @property
    def _scheme(self) -> str:
        return "http" if self._config.ssl_certfile is None else "https"

    @property
    def address(self) -> str:
        """The URL at which clients reach the server."""
        if self._config.uds is not None:
            return f"unix:{self._config.uds}"
        return f"{self._scheme}://{_in_url(self._config.host)}:{self.port}"

    @property
    def admin_address(self) -> str | None:
        if self.admin is None:
            return None
        return f"{self._scheme}://{_in_url(self._admin_host)}:{self.admin.getsockname()[1]}"

    def close(self) -> None:
        """Close all sockets, and remove the Unix socket unless another server has taken its place."""
        for each in self.sockets:
            each.close()
        if self._own_uds is not None:
            path, inode = self._own_uds
            self._own_uds = None
            with contextlib.suppress(OSError):
                if Path(path).stat().st_ino == inode:
                    Path(path).unlink()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Open a listening socket that API processes inherit."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = error.strerror if isinstance(error, OSError) else "use a port from 0 to 65535"
        raise ConfigError(
            f"cannot listen on {host}:{port} ({flag}): {why}", param=flag.lstrip("-").replace("-", "_")
        ) from None
    return _started(listener)


def listen_unix(path: str, permissions: int) -> socket.socket:
    """Open a listening Unix socket. Replaces the stale socket of a dead server."""
    if len(os.fsencode(path)) > MAX_UDS_BYTES:
        raise _cannot_listen(path, f"the path has more than {MAX_UDS_BYTES} bytes")
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~permissions)  # nobody else can connect before the chmod
    try:
        listener.bind(path)
        Path(path).chmod(permissions)
    except OSError as error:
        listener.close()
        raise _cannot_listen(path, error.strerror or str(error)) from None
    finally:
        os.umask(before)
    return _started(listener)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise _cannot_listen(path, "the path is taken by something that is not a socket")
    try:
        _connect_unix(path).close()
    except OSError as error:
        if error.errno != errno.ECONNREFUSED:
            raise _cannot_listen(path, error.strerror or str(error)) from None
        Path(path).unlink()
        return
    raise _cannot_listen(path, "another server listens on it")


def _connect_unix(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(PROBE_TIMEOUT_S)
    try:
        connected.connect(path)
    except BaseException:
        connected.close()
        raise
    return connected


def _cannot_listen(path: str, why: str) -> ConfigError:
    return ConfigError(f"cannot listen on {path!r} (--uds): {why}", param="uds")


def _started(listener: socket.socket) -> socket.socket:
    listener.listen(BACKLOG)
    listener.set_inheritable(True)
    return listener

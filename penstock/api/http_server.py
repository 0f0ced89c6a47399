"""uvicorn's server on several sockets, each with its own application, with or without TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from penstock.api.hosts import HostCheck


@dataclass(frozen=True, slots=True)
class Door:
    """A listening socket, and the application that it serves."""

    socket: socket.socket
    app: ASGIApp
    hosts: HostCheck | None = None
    tls: ssl.SSLContext | None = None


class HttpServer(uvicorn.Server):
    """Serves all listening sockets until it is stopped."""

    def __init__(self, config: uvicorn.Config, doors: Sequence[Door], handshake_timeout_s: float) -> None:
        super().__init__(config)
        self._doors = doors
        self._handshake_timeout_s = handshake_timeout_s
        self.on_started: Callable[[], None] = lambda: None  # called when connections are accepted

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(1)
        loop = asyncio.get_running_loop()
        self.servers = []
        for door in self._doors:
            options: dict[str, Any] = {"ssl": door.tls, "backlog": self.config.backlog}
            if door.tls is not None:
                options["ssl_handshake_timeout"] = self._handshake_timeout_s
            self.servers.append(await loop.create_server(self._protocol(door), sock=door.socket, **options))
        self.started = True
        self.on_started()

    def _protocol(self, door: Door) -> Callable[[], asyncio.Protocol]:
        def create() -> asyncio.Protocol:
            connection: Any = self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            connection.app, connection.hosts = door.app, door.hosts
            return connection  # type: ignore[no-any-return]

        return create

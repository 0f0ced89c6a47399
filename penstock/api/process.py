"""An API process: HTTP on one side, the engine's wire on the other. Never imports torch."""

from __future__ import annotations

import gc
import logging
import math
import os
import resource
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec
import uvicorn

from penstock.api.app import build_app
from penstock.api.connection_table import MAX_REFUSED, ConnectionTable
from penstock.api.connections import Connection
from penstock.api.hosts import host_check
from penstock.api.model_table import ModelTableFollower, build_model
from penstock.api.state import ServerState
from penstock.config import ServerConfig, available_cpus
from penstock.errors import ModelLoadError
from penstock.serving.launch import (
    EXIT_BAD_MODEL,
    ApiLaunch,
    follow_parent,
    setup_child_process,
)

OTHER_FILES = 256  # that a process opens besides its connections
log = logging.getLogger("penstock.api")


def build_state(launch: ApiLaunch) -> ServerState:
    state = ServerState(launch.server, {})
    state.serve_models([build_model(each, launch.server) for each in launch.models])
    return state


def tokenizer_threads(cpus: int, processes: int) -> int:
    """Threads that tokenise long texts; more than there are spare cores would slow the engine down."""
    return max(1, min(4, cpus // (processes + 1)))


def http_config(state: ServerState, listener: socket.socket) -> uvicorn.Config:
    """How uvicorn serves this process: its protocol is a `Connection`, within the limits of the server."""
    limits = with_open_files(state.config)
    hosts = host_check(listener.getsockname()[0], limits.host, limits.allowed_hosts)
    return uvicorn.Config(
        build_app(state),
        http=cast(Any, partial(Connection, table=ConnectionTable(limits, state.buffered, hosts))),
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=limits.access_log,
        proxy_headers=False,  # nothing here uses the client's address
        server_header=False,
        date_header=False,
        # A last resort: the connections end all requests themselves, a second after the drain at the latest.
        timeout_graceful_shutdown=math.ceil(limits.drain_s) + 2,
    )


def with_open_files(limits: ServerConfig) -> ServerConfig:
    """The limits, with no more connections than this process may have open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + MAX_REFUSED + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    possible = max(soft - MAX_REFUSED - OTHER_FILES, soft // 2)
    log.warning(
        "this process may open %d files: it takes %d connections, not %d; raise it with ulimit -n",
        *(soft, possible, limits.max_connections),
    )
    return msgspec.structs.replace(limits, max_connections=possible)


def main() -> None:
    setup_child_process()
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=ApiLaunch)
    follow_parent(launch.parent)
    threads = tokenizer_threads(available_cpus(), launch.server.api_server_count)
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))  # read when the first texts are tokenised
    logging.basicConfig(level=launch.server.log_level.upper(), format="%(levelname)s api: %(message)s")
    try:
        state = build_state(launch)
    except ModelLoadError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(EXIT_BAD_MODEL)
    listener = socket.socket(fileno=launch.listen_fd)
    follower = None
    if launch.control is not None:
        state.follower = follower = ModelTableFollower(state, launch.control)
    config = http_config(state, listener)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    gc.collect()
    gc.freeze()  # what is there now stays: no later collection has to look at it
    HttpServer(config, None if follower is None else follower.attach).run(sockets=[listener])


class HttpServer(uvicorn.Server):
    """Says when it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None] | None = None) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_started is not None and not self.should_exit:
            self._on_started()


if __name__ == "__main__":
    main()

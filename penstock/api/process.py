"""An API process: HTTP on one side, the engine's wire on the other. Never imports torch."""

from __future__ import annotations

import gc
import logging
import math
import os
import resource
import socket
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import uvicorn
from starlette.types import ASGIApp

from penstock.api.app import build_admin_app, build_app
from penstock.api.connection_table import MAX_REFUSED, ConnectionTable
from penstock.api.connections import Connection
from penstock.api.hosts import HostCheck, host_check
from penstock.api.http_server import Door, HttpServer
from penstock.api.metrics import ApiMetrics
from penstock.api.model_table import ModelTableFollower, build_model
from penstock.api.state import ServerState
from penstock.api.tls import ServerTls
from penstock.config import ServerConfig, available_cpus
from penstock.errors import ModelLoadError
from penstock.logs import configure
from penstock.serving.launch import (
    EXIT_BAD_MODEL,
    ApiLaunch,
    follow_parent,
    setup_child_process,
)

GC_OBJECTS = 20_000  # new objects between two collections; a request makes about a hundred, without cycles
OTHER_FILES = 256  # open files besides connections
log = logging.getLogger("penstock.api")


def build_state(launch: ApiLaunch) -> ServerState:
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about broken metadata in clients' images
    state = ServerState(launch.server, {})
    state.serve_models([build_model(each, launch.server) for each in launch.models])
    return state


def tokenizer_threads(cpus: int, processes: int) -> int:
    """Threads that tokenise long texts; more than there are spare cores would slow the engine down."""
    return max(1, min(4, cpus // (processes + 1)))


def http_config(
    state: ServerState, listener: socket.socket | None = None, metrics: ApiMetrics | None = None
) -> uvicorn.Config:
    """The configuration of uvicorn. Its protocol is a `Connection`, with the limits of the server."""
    limits = with_open_files(state.config)
    hosts = None if listener is None else hosts_of(listener, limits)
    return uvicorn.Config(
        build_app(state, metrics),
        http=cast(Any, partial(Connection, table=ConnectionTable(limits, state.buffered, hosts))),
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=limits.logs_requests,
        proxy_headers=False,  # the client is the peer of the connection
        server_header=False,
        date_header=False,
        # A fallback: connections end all requests themselves, a second after the drain at the latest.
        timeout_graceful_shutdown=math.ceil(limits.drain_s) + 2,
    )


def hosts_of(listener: socket.socket, config: ServerConfig) -> HostCheck | None:
    """Which hosts requests may name. None for a Unix socket, which no page in a browser can reach."""
    if listener.family == socket.AF_UNIX:
        return None
    return host_check(listener.getsockname()[0], config.host, config.allowed_hosts)


def open_doors(state: ServerState, launch: ApiLaunch, app: ASGIApp, metrics: ApiMetrics) -> list[Door]:
    """The sockets that this process has inherited, and what it serves on each."""
    public = socket.socket(fileno=launch.listen_fd)
    tls = None
    if state.config.ssl_certfile is not None:
        served = ServerTls(state.config)
        state.watched.append(served.reload)
        tls = served.context
    doors = [Door(public, app, hosts_of(public, state.config), tls)]
    if launch.admin_fd is not None:
        admin = socket.socket(fileno=launch.admin_fd)
        doors.append(Door(admin, build_admin_app(state, metrics), hosts_of(admin, state.config), tls))
    return doors


def with_open_files(limits: ServerConfig) -> ServerConfig:
    """Raise this process's limit of open files. Returns `limits`, with fewer connections if that fails."""
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
    server = launch.server
    configure(level=server.log_level, format=server.log_format, process="api", shows_values=server.log_inputs)
    try:
        state = build_state(launch)
    except ModelLoadError as error:
        log.error("%s", error.message)
        sys.exit(EXIT_BAD_MODEL)
    if launch.parent is not None:
        folder = Path(launch.parent.folder) / "keys"
        state.keys.share_limits(folder, launch.index, server.api_server_count)
    follower = None
    if launch.control is not None:
        state.follower = follower = ModelTableFollower(state, launch.control)
    metrics = ApiMetrics()
    config = http_config(state, metrics=metrics)
    doors = open_doors(state, launch, cast(ASGIApp, config.app), metrics)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    gc.collect()
    gc.freeze()  # objects that exist now are permanent, so later collections skip them
    gc.set_threshold(GC_OBJECTS, *gc.get_threshold()[1:])
    http = HttpServer(config, doors, server.header_timeout_s)
    if follower is not None:
        http.on_started = follower.report_serving
    http.run(sockets=[door.socket for door in doors])


if __name__ == "__main__":
    main()

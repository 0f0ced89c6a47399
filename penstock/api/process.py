"""An API process: HTTP on one side, the engine's wire on the other. Never imports torch."""

from __future__ import annotations

import gc
import logging
import math
import os
import resource
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import uvicorn

from penstock.api.admission import Admission
from penstock.api.app import build_app
from penstock.api.connection_table import MAX_REFUSED, ConnectionTable
from penstock.api.connections import Connection
from penstock.api.hosts import host_check
from penstock.api.state import ServedModel, ServerState, engine_reason
from penstock.checkpoint.spec import with_max_model_len
from penstock.config import ServerConfig, available_cpus
from penstock.errors import ModelLoadError
from penstock.logs import configure
from penstock.serving.launch import (
    EXIT_BAD_MODEL,
    ApiLaunch,
    follow_parent,
    report_started,
    setup_child_process,
)
from penstock.tasks.model import TextModel
from penstock.wire.client import EngineClient
from penstock.wire.liveness import HangLimits
from penstock.wire.status import StatusReader

OTHER_FILES = 256  # that a process opens besides its connections
log = logging.getLogger("penstock.api")


def build_state(launch: ApiLaunch) -> ServerState:
    spec = with_max_model_len(launch.spec, launch.engine.max_model_len or launch.spec.max_model_len)
    status = None if launch.status_file is None else StatusReader(Path(launch.status_file))
    engine = EngineClient(
        launch.address,
        partial(engine_reason, Path(launch.state_file)),
        status,
        HangLimits.for_refusing(launch.server.engine_hang_timeout_s, launch.server.engine_step_timeout_s),
    )
    model = ServedModel(
        text=TextModel(spec, chat_template=launch.server.chat_template),
        engine=engine,
        created_s=int(time.time()),
        admission=Admission(status, lambda: engine.engine_settings),
    )
    aliases = dict.fromkeys(launch.engine.model_names[1:], spec.name)
    return ServerState(launch.server, {spec.name: model}, aliases)


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
        access_log=limits.logs_requests,
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
    server = launch.server
    configure(level=server.log_level, format=server.log_format, process="api", shows_values=server.log_inputs)
    try:
        state = build_state(launch)
    except ModelLoadError as error:
        log.error("%s", error.message)
        sys.exit(EXIT_BAD_MODEL)
    listener = socket.socket(fileno=launch.listen_fd)
    config = http_config(state, listener)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    gc.collect()
    gc.freeze()  # what is there now stays: no later collection has to look at it
    report_started(launch)
    for model in state.models.values():
        if isinstance(model.engine, EngineClient):
            model.engine.on_ready = partial(report_started, launch)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()

"""An API process: HTTP on one side, the engine's wire on the other. Never imports torch."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import uvicorn

from penstock.api.app import build_app
from penstock.api.state import ServedModel, ServerState, engine_reason
from penstock.checkpoint.spec import with_max_model_len
from penstock.config import available_cpus
from penstock.errors import ModelLoadError
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


def build_state(launch: ApiLaunch) -> ServerState:
    spec = with_max_model_len(launch.spec, launch.engine.max_model_len or launch.spec.max_model_len)
    status = None if launch.status_file is None else StatusReader(Path(launch.status_file))
    model = ServedModel(
        text=TextModel(spec, chat_template=launch.server.chat_template),
        engine=EngineClient(
            launch.address,
            partial(engine_reason, Path(launch.state_file)),
            status,
            HangLimits.for_refusing(launch.server.engine_hang_timeout_s, launch.server.engine_step_timeout_s),
        ),
        created_s=int(time.time()),
    )
    return ServerState(launch.server, {spec.name: model})


def tokenizer_threads(cpus: int, processes: int) -> int:
    """Threads that tokenise long texts; more than there are spare cores would slow the engine down."""
    return max(1, min(4, cpus // (processes + 1)))


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
    config = uvicorn.Config(
        build_app(state),
        http="httptools",
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=launch.server.access_log,
        proxy_headers=False,  # nothing here uses the client's address
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(launch.server.drain_s)),
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    gc.collect()
    gc.freeze()  # what is there now stays: no later collection has to look at it
    listener = socket.socket(fileno=launch.listen_fd)
    report_started(launch)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()

"""The application with a scripted engine, in this process or on a loopback port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from penstock.api.process import http_config
from penstock.api.state import ServedModel, ServerState
from penstock.config import ServerConfig
from penstock.tasks.model import TextModel
from tests.text_models import ScriptedEngine, text_spec
from tests.waiting import PATIENCE_S, wait_until


def make_state(
    folder: Path, engine: ScriptedEngine, server: dict[str, Any] | None = None, **spec: Any
) -> ServerState:
    described = text_spec(folder, **spec)
    text = TextModel(described, chat_template=(server or {}).get("chat_template"))
    model = ServedModel(text=text, engine=engine, created_s=0)
    return ServerState(ServerConfig(**(server or {})), {described.name: model})


@contextmanager
def listening(state: ServerState) -> Iterator[str]:
    """Serve on a thread of this process and yield the address."""
    with server_thread(state) as (url, _, _):
        yield url


@contextmanager
def server_thread(state: ServerState) -> Iterator[tuple[str, uvicorn.Server, threading.Thread]]:
    """Serve on a thread of this process; yield the address, the server and its thread."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(http_config(state, listener))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    assert server.started
    try:
        yield url, server, thread
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()

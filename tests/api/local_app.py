"""The whole application in this process, with a local engine instead of an engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from penstock.api.app import build_app
from penstock.api.state import ServedModel, ServerState
from penstock.checkpoint.describe import describe
from penstock.checkpoint.spec import with_max_model_len
from penstock.config import EngineConfig, ServerConfig
from penstock.offline.local import LocalEngine
from penstock.runner.load import settle
from penstock.tasks.model import TextModel
from penstock.types import PooledOutput, Request


class CountingClient:
    """A replacement for `EngineClient` that records the requests it receives."""

    ready: Any = True

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.requests: list[Request] = []

    def start(self) -> None:
        return None

    def close(self) -> None:
        return None

    async def run(self, request: Request) -> PooledOutput:
        self.requests.append(request)
        return await asyncio.wrap_future(self.submit(request))

    def submit(self, request: Request) -> Future[PooledOutput]:
        return self.engine.submit(request)


@contextmanager
def local_app(folder: Path, **options: Any) -> Iterator[tuple[TestClient, CountingClient]]:
    """Serve the state that `local_state` makes from these options. Yield a client and the engine."""
    with local_state(folder, **options) as (state, local), TestClient(build_app(state)) as http:
        yield http, local


@contextmanager
def local_state(
    folder: Path,
    *,
    client: type[CountingClient] = CountingClient,
    server: dict[str, Any] | None = None,
    aliases: tuple[str, ...] = (),
    **options: Any,
) -> Iterator[tuple[ServerState, CountingClient]]:
    """The state of a server with one model, which runs in this process."""
    config = EngineConfig(model=str(folder), served_model_name="model", device="cpu", threads=1, **options)
    described = describe(config)
    settings = settle(config, described)
    spec = with_max_model_len(described, settings.max_model_len)
    engine = LocalEngine(spec, settings)
    local = client(engine)
    text = TextModel(spec, chat_template=(server or {}).get("chat_template"))
    model = ServedModel(text=text, engine=local, created_s=0)  # type: ignore[arg-type]
    other_names = dict.fromkeys(aliases, spec.name)
    state = ServerState(ServerConfig(**(server or {})), {spec.name: model}, other_names)
    try:
        yield state, local
    finally:
        engine.close()


class WholeClient(CountingClient):
    """A replacement for `EngineClient` with all methods that handlers call, also streams and comparisons."""

    unavailable_reason = ""

    async def run(self, request: Request) -> PooledOutput:
        return await self.engine.run(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

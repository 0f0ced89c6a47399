"""A server of several models in this process, for tests that do not depend on processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from penstock.api.state import ServedModel, ServerState
from penstock.config import ServerConfig
from penstock.offline.open import open_model
from penstock.serving.control import Action, OrderAnswer
from penstock.wire.status import EngineSleep, EngineStatus, StatusReader, StatusWriter, create_status_page
from tests.api.scripted_app import listening

Options = Mapping[str, Any]  # fields of `EngineConfig`
TINY: Options = {"device": "cpu", "threads": 1, "kv_cache_gb": 0.05}


class SleepingModels:
    """A fake supervisor: orders and tests set the states of models."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages: dict[str, StatusWriter] = {}

    def status_of(self, name: str) -> StatusReader:
        path = self._folder / f"{len(self._pages)}.status"
        create_status_page(path)
        self._pages[name] = StatusWriter(path)
        self.set(name, EngineSleep.AWAKE)
        return StatusReader(path)

    def set(self, name: str, state: EngineSleep) -> None:
        self._pages[name].publish(EngineStatus(state=state))

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def order(
        self, action: Action, model: str, *, level: int | None = None, settings: dict[str, Any] | None = None
    ) -> OrderAnswer:
        is_sleep = action == "sleep"
        self.set(model, EngineSleep.ASLEEP if is_sleep else EngineSleep.AWAKE)
        return OrderAnswer(0, model, "asleep" if is_sleep else "awake", 0.1)


@contextmanager
def serving_models(
    models: Mapping[str, Path | None],
    options: Mapping[str, Options] | None = None,
    states: SleepingModels | None = None,
    **server: Any,
) -> Iterator[str]:
    """Serve models under their names (None: the default model) and yield the server's address.

    `options` are further fields of `EngineConfig` by model name, `states` keeps the models' sleep states, and
    `server` are fields of `ServerConfig`.
    """
    with ExitStack() as stack:
        served: dict[str, ServedModel] = {}
        for name, folder in models.items():
            found = {} if folder is None else {"model": str(folder)}
            settings = {**TINY, **found, "served_model_name": name, **(options or {}).get(name, {})}
            local = stack.enter_context(open_model(settings))
            status = None if states is None else states.status_of(name)
            served[name] = ServedModel(text=local.text, engine=local.engine, created_s=0, status=status)
        state = ServerState(ServerConfig(**server), served, follower=states)
        yield stack.enter_context(listening(state))

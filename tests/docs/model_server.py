"""A server of several models in this process, so that a browser test starts none of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from penstock.api.state import ServedModel, ServerState
from penstock.config import ServerConfig
from penstock.offline.open import open_model
from tests.api.scripted_app import listening

Options = Mapping[str, Any]  # fields of `EngineConfig`
TINY: Options = {"device": "cpu", "threads": 1, "kv_cache_gb": 0.05}


@contextmanager
def serving_models(
    models: Mapping[str, Path | None], options: Mapping[str, Options] | None = None, **server: Any
) -> Iterator[str]:
    """Serve models under their names (None: the default model) and yield the address. `options` are further
    fields of `EngineConfig` by name, `server` are fields of `ServerConfig`."""
    with ExitStack() as stack:
        served: dict[str, ServedModel] = {}
        for name, folder in models.items():
            found = {} if folder is None else {"model": str(folder)}
            settings = {**TINY, **found, "served_model_name": name, **(options or {}).get(name, {})}
            local = stack.enter_context(open_model(settings))
            served[name] = ServedModel(text=local.text, engine=local.engine, created_s=0)
        yield stack.enter_context(listening(ServerState(ServerConfig(**server), served)))

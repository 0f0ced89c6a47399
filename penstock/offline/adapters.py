"""LoRA adapters of a model in this process: loaded, selected by name, and unloaded after their last use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from penstock.checkpoint.adapter_files import adapter_digest, find_adapter
from penstock.checkpoint.adapter_folder import check_folder
from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig
from penstock.errors import AdapterNotFound, BadValue, NotPossible, shown
from penstock.offline.local import LocalEngine

ENABLE = "open the engine with enable_lora=True"


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    id: int
    name: str
    digest: str  # hash of the content of its files
    num_users: int = 0
    is_retired: bool = False


class LocalAdapters:
    """The loaded adapters, by name. Safe to call from several threads."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, engine: LocalEngine) -> None:
        self._config, self._spec, self._engine = config, spec, engine
        self._ids = itertools.count(len(spec.adapters))  # after the ids of the checkpoint's own adapters
        self._lock = Lock()
        self._loaded: dict[str, LoadedAdapter] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def digest(self, name: str) -> str:
        """Return the digest of an adapter's files; empty for the checkpoint's own adapters."""
        return "" if name in self._spec.adapters else self._find(name).digest

    def load(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load an adapter from a folder or a hub id. Blocks until the engine has loaded it.

        `replace` replaces a loaded adapter of the same name. Running calls finish with the old adapter.
        """
        spec = self._spec
        if not self._config.enable_lora:
            raise NotPossible(f"model {spec.name} takes no LoRA adapters; {ENABLE}")
        if not name or name in spec.adapters:
            why = f"model {spec.name} has an adapter of its own with this name" if name else "it is empty"
            raise BadValue(f"an adapter cannot be called {shown(name)}: {why}", param="name")
        if name in self._loaded and not replace:
            raise BadValue(f"adapter {shown(name)} is loaded already; set replace=True", param="name")
        folder = find_adapter(path, download_dir=self._config.download_dir)
        check_folder(folder, spec)
        adapter = LoadedAdapter(next(self._ids), name, adapter_digest(folder))
        try:
            self._engine.load_adapter(adapter.id, str(folder), name).result()
            if adapter_digest(folder) != adapter.digest:
                raise BadValue(
                    f"the files of adapter {shown(name)} changed while they were read", param="path"
                )
        except BaseException:
            self._engine.unload_adapter(adapter.id)
            raise
        with self._lock:
            old, self._loaded[name] = self._loaded.get(name), adapter
            if old is not None:
                self._retire(old)

    def unload(self, name: str) -> None:
        """Unload an adapter. Running calls that use it finish."""
        with self._lock:
            adapter = self._find(name)
            del self._loaded[name]
            self._retire(adapter)

    @contextmanager
    def hold(self, name: str) -> Iterator[int]:
        """Yield the id of an adapter. The adapter stays loaded until the block ends."""
        with self._lock:
            adapter = self._find(name)
            adapter.num_users += 1
        try:
            yield adapter.id
        finally:
            with self._lock:
                adapter.num_users -= 1
                self._unload_unused(adapter)

    def _find(self, name: str) -> LoadedAdapter:
        if (found := self._loaded.get(name)) is not None:
            return found
        model, own = self._spec.name, self._spec.adapters
        if not self._config.enable_lora:
            if own:
                raise BadValue(
                    f"adapter {shown(name)} is unknown; model {model} has: {', '.join(own)}", param="adapter"
                )
            raise NotPossible(f"model {model} has no adapters; {ENABLE} to load some", param="adapter")
        loaded = ", ".join((*own, *self._loaded)) or "none; use load_adapter"
        raise AdapterNotFound(
            f"adapter {shown(name)} is not loaded; model {model} has: {loaded}", param="adapter"
        )

    def _retire(self, adapter: LoadedAdapter) -> None:
        adapter.is_retired = True
        self._unload_unused(adapter)

    def _unload_unused(self, adapter: LoadedAdapter) -> None:
        if adapter.is_retired and adapter.num_users == 0:
            self._engine.unload_adapter(adapter.id)

"""The supervisor's view of the server's models, each with its own engine processes."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.checkpoint.spec import ModelSpec
from penstock.config import ModelConfig, ServerConfig
from penstock.errors import ConfigError
from penstock.serving.adapters import initial_adapters, own_modules
from penstock.serving.child import Child
from penstock.serving.control import Link, ModelTable
from penstock.serving.engines import ManagedEngine
from penstock.serving.launch import AdapterLaunch, ModelLaunch
from penstock.serving.placement import Placement


class ManagedModel:
    """A model and its engines."""

    def __init__(
        self,
        number: int,
        config: ModelConfig,
        spec: ModelSpec,
        server: ServerConfig,
        folder: Path,
        engines: Sequence[tuple[Child, Placement]],
    ) -> None:
        self.config = config
        self.spec = spec
        self.folder = folder / str(number)
        self.folder.mkdir()
        device = config.engine.device
        self.engines = tuple(
            ManagedEngine(index, child, placement, device, server, self.folder)
            for index, (child, placement) in enumerate(engines)
        )
        # After the ids of the checkpoint's own adapters.
        self._adapter_ids = itertools.count(len(spec.adapters))
        adapters = initial_adapters(config.engine, spec, self.next_adapter_id)
        addresses = tuple(each.address for each in self.engines)
        self.launch = ModelLaunch(number, config, spec, addresses, adapters)
        self.started_s = time.monotonic()
        self.is_leaving = False  # it is being unloaded: its engines are not restarted
        self.has_been_ready = False  # an engine has served it with its initial adapters

    @property
    def number(self) -> int:
        return self.launch.number

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_ready(self) -> bool:
        """Whether all engines are ready."""
        return all(each.is_ready for each in self.engines)

    @property
    def last_used_s(self) -> float:
        """When an engine last received or answered a request, or was started."""
        return max(max(each.status.read().last_request_s, each.started_s) for each in self.engines)

    def next_adapter_id(self) -> int:
        """Return a new adapter id. Ids are never reused."""
        return next(self._adapter_ids)

    def adapter(self, name: str) -> AdapterLaunch | None:
        """Find the adapter with this name."""
        return next((each for each in self.launch.adapters if each.name == name), None)

    def set_adapters(self, adapters: tuple[AdapterLaunch, ...]) -> None:
        """Replace the adapters in the next table and in engine processes that start from now on."""
        self.launch = msgspec.structs.replace(self.launch, adapters=adapters)
        for engine in self.engines:
            engine.set_adapters(adapters)

    def describe_engine(self, engine: ManagedEngine) -> str:
        """How messages name an engine."""
        return self.name if len(self.engines) == 1 else f"engine {engine.index} of {self.name}"

    def remove_files(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class ModelSet:
    """The models of the server, in order. All their names differ."""

    def __init__(self) -> None:
        self._models: dict[int, ManagedModel] = {}
        self._numbers = itertools.count()
        self.version = 0  # version of the table that is sent to API processes

    def __iter__(self) -> Iterator[ManagedModel]:
        return iter(list(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    def next_number(self) -> int:
        return next(self._numbers)

    def add(self, model: ManagedModel) -> None:
        self._models[model.number] = model
        self.version += 1

    def remove(self, model: ManagedModel) -> None:
        if self._models.pop(model.number, None) is not None:
            self.version += 1

    def changed(self) -> int:
        """Record that a model has changed. Returns the version of the next table."""
        self.version += 1
        return self.version

    def engines(self) -> Iterator[tuple[ManagedModel, ManagedEngine]]:
        """Every engine, with its model."""
        return ((model, engine) for model in self for engine in model.engines)

    def engine_of(self, link: Link) -> tuple[ManagedModel, ManagedEngine] | None:
        """Find the engine at the other end of a link."""
        return next((each for each in self.engines() if each[1].link is link), None)

    def get(self, number: int) -> ManagedModel | None:
        return self._models.get(number)

    def find(self, name: str) -> ManagedModel | None:
        """Find a model by name or alias."""
        return next((each for each in self if name in each.launch.names), None)

    def check_names(self, config: ModelConfig, spec: ModelSpec) -> None:
        """Refuse a model if its names or its adapters' names are already taken."""
        own = {spec.name, *config.engine.model_names[1:], *config.aliases}
        for other in self:
            if clash := own.intersection(other.launch.names):
                raise ConfigError(
                    f"two models have the name {min(clash)!r}; give one another with served_model_name",
                    param="served_model_name",
                )
            if clash := own.intersection(each.name for each in other.launch.adapters):
                raise ConfigError(
                    f"an adapter of {other.name} has the name {min(clash)!r}; give the model another with "
                    "served_model_name",
                    param="served_model_name",
                )
        taken = {name for other in self for name in other.launch.names}
        if clash := taken.intersection(each.name for each in own_modules(config.engine, spec)):
            raise ConfigError(
                f"--lora-modules: a model has the name {min(clash)!r}; give the adapter another",
                param="lora_modules",
            )

    def table(self) -> ModelTable:
        return ModelTable(self.version, tuple(each.launch for each in self))


def mark_dead(pid: int) -> None:
    """Drop the Prometheus gauges of a process that has exited."""
    from prometheus_client.multiprocess import mark_process_dead  # late: the server starts without it

    mark_process_dead(pid)

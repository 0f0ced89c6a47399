"""The models of a server, as the supervisor holds them: each has an engine process of its own."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from penstock.checkpoint.spec import ModelSpec
from penstock.config import ModelConfig, ServerConfig
from penstock.errors import ConfigError
from penstock.serving.child import Child
from penstock.serving.control import Link, ModelTable
from penstock.serving.launch import EngineLaunch, EngineState, ModelLaunch, Parent
from penstock.wire.liveness import HangLimits, LivenessWatch
from penstock.wire.status import EngineSleep, StatusReader, create_status_page


class ManagedModel:
    """A model, its engine process, and what the supervisor knows about both."""

    def __init__(
        self,
        number: int,
        config: ModelConfig,
        spec: ModelSpec,
        child: Child,
        server: ServerConfig,
        folder: Path,
    ) -> None:
        self.config = config
        self.spec = spec
        self.child = child
        self.folder = folder / str(number)
        self.folder.mkdir()
        self._state_file, status_file = self.folder / "engine.json", self.folder / "engine.status"
        create_status_page(status_file)
        self.status = StatusReader(status_file)
        self.watch = LivenessWatch(
            HangLimits.for_replacing(server.engine_hang_timeout_s, server.engine_step_timeout_s)
        )
        self.launch = ModelLaunch(
            number=number,
            config=config,
            spec=spec,
            address=f"ipc://{self.folder}/engine",
            state_file=str(self._state_file),
            status_file=str(status_file),
        )
        self.started_s = time.monotonic()
        self.is_launched = False  # the engine process has its configuration
        self.is_ready = False  # the engine serves, and every API process is connected to it
        self.is_leaving = False  # it is unloaded: its engine is not restarted
        self.failure = ""  # why its engine could not load it
        self.link: Link | None = None  # to its engine
        self.device = config.engine.device  # as the engine resolved it, once it is attached
        self.write_state("starting", "the engine is loading the model")

    @property
    def number(self) -> int:
        return self.launch.number

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def engine_pid(self) -> int:
        return self.child.process.pid if self.child.process is not None else 0

    @property
    def serves(self) -> bool:
        """Whether the present engine process has said that it serves."""
        return self.engine_pid != 0 and self.status.read().pid == self.engine_pid

    @property
    def sleep_state(self) -> EngineSleep:
        return self.status.read().sleep_state

    def configure(
        self,
        server: ServerConfig,
        metrics_folder: Path,
        parent: Parent,
        control: Path,
        kv_share: float | None,
    ) -> None:
        """Set what the engine process reads when it starts."""
        self.child.config = msgspec.json.encode(
            EngineLaunch(
                engine=self.config.engine,
                spec=self.spec,
                address=self.launch.address,
                log_level=server.log_level,
                log_format=server.log_format,
                shared_memory_mb=server.shared_memory_mb,
                metrics_folder=str(metrics_folder),
                status_file=self.launch.status_file,
                parent=parent,
                control=str(control),
                model=self.number,
                kv_share=kv_share,
                wake_timeout_s=server.wake_timeout_s,
            )
        )

    def write_state(self, state: Literal["starting", "running", "restarting"], detail: str) -> None:
        """Tell API processes why the engine can or cannot serve."""
        draft = self._state_file.with_suffix(".part")
        draft.write_bytes(msgspec.json.encode(EngineState(state, detail, self.child.num_restarts)))
        draft.replace(self._state_file)

    def remove_files(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class ModelSet:
    """The models of the server, in order, under names that differ."""

    def __init__(self) -> None:
        self._models: dict[int, ManagedModel] = {}
        self._numbers = itertools.count()
        self.version = 0  # of the table that API processes apply

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

    def get(self, number: int) -> ManagedModel | None:
        return self._models.get(number)

    def find(self, name: str) -> ManagedModel | None:
        """The model of this name or alias."""
        return next((each for each in self if name in each.launch.names), None)

    def check_names(self, config: ModelConfig, spec: ModelSpec) -> None:
        """Refuse a model one of whose names another has."""
        own = {spec.name, *config.engine.model_names[1:], *config.aliases}
        for other in self:
            if clash := own.intersection(other.launch.names):
                raise ConfigError(
                    f"two models have the name {min(clash)!r}; give one another with served_model_name",
                    param="served_model_name",
                )

    def table(self) -> ModelTable:
        return ModelTable(self.version, tuple(each.launch for each in self))


def mark_dead(pid: int) -> None:
    """Drop the gauges of a process that has exited."""
    from prometheus_client.multiprocess import mark_process_dead  # late: the server starts without it

    mark_process_dead(pid)

"""The supervisor's view of an engine: its process, its files and its state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import msgspec

from penstock.checkpoint.spec import ModelSpec
from penstock.config import ModelConfig, ServerConfig
from penstock.serving.child import Child
from penstock.serving.control import Link
from penstock.serving.launch import AdapterLaunch, EngineAddress, EngineLaunch, EngineState, Parent
from penstock.serving.placement import Placement
from penstock.wire.liveness import HangLimits, LivenessWatch
from penstock.wire.status import EngineSleep, StatusReader, create_status_page


class ManagedEngine:
    """One of the engines of a model."""

    def __init__(
        self, index: int, child: Child, placement: Placement, device: str, server: ServerConfig, folder: Path
    ) -> None:
        """`device` is the device in the model's settings; `folder` is the model's folder."""
        self.index = index
        self.child = child
        self.placement = placement
        name = f"engine{index or ''}"
        self._state_file, status_file = folder / f"{name}.json", folder / f"{name}.status"
        create_status_page(status_file)
        self.status = StatusReader(status_file)
        self.watch = LivenessWatch(
            HangLimits.for_replacing(server.engine_hang_timeout_s, server.engine_step_timeout_s)
        )
        self.address = EngineAddress(f"ipc://{folder}/{name}", str(self._state_file), str(status_file))
        self.started_s = time.monotonic()
        self.is_launched = False  # the process was sent its configuration
        self.is_ready = False  # it serves and every API process is connected to it
        self.launch: EngineLaunch | None = None  # configuration of the next process
        self.failure = ""  # the reason, if it could not load the model
        self.link: Link | None = None
        # Replaced by the resolved device when the engine attaches.
        self.device = placement.devices[0] if placement.devices else device
        self.write_state("starting", "the engine is loading the model")

    @property
    def pid(self) -> int:
        return self.child.process.pid if self.child.process is not None else 0

    @property
    def serves(self) -> bool:
        """Whether the current process has reported on its status page that it serves."""
        return self.pid != 0 and self.status.read().pid == self.pid

    @property
    def sleep_state(self) -> EngineSleep:
        return self.status.read().sleep_state

    @property
    def devices(self) -> frozenset[str]:
        """The devices on which the engine allocates memory."""
        return frozenset(self.placement.devices or (self.device,))

    def configure(
        self,
        config: ModelConfig,
        spec: ModelSpec,
        server: ServerConfig,
        *,
        metrics_folder: Path,
        parent: Parent,
        control: Path,
        model: int,
        kv_share: float | None,
    ) -> None:
        """Set the configuration that the process reads when it starts."""
        self.launch = EngineLaunch(
            engine=config.engine,
            spec=spec,
            address=self.address.socket,
            log_level=server.log_level,
            log_format=server.log_format,
            shared_memory_mb=server.shared_memory_mb,
            metrics_folder=str(metrics_folder),
            status_file=self.address.status_file,
            parent=parent,
            control=str(control),
            model=model,
            kv_share=kv_share,
            wake_timeout_s=server.wake_timeout_s,
            index=self.index,
            devices=self.placement.devices,
            cpus=self.placement.cpus,
        )
        self.child.config = msgspec.json.encode(self.launch)

    def set_adapters(self, adapters: tuple[AdapterLaunch, ...]) -> None:
        """Set the adapters that the next process loads before it serves."""
        if self.launch is not None:
            self.launch = msgspec.structs.replace(self.launch, adapters=adapters)
            self.child.config = msgspec.json.encode(self.launch)

    def write_state(self, state: Literal["starting", "running", "restarting"], detail: str) -> None:
        """Write the state file, from which API processes read why the engine can or cannot serve."""
        draft = self._state_file.with_suffix(".part")
        draft.write_bytes(msgspec.json.encode(EngineState(state, detail, self.child.num_restarts)))
        draft.replace(self._state_file)

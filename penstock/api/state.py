"""What an API process holds: the served models, the limits, and how many requests are under way."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.checkpoint.spec import ModelSpec
from penstock.config import ServerConfig
from penstock.errors import ModelNotFound, QueueFull
from penstock.inputs.batcher import BatchTokenizer
from penstock.inputs.generation import TextInputs
from penstock.inputs.processor import InputProcessor
from penstock.serving.launch import EngineState
from penstock.wire.client import EngineClient


@dataclass(slots=True)
class ServedModel:
    spec: ModelSpec
    processor: InputProcessor
    tokenizer: BatchTokenizer
    client: EngineClient
    created_s: int
    text: TextInputs | None = None  # of models that generate; made when first asked for


@dataclass(slots=True)
class ServerState:
    config: ServerConfig
    models: dict[str, ServedModel]
    index: int = 0  # which API process this is
    in_flight: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def next_id(self) -> str:
        """An id that no other request of this server has."""
        return f"{self.index}-{next(self._numbers)}"

    def model(self, name: str | None) -> ServedModel:
        """The model of this name; without a name, the first."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise ModelNotFound(
                f"there is no model {name!r} here; this server has: {', '.join(self.models)}", param="model"
            )
        return self.models[name]

    def admit(self) -> None:
        """Take a place, before any work is spent; the caller gives it back with `leave`."""
        if self.in_flight >= self.config.max_concurrent_requests:
            raise QueueFull(f"{self.in_flight} requests are under way, which is the limit; try again shortly")
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1

    @property
    def ready(self) -> bool:
        return all(model.client.ready for model in self.models.values())


def engine_reason(state_file: Path) -> str:
    """The supervisor's words on why the engine is not there."""
    try:
        return msgspec.json.decode(state_file.read_bytes(), type=EngineState).detail
    except (OSError, msgspec.DecodeError):
        return "the engine is not running"

"""What an API process holds: the served models, the limits, and the number of requests in flight."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.api.admission import Admission
from penstock.api.observer import RequestObserver, observer_for
from penstock.checkpoint.spec import ModelSpec
from penstock.config import ServerConfig
from penstock.errors import EngineUnavailable, ModelNotFound, ServerFull, TooManyRequests, shown
from penstock.handle import EngineHandle
from penstock.serving.launch import EngineState
from penstock.tasks.model import TextModel

PROMPT_KINDS = ("query", "document")  # that NAME:KIND asks for
DEFAULT_TAG = "latest"  # that some clients add to every name
NO_NAME = "dummy"  # what huggingface_hub sends where its user names no model


@dataclass(slots=True)
class ServedModel:
    text: TextModel
    engine: EngineHandle
    created_s: int
    admission: Admission = field(default_factory=Admission)

    @property
    def spec(self) -> ModelSpec:
        return self.text.spec


@dataclass(slots=True)
class BufferedBytes:
    """Bytes of request bodies and large answers that this process holds for its clients."""

    limit: int
    held: int = 0

    def full(self) -> ServerFull:
        return ServerFull(
            f"the server holds {self.held} bytes of requests and answers; --max-buffered-mb limits them to "
            f"{self.limit}; try again shortly"
        )


@dataclass(slots=True)
class ServerState:
    config: ServerConfig
    models: dict[str, ServedModel]
    aliases: dict[str, str] = field(default_factory=dict)  # other names of models
    in_flight: int = 0
    buffered: BufferedBytes = field(init=False)
    observer: RequestObserver | None = field(init=False)  # None: requests are neither traced nor logged
    # A successor of this process counts from 0 again, while the engine may still run our requests.
    _name: str = field(default_factory=lambda: secrets.token_hex(4))
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.buffered = BufferedBytes(self.config.max_buffered_bytes)
        self.observer = observer_for(self.config)

    def next_id(self) -> str:
        """An id that no other request of this server has, also not one of a process that has exited."""
        return f"{self._name}-{next(self._numbers)}"

    @property
    def names(self) -> list[str]:
        """Every name that a request may use, of all models."""
        return [*self.models, *self.aliases]

    def find(self, name: str | None) -> tuple[ServedModel, str | None]:
        """The model of this name; without a name, the first. `NAME:PROMPT` names a prompt too."""
        if name is None or name == "":
            return next(iter(self.models.values())), None
        if (model := self._named(name)) is not None:
            return model, None
        if name == NO_NAME:
            return next(iter(self.models.values())), None
        base, _, prompt = name.rpartition(":")
        if (model := self._named(base)) is not None:
            if prompt == DEFAULT_TAG:
                return model, None
            if prompt in PROMPT_KINDS or prompt in model.spec.prompts:
                return model, prompt
        if self.config.any_model_name:
            return next(iter(self.models.values())), None
        raise ModelNotFound(
            f"model {shown(name)} is not served here; this server has: {', '.join(self.names)}",
            param="model",
        )

    def _named(self, name: str) -> ServedModel | None:
        return self.models.get(self.aliases.get(name, name))

    def admit(self) -> None:
        """Count a request in, once its body is read and before other work; `release` counts it out."""
        self.check_room()
        self.in_flight += 1

    def check_room(self) -> None:
        """Refuse a request if as many as allowed are in flight."""
        if self.in_flight >= self.config.max_concurrent_requests:
            raise TooManyRequests(
                f"{self.in_flight} requests are in flight, which is the limit; try again shortly"
            )

    def release(self) -> None:
        self.in_flight -= 1

    def check_engines(self) -> None:
        """Raise with the reason if an engine cannot serve."""
        for model in self.models.values():
            if not model.engine.ready:
                raise EngineUnavailable(model.engine.unavailable_reason)

    @property
    def ready(self) -> bool:
        return all(model.engine.ready for model in self.models.values())


def engine_reason(state_file: Path) -> str:
    """Why the engine is not running, as the supervisor recorded it."""
    try:
        return msgspec.json.decode(state_file.read_bytes(), type=EngineState).detail
    except (OSError, msgspec.DecodeError):
        return "the engine is not running"

"""What an API process holds: the served models, the limits, and the number of requests in flight."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from penstock.api.adapters import Adapters, ServedAdapter
from penstock.api.admission import Admission
from penstock.api.default_model import Use, choose
from penstock.api.keys import KeyRing
from penstock.api.observer import RequestObserver, observer_for
from penstock.api.result_cache import ResultCache
from penstock.backlog import max_queued_of
from penstock.checkpoint.spec import ModelSpec
from penstock.config import ServerConfig
from penstock.errors import (
    AdapterNotFound,
    BadValue,
    EngineUnavailable,
    ModelNotFound,
    NotPossible,
    ServerFull,
    TooManyRequests,
    shown,
)
from penstock.handle import EngineHandle
from penstock.inputs.images.loader import ImageLoader, image_loader
from penstock.serving.control import Action, OrderAnswer
from penstock.serving.launch import EngineState
from penstock.tasks.model import TextModel
from penstock.wire.group import EngineGroup
from penstock.wire.status import EngineSleep, StatusPage

if TYPE_CHECKING:
    from penstock.api.batch_service import BatchService

PROMPT_KINDS = ("query", "document")  # KIND in a model name NAME:KIND
DEFAULT_TAG = "latest"  # suffix that some clients add to every name
NO_NAME = "dummy"  # sent by huggingface_hub if its user names no model


@dataclass(slots=True)
class ServedModel:
    text: TextModel
    engine: EngineHandle
    created_s: int
    admission: Admission = field(default_factory=Admission)
    auto_truncate: bool | None = None  # None: the value of `ServerConfig` applies
    default_chunking: Literal["none", "mean"] | None = None
    number: int = 0  # identifies the model to the supervisor
    aliases: tuple[str, ...] = ()
    status: StatusPage | None = None  # published by the engines; None: not published
    state_files: tuple[Path, ...] = ()  # where the supervisor writes why each engine cannot serve
    takes_adapters: bool = False  # LoRA adapters may be loaded
    adapters: Adapters = field(default_factory=dict)  # loaded adapters, by name
    adapter: ServedAdapter | None = None  # chosen by a request

    @property
    def spec(self) -> ModelSpec:
        return self.text.spec

    @property
    def name(self) -> str:
        """The model's name in answers: the name of the adapter that a request has chosen, if any."""
        return self.spec.name if self.adapter is None else self.adapter.name

    @property
    def full_name(self) -> str:
        """A name that is unique among all models and their adapters."""
        return self.spec.name if self.adapter is None else f"{self.spec.name}:{self.adapter.name}"

    def with_adapter(self, adapter: ServedAdapter) -> ServedModel:
        """The same model for a request that has chosen an adapter."""
        return replace(self, adapter=adapter)

    def find_adapter(self, name: str, param: str = "adapter") -> ServedAdapter:
        """The adapter of this name. The error lists the known adapters, or says how to load some."""
        if (found := self.adapters.get(name)) is not None:
            return found
        model, own = self.spec.name, self.spec.adapters
        if not self.takes_adapters:
            if own:
                raise BadValue(
                    f"adapter {shown(name)} is unknown; model {model} has: {', '.join(own)}", param=param
                )
            raise NotPossible(
                f"model {model} has no adapters; start the server with --enable-lora to load some",
                param=param,
            )
        loaded = ", ".join((*own, *self.adapters)) or "none; load it with POST /v1/load_lora_adapter"
        raise AdapterNotFound(
            f"adapter {shown(name)} is not loaded; model {model} has: {loaded}", param=param
        )

    @property
    def engines_ready(self) -> list[bool]:
        """For each engine, whether it can serve."""
        if isinstance(self.engine, EngineGroup):
            return self.engine.engines_ready
        return [self.engine.ready]

    @property
    def state(self) -> ModelState:
        """Whether requests are served at once, after the model wakes up, or not at all."""
        if not self.engine.ready:
            return "starting" if self.is_starting else "restarting"
        if self.status is None:
            return "awake"
        return SLEEP_STATES[self.status.read().sleep_state]

    @property
    def is_starting(self) -> bool:
        """Whether the model has never been served since it was loaded."""
        if self.engine.ready:
            return False
        return all(read_state(file).state == "starting" for file in self.state_files)


ModelState = Literal["awake", "falling asleep", "asleep", "waking", "starting", "restarting"]
SLEEP_STATES: dict[EngineSleep, ModelState] = {
    EngineSleep.AWAKE: "awake",
    EngineSleep.FALLING_ASLEEP: "falling asleep",
    EngineSleep.ASLEEP: "asleep",
    EngineSleep.WAKING: "waking",
}


@dataclass(slots=True)
class BufferedBytes:
    """Bytes of request bodies and large answers that this process holds for its clients."""

    limit: int
    held: int = 0

    def has_room(self, size: int, *, is_for_operators: bool) -> bool:
        """Whether an answer of `size` bytes may be held. Answers for operators, such as metrics, may
        exceed the limit by an eighth: they are needed most when clients use up the limit."""
        spare = self.limit // 8 if is_for_operators else 0
        return self.held + size <= self.limit + spare

    def full(self) -> ServerFull:
        return ServerFull(
            f"the server holds {self.held} bytes of requests and answers; --max-buffered-mb limits them to "
            f"{self.limit}; try again shortly"
        )


class Found(NamedTuple):
    """The meaning of a model name in a request."""

    model: ServedModel  # with the adapter that the name chooses
    prompt: str | None = None
    own_adapter: str | None = None  # one of the checkpoint's own


class ModelFollower(Protocol):
    """Follows the supervisor's table of models."""

    async def start(self) -> None:
        """Connect to the supervisor."""

    async def close(self) -> None: ...

    async def order(
        self, action: Action, model: str, *, level: int | None = None, settings: dict[str, Any] | None = None
    ) -> OrderAnswer:
        """Have the supervisor carry out an order for a model."""


@dataclass(slots=True)
class ServerState:
    config: ServerConfig
    models: dict[str, ServedModel]
    aliases: dict[str, str] = field(default_factory=dict)  # other names of models
    follower: ModelFollower | None = None  # takes orders to change the models; None: they cannot be changed
    batches: BatchService | None = None  # None: the server has no --batch-folder
    in_flight: int = 0
    held: dict[str, int] = field(default_factory=dict)  # requests in flight, by client
    images: ImageLoader = field(init=False)
    buffered: BufferedBytes = field(init=False)
    observer: RequestObserver | None = field(init=False)  # None: requests are neither traced nor logged
    keys: KeyRing = field(init=False)
    watched: list[Callable[[], None]] = field(init=False)  # functions that reload changed files
    result_cache: ResultCache | None = field(init=False)  # None: every row is computed
    # A random prefix of request ids. A successor of this process counts from 0 again, while the engine may
    # still run requests of this process.
    _name: str = field(default_factory=lambda: secrets.token_hex(4))
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.buffered = BufferedBytes(self.config.max_buffered_bytes)
        self.images = image_loader(self.config)
        self.observer = observer_for(self.config)
        self.keys = KeyRing(self.config)
        self.watched = [self.keys.reload] if self.keys.has_files else []
        self.result_cache = ResultCache.of(self.config)
        for model in self.models.values():
            self._settle(model)

    def serve_models(self, models: Sequence[ServedModel]) -> None:
        """Serve these models, in this order, and no others."""
        for model in models:
            self._settle(model)
        self.models = {model.spec.name: model for model in models}
        self.aliases = {alias: model.spec.name for model in models for alias in model.aliases}

    def _settle(self, model: ServedModel) -> None:
        """Fill in the server's settings if the model has none of its own."""
        if model.auto_truncate is None:
            model.auto_truncate = self.config.auto_truncate
        if model.default_chunking is None:
            model.default_chunking = self.config.default_chunking

    def next_id(self) -> str:
        """A request id that is unique in this server, even among processes that have exited."""
        return f"{self._name}-{next(self._numbers)}"

    @property
    def names(self) -> list[str]:
        """Every name that a request may use, of all models and adapters."""
        return [*self.models, *self.aliases, *self.adapter_names]

    @property
    def adapter_names(self) -> dict[str, ServedModel]:
        """The adapters with their models. An adapter whose name several models have is listed as
        MODEL:NAME."""
        pairs = [(model, each) for model in self.models.values() for each in model.adapters.values()]
        count = Counter(adapter.name for _, adapter in pairs)
        chosen = ((model.with_adapter(adapter), count[adapter.name] > 1) for model, adapter in pairs)
        return {each.full_name if is_shared else each.name: each for each, is_shared in chosen}

    def find(self, name: str | None, use: Use | None = None) -> Found:
        """The model of this name; without a name, the one that suits the use. The name of an adapter, alone
        or as `MODEL:ADAPTER`, chooses the adapter. A suffix `:PROMPT` chooses a prompt."""
        if name is None or name == "":
            if len(self.models) == 1:
                return Found(next(iter(self.models.values())))
            return Found(self.default(use))
        if (found := self._lookup(name)) is not None:
            return found
        if name == NO_NAME or self.config.any_model_name:
            return Found(self.default(use))
        raise self._not_found(name)

    def _lookup(self, name: str, num_suffixes: int = 2) -> Found | None:
        if (model := self._named(name)) is not None:
            return Found(model)
        if (found := self._adapter_named(name)) is not None:
            return found
        base, _, suffix = name.rpartition(":")
        if not base or not num_suffixes or (found := self._lookup(base, num_suffixes - 1)) is None:
            return None
        return _with_suffix(found, suffix)

    def _adapter_named(self, name: str) -> Found | None:
        holders = [model for model in self.models.values() if name in model.adapters]
        if len(holders) > 1:
            choices = ", ".join(f"{model.spec.name}:{name}" for model in holders)
            raise BadValue(
                f"several models have an adapter {shown(name)}; use one of {choices}", param="model"
            )
        return Found(holders[0].with_adapter(holders[0].adapters[name])) if holders else None

    def default(self, use: Use | None = None, among: Sequence[ServedModel] | None = None) -> ServedModel:
        """The model for requests that name none; one of `among` if the client may not use all models."""
        models = list(self.models.values()) if among is None else among
        if not models:
            raise EngineUnavailable("this server has no model yet")
        return models[choose((model.spec for model in models), use) if len(models) > 1 else 0]

    def named(self, name: str) -> ServedModel:
        """The model with exactly this name or alias, because an order must not reach another one."""
        if (model := self._named(name)) is None:
            raise self._not_found(name)
        return model

    def _not_found(self, name: str) -> ModelNotFound:
        base, _, suffix = name.rpartition(":")
        if (model := self._named(base)) is not None and model.takes_adapters:
            model.find_adapter(suffix, "model")  # raises
        return ModelNotFound(
            f"model {shown(name)} is not served here; this server has: {', '.join(self.names)}",
            param="model",
        )

    def _named(self, name: str) -> ServedModel | None:
        return self.models.get(self.aliases.get(name, name))

    def admit(self, client: str = "") -> None:
        """Count a request as in flight until `release`. Called once its body is read, before other work."""
        if self.in_flight >= self.config.max_concurrent_requests:
            self.check_room(client)
        self.in_flight += 1
        held = self.held
        held[client] = held.get(client, 0) + 1

    def check_room(self, client: str = "") -> None:
        """Refuse a request if the limit of requests in flight is reached and its client already has its
        share."""
        limit = self.config.max_concurrent_requests
        if self.in_flight >= limit:
            limit = max_queued_of(limit, self.in_flight, self.held.get(client, 0), len(self.held))
            if self.in_flight >= limit:
                raise TooManyRequests(
                    f"{self.in_flight} requests are in flight, which is the limit; try again shortly"
                )

    def release(self, client: str = "") -> None:
        self.in_flight -= 1
        left = self.held[client] - 1
        if left:
            self.held[client] = left
        else:
            del self.held[client]

    def check_engines(self) -> None:
        """Raise with the reason unless requests are served: every model has finished its first start, and at
        least one can serve."""
        for model in self.models.values():
            if model.is_starting:
                raise EngineUnavailable(model.engine.unavailable_reason)
        if not any(model.engine.ready for model in self.models.values()):
            reasons = (model.engine.unavailable_reason for model in self.models.values())
            raise EngineUnavailable(next(reasons, "this server has no model yet"))

    @property
    def ready(self) -> bool:
        try:
            self.check_engines()
        except EngineUnavailable:
            return False
        return True


def _with_suffix(found: Found, suffix: str) -> Found | None:
    """Resolve `:SUFFIX` to a prompt or an adapter. An adapter cannot have the name of a prompt."""
    model = found.model
    if found.prompt is not None:
        return None
    if suffix == DEFAULT_TAG:
        return found
    if suffix in PROMPT_KINDS or suffix in model.spec.prompts:
        return found._replace(prompt=suffix)
    if model.adapter is None and found.own_adapter is None:
        if suffix in model.adapters:
            return Found(model.with_adapter(model.adapters[suffix]))
        if suffix in model.spec.adapters:
            return Found(model, own_adapter=suffix)
    return None


def read_state(state_file: Path) -> EngineState:
    """What the supervisor has recorded about an engine."""
    try:
        return msgspec.json.decode(state_file.read_bytes(), type=EngineState)
    except (OSError, msgspec.DecodeError):
        return EngineState("starting", "the engine is not running")


def engine_reason(state_file: Path) -> str:
    """Why the engine cannot be reached."""
    found = read_state(state_file)
    if found.state == "running":  # the supervisor has not noticed yet that the engine process has exited
        return "the engine is not connected; try again shortly"
    return found.detail

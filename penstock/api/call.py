"""One HTTP request as a handler sees it, and the reply that it gives."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.api.adapters import ServedAdapter
from penstock.api.body import Body as ReplyBody
from penstock.api.default_model import Use
from penstock.api.error_styles import ErrorStyle
from penstock.api.keys import ApiKey
from penstock.api.metrics import ApiMetrics
from penstock.api.result_cache import CacheControl
from penstock.api.state import Found, ServedModel, ServerState
from penstock.api.tracing import RequestTrace
from penstock.errors import BadValue, ModelNotAllowed, ModelNotFound, NotPossible, shown

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
_TIME_HEADERS = (b"x-tokenize-ms", b"x-queue-ms", b"x-device-ms", b"x-total-ms")
_TIME_LINES = b"".join(b"%b: %%.3f\r\n" % name for name in _TIME_HEADERS)
_MAX_IGNORED_CHARS = 1024  # of the header that names ignored fields


@dataclass(slots=True)
class Reply:
    body: ReplyBody
    content_type: bytes = JSON
    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class Streamed:
    """A reply whose body is sent in pieces. The first piece exists already, so an earlier failure could still
    set the status."""

    first: bytes
    rest: AsyncGenerator[bytes, None]
    content_type: bytes = EVENTS
    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


async def streamed(pieces: AsyncGenerator[bytes, None]) -> Streamed:
    """Wait for the first piece; an error before it fails the whole reply."""
    return Streamed(await anext(pieces), pieces)


class Call:
    """One HTTP request as a handler sees it, and its timings. Most attributes keep the class's defaults."""

    body_bytes: int = 0
    num_patches: int = 0  # image patches of the request
    request_id: str | None = None
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    device_s: float = 0.0
    encode_s: float = 0.0
    errors: ErrorStyle | None = None  # of the body's dialect, if it is not the route's
    ignored_fields: tuple[str, ...] = ()
    num_truncated: int = 0  # rows that were cut to fit
    cache_control: CacheControl = CacheControl.DEFAULT
    num_cached_rows: int | None = None  # answered by the result cache; None: it was not used
    path_value: str = ""  # the value of the path's parameter
    model_name: str = ""  # empty until it is known
    adapter_name: str = ""  # the last LoRA adapter that was chosen
    num_rows: int = 0
    num_tokens: int = 0
    num_generated: int = 0  # tokens
    status: int = 0  # HTTP status for metrics; 0 until the request has ended
    error_code: str = ""
    is_streamed: bool = False
    trace: RequestTrace | None = None  # None: not traced
    shown_body: str = ""  # with --log-inputs
    use: Use | None = None  # what the route does with a model
    query_string: bytes = b""  # set for routes without a body
    key: ApiKey | None = None  # sent by the client; None: the route or the server needs none
    client: str = ""  # who sent it, see `client_of`
    is_background: bool = False  # a line of a batch, which waits for as long as it takes
    # LoRA adapters in use, each with its model. Engines keep them until the request is done.
    adapters: tuple[tuple[str, ServedAdapter], ...] = ()

    def __init__(self, state: ServerState, metrics: ApiMetrics, began_s: float) -> None:
        self.state = state
        self.metrics = metrics
        self.began_s = began_s

    @property
    def weight(self) -> float:
        """The client's share of the device, compared to other clients."""
        return 1.0 if self.key is None else self.key.weight

    @property
    def light_weight(self) -> float:
        """The weight of a client that has no other request in flight; 0 for one that has."""
        return self.weight if self.state.held.get(self.client, 0) <= 1 else 0.0

    def work_size(self, kind: str) -> tuple[str, int]:
        """A name for requests of similar bodies, and the bytes from which their tokens are estimated. For
        images these are computed from patches, because an image's bytes say nothing about its tokens."""
        return (f"{kind} with images", 4 * self.num_patches) if self.num_patches else (kind, self.body_bytes)

    def model(self, body: Any, *, may_truncate: bool = True) -> ServedModel:
        """The model that a body names. Sets in the body a prompt that the name chooses and, if the body
        leaves it open, the server's default for long texts."""
        state = self.state
        name: str | None = body.model
        if name or self.key is not None or len(state.models) != 1:
            model = state.models.get(name or "")  # nearly always its own name
        else:
            model = next(iter(state.models.values()))
        asked = getattr(body, "adapter", None)
        if model is None or asked is not None:
            model = self._chosen(body, asked)
        elif self.key is not None and not self.may_use(model):
            raise self._not_allowed(name)
        if model.auto_truncate and may_truncate and _leaves_open(body):
            body.truncate_prompt_tokens = -1
        self.model_name = model.spec.name
        return model

    def _chosen(self, body: Any, asked: str | None) -> ServedModel:
        """The model of a body whose name or `adapter` also chooses a prompt or an adapter."""
        found = self._resolve(body.model)
        if not body.model and asked not in (None, *found.model.adapters):
            holders = [each for each in self.state.models.values() if asked in each.adapters]
            found = Found(holders[0]) if len(holders) == 1 else found
        model, own = found.model, found.own_adapter
        if asked is not None:
            named = own if model.adapter is None else model.adapter.name
            if named not in (None, asked):
                raise BadValue(
                    f"model names the adapter {named!r}, and adapter {shown(asked)}; leave one out",
                    param="adapter",
                )
            if asked in model.spec.adapters:
                own = asked
            elif model.adapter is None:
                model = model.with_adapter(self._find_adapter(model, asked))
        if not self.may_use(model):
            # The error is the same whether or not another tenant has an adapter of this name.
            raise self._not_allowed(model.full_name if asked is not None else body.model)
        if found.prompt is not None:
            choose_prompt_by_name(body, model, found.prompt)
        if model.adapter is not None:
            self._hold(model, model.adapter)
            if asked is not None:
                body.adapter = None  # the request is given its id
        elif own is not None:
            choose_own_adapter(body, model, own)
        return model

    def _find_adapter(self, model: ServedModel, name: str) -> ServedAdapter:
        """An adapter of a model. A client that may not use the model does not learn which adapters it has."""
        try:
            return model.find_adapter(name)
        except ModelNotFound:
            if self.may_use(model):
                raise
            raise self._not_allowed(f"{model.spec.name}:{name}") from None

    def _hold(self, model: ServedModel, adapter: ServedAdapter) -> None:
        """Keep an adapter in the engines until this request is done."""
        if any(held is adapter for _, held in self.adapters):
            return
        adapter.enter()
        self.adapter_name = adapter.name
        self.metrics.adapter_begins(model.spec.name, adapter.name)
        self.adapters = (*self.adapters, (model.spec.name, adapter))

    def release_adapters(self) -> None:
        """Release the adapters, because the request is done."""
        adapters, self.adapters = self.adapters, ()
        for model, adapter in adapters:
            self.metrics.adapter_ends(model, adapter.name)
            adapter.leave()

    def count_work(self, model: ServedModel, num_rows: int, num_tokens: int) -> None:
        """Count the rows and tokens of the request for a model."""
        name = self.model_name = model.spec.name
        self.num_rows += num_rows
        self.num_tokens += num_tokens
        self.metrics.work(name, num_rows, num_tokens)

    def log_fields(self) -> dict[str, str]:
        """The fields that identify this request in log lines."""
        fields = {} if self.request_id is None else {"request_id": self.request_id}
        return fields if self.trace is None else {**fields, "trace_id": self.trace.trace_id}

    def find(self, name: str | None) -> ServedModel:
        """The model of this name, if the client's key allows it."""
        return self.resolve(name)[0]

    def resolve(self, name: str | None) -> Found:
        """The model, prompt or adapter of a name. Models that the client's key does not allow do not exist
        for the client."""
        found = self._resolve(name)
        if not self.may_use(found.model):
            raise self._not_allowed(name)
        return found

    def _resolve(self, name: str | None) -> Found:
        """Like `resolve`, but any model is allowed, because the adapter to check may be chosen later."""
        if self.key is None or self.key.models is None:
            return self.state.find(name, self.use)
        if not name and (allowed := [each for each in self.state.models.values() if self.may_use(each)]):
            return Found(self.state.default(self.use, allowed))
        try:
            return self.state.find(name, self.use)
        except ModelNotFound:
            raise self._not_allowed(name) from None

    @property
    def names(self) -> list[str]:
        """The names of models and adapters that the client may use."""
        return [name for name in self.state.names if self.may_use(self.state.find(name).model)]

    def may_use(self, model: ServedModel) -> bool:
        """Whether the client's key allows a model. A key for an adapter allows only the adapter; a key
        for a model allows its adapters, too."""
        if self.key is None or self.key.models is None:
            return True
        aliases, allowed = self.state.aliases, self.key.models
        if any(aliases.get(name, name) == model.spec.name for name in allowed):
            return True
        if model.adapter is None:
            return False
        names = (model.spec.name, *model.aliases)
        return model.name in allowed or any(f"{name}:{model.name}" in allowed for name in names)

    def _not_allowed(self, name: str | None) -> ModelNotAllowed:
        assert self.key is not None
        asked = f"model {shown(name)}" if name else "the default model"
        allowed = ", ".join(self.names) or "none of this server"
        return ModelNotAllowed(
            f"{asked} is not one that key {self.key.name} may use; its models are: {allowed}", param="model"
        )

    def count_tokens(self, num_tokens: int) -> None:
        """Count the tokens of a request that is about to run. Refuse it if its key has no tokens left."""
        if (key := self.key) is not None:
            if key.limits is not None:
                key.limits.take(num_tokens)
            self.metrics.key_tokens(key.name, num_tokens)

    def count_generated(self, num_tokens: int) -> None:
        self.num_generated += num_tokens
        if (key := self.key) is not None:
            if key.limits is not None:
                key.limits.owe(num_tokens)
            self.metrics.key_tokens(key.name, num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of an answer that tell about the request."""
        return [*self.time_headers(), *self.rare_headers()]

    def time_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that every answer has."""
        return [(name, b"%.3f" % ms) for name, ms in zip(_TIME_HEADERS, self._times_ms(), strict=True)]

    def time_lines(self) -> bytes:
        """The same, as they are sent."""
        return _TIME_LINES % self._times_ms()

    def _times_ms(self) -> tuple[float, float, float, float]:
        total_s = time.monotonic() - self.began_s
        return self.tokenize_s * 1000, self.queue_s * 1000, self.device_s * 1000, total_s * 1000

    def rare_headers(self) -> list[tuple[bytes, bytes]]:
        """The others, of which most answers have none."""
        out = []
        if self.request_id is not None:
            out.append((b"x-request-id", self.request_id.encode("latin-1", "replace")))
        if self.ignored_fields:
            out.append((b"x-ignored-fields", _names_header(self.ignored_fields)))
        if self.num_truncated:
            out.append((b"x-truncated-rows", b"%d" % self.num_truncated))
        if self.num_cached_rows is not None:
            out.append((b"x-cache-hits", b"%d" % self.num_cached_rows))
        return out


def _names_header(names: Sequence[str]) -> bytes:
    """Names from a client, escaped for a header."""
    text = ", ".join(names).encode("ascii", "backslashreplace")[:_MAX_IGNORED_CHARS]
    return bytes(byte if 32 <= byte < 127 else 63 for byte in text).strip()


def _leaves_open(body: Any) -> bool:
    """Whether a body has the field that truncates long texts, but leaves them to the server's default."""
    is_open = getattr(body, "truncate_prompt_tokens", 0) is None
    return is_open and getattr(body, "chunking", None) in (None, "none")


def choose_own_adapter(body: Any, model: ServedModel, name: str) -> None:
    """Set one of the checkpoint's own adapters in a body, which chooses a prompt with it."""
    if not getattr(body, "takes_own_adapter", False):
        raise NotPossible(
            f"this route does not choose among the adapters of model {model.spec.name}; use /v1/embeddings",
            param="adapter",
        )
    body.adapter = name


def choose_prompt_by_name(body: Any, model: ServedModel, prompt: str) -> None:
    """Set the prompt of `model: NAME:PROMPT` in a body, for clients that cannot send one otherwise."""
    if not hasattr(body, "input_type"):
        raise BadValue(f"this route takes no prompt; use model {model.spec.name!r}", param="model")
    names = ("prompt_name", "prompt", "instruction", "input_type")
    given = next((name for name in names if getattr(body, name, None) is not None), None)
    if given is not None:
        raise BadValue(f"model names the prompt {prompt!r}, and {given} another; leave one out", param=given)
    if prompt in model.spec.prompts and hasattr(body, "prompt_name"):
        body.prompt_name = prompt
    else:
        body.input_type = prompt

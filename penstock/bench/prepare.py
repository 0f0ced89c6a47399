"""Preparation before the measurement: data, bodies, bytes, and one trial request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.bench.backends import BACKENDS, Backend
from penstock.bench.datasets.item import Item
from penstock.bench.datasets.load import count_tokens, load_items, templated
from penstock.bench.datasets.tokens import BenchTokenizer, load_tokenizer
from penstock.bench.load.plan import Reader
from penstock.bench.load.sse import TokenStream
from penstock.bench.options import BackendName, BodyOptions, DataOptions, DatasetName, ServerOptions
from penstock.bench.probe import Caller, HttpReply, first_model
from penstock.bench.target import Target, json_object, route_of, target_of
from penstock.errors import BadValue

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


@dataclass(slots=True, eq=False)
class Prepared:
    """A load that is ready to send."""

    name: BackendName
    target: Target
    route: str
    model: str
    items: list[Item]
    bodies: list[bytes]
    reader: Reader
    is_binary: bool  # responses are vectors without JSON
    tokenizer_name: str | None
    notes: list[str] = field(default_factory=list)
    _tokenizer: BenchTokenizer | None = None

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.name]

    @property
    def url(self) -> str:
        return self.target.base_url + self.route

    def messages(self) -> list[bytes]:
        return [self.target.message("POST", self.route, body) for body in self.bodies]

    def count_input_tokens(self) -> list[int] | None:
        """Input tokens of each request, counted by the client; None without a tokenizer."""
        try:
            tokenizer = self._tokenizer or load_tokenizer(self.tokenizer_name, None)
        except BadValue:
            return None
        return count_tokens(self.items, tokenizer)


def prepare(server: ServerOptions, data: DataOptions, body: BodyOptions) -> Prepared:
    backend = BACKENDS[server.backend]
    target = target_of(server)
    route = route_of(server, backend.endpoint)
    extra = _extra(backend, body)
    model = server.served_model_name or server.model or _ask_model(server, target)
    tokenizer = _LazyTokenizer(server.tokenizer, server.model or model)
    items = load_items(data, tokenizer.load)
    notes: list[str] = []
    if (
        data.dataset_name is DatasetName.CUSTOM
        and not data.skip_chat_template
        and not backend.applies_chat_template
    ):
        items, note = _apply_chat_template(items, tokenizer)
        notes.append(note)
    if backend.generates and data.random_batch_size > 1:
        raise BadValue(
            "--random-batch-size must be 1 for generation: a completion has one prompt",
            param="random_batch_size",
        )
    if backend.generates and (body.ignore_eos or data.dataset_name is DatasetName.RANDOM):
        extra.setdefault("ignore_eos", True)
    return Prepared(
        name=server.backend,
        target=target,
        route=route,
        model=model,
        items=items,
        bodies=[orjson.dumps(backend.make(item, model) | extra) for item in items],
        reader="header" if _is_binary(extra) else backend.reader,
        is_binary=_is_binary(extra),
        tokenizer_name=tokenizer.name,
        notes=notes,
        _tokenizer=tokenizer.loaded,
    )


def send_trial_request(load: Prepared, timeout_s: float) -> None:
    """Send the first request and check the response; raise an error that names the problem."""
    caller = Caller(load.target, timeout_s)
    try:
        answer = caller.call("POST", load.route, orjson.Fragment(load.bodies[0]))
    finally:
        caller.close()
    if answer.status != 200:
        hint = "; are --backend and --endpoint right?" if answer.status in (404, 405) else ""
        raise BadValue(f"{load.url} refused the first request with {answer.refusal()}{hint}")
    if problem := _problem(load, answer):
        raise BadValue(f"{load.url} answered, but {problem}: is it an endpoint for --backend {load.name}?")


def _problem(load: Prepared, answer: HttpReply) -> str | None:
    if load.backend.generates:
        stream = TokenStream()
        stream.feed(answer.body, 1.0)
        if stream.error:
            return stream.error
        return None if stream.first_token else "it did not stream a token"
    if load.is_binary:
        return None if answer.body else "the answer is empty"
    lacks = load.backend.missing(answer.json(), load.items[0])
    return f"the answer lacks {lacks}" if lacks else None


class _LazyTokenizer:
    """Loads the tokenizer when it is first needed."""

    def __init__(self, tokenizer: str | None, model: str | None) -> None:
        self.name = tokenizer or model
        self.loaded: BenchTokenizer | None = None

    def load(self) -> BenchTokenizer:
        if self.loaded is None:
            self.loaded = load_tokenizer(self.name, None)
        return self.loaded


def _ask_model(server: ServerOptions, target: Target) -> str:
    return "tei" if server.backend is BackendName.TEI else first_model(target)


def _extra(backend: Backend, body: BodyOptions) -> dict[str, Any]:
    sampling = {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None}
    generation_only = [*sampling, *(["ignore_eos"] if body.ignore_eos else [])]
    if generation_only and not backend.generates:
        raise BadValue(f"{', '.join(generation_only)}: only with --backend openai and openai-chat")
    return sampling | json_object(body.extra_body, "--extra-body")


def _is_binary(extra: dict[str, Any]) -> bool:
    return str(extra.get("encoding_format", "")).startswith("bytes")


def _apply_chat_template(items: list[Item], tokenizer: _LazyTokenizer) -> tuple[list[Item], str]:
    if not any(isinstance(item.prompt, str) for item in items):
        return items, "prompts are sent as they are: they are not plain texts"
    try:
        done = templated(items, tokenizer.load())
    except BadValue as error:
        if error.param != "tokenizer":
            raise
        return items, f"prompts are sent as they are: {error.message}"
    if done is None:
        return items, "prompts are sent as they are: the model has no chat template"
    return done, "prompts are sent in the model's chat template (--skip-chat-template sends them as they are)"

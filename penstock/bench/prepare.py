"""Preparation before the measurement: data, bodies, bytes, and one trial request."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from penstock.bench.backends import BACKENDS, Backend, fitting_backends
from penstock.bench.datasets.item import Item
from penstock.bench.datasets.load import count_tokens, load_items, templated
from penstock.bench.datasets.tokens import is_local
from penstock.bench.load.plan import Reader
from penstock.bench.load.sse import TokenStream
from penstock.bench.options import BackendName, BodyOptions, DataOptions, DatasetName, ServerOptions
from penstock.bench.probe import Caller, HttpReply, first_model, listed_models
from penstock.bench.target import Target, json_object, route_of, target_of
from penstock.bench.tokenizers import TokenizerFinder
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
    is_binary: bool  # responses are raw vectors instead of JSON
    tokenizers: TokenizerFinder
    source_items: list[Item]  # before a chat template was applied
    notes: list[str] = field(default_factory=list)

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.name]

    @property
    def tokenizer_name(self) -> str | None:
        return self.tokenizers.name

    @property
    def url(self) -> str:
        return self.target.base_url + self.route

    def messages(self) -> list[bytes]:
        return [self.target.message("POST", self.route, body) for body in self.bodies]

    def count_input_tokens(self) -> list[int] | None:
        """Input tokens of each request, counted by the client; None without a tokenizer."""
        try:
            return count_tokens(self.items, self.tokenizers.find())
        except BadValue:
            return None


def prepare(
    server: ServerOptions,
    data: DataOptions,
    body: BodyOptions,
    *,
    asks_server: bool = True,
    same_as: Prepared | None = None,
) -> Prepared:
    """Prepare a load. It has the texts of `same_as`, if given, so that several servers get the same texts."""
    backend = BACKENDS[server.backend]
    target = target_of(server)
    route_of(server, backend.endpoint)  # refuses a wrong route before any request is sent
    extra = _extra(backend, body)
    model = _model_name(server, target) if asks_server else server.served_model_name or str(server.model)
    own = TokenizerFinder(server, model, target if asks_server else None)
    tokenizer = own if same_as is None else same_as.tokenizers
    items = source_items = load_items(data, tokenizer.find) if same_as is None else same_as.source_items
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
        route=route_of(server, backend.endpoint_for(items[0])),
        model=model,
        items=items,
        bodies=[orjson.dumps(backend.make(item, model) | extra) for item in items],
        reader="header" if _is_binary(extra) else backend.reader,
        is_binary=_is_binary(extra),
        tokenizers=tokenizer,
        source_items=source_items,
        notes=notes,
    )


def send_trial_request(load: Prepared, timeout_s: float) -> None:
    """Send the first request and check the response. Raises `BadValue` with the problem, if there is one."""
    caller = Caller(load.target, timeout_s)
    try:
        answer = caller.call("POST", load.route, orjson.Fragment(load.bodies[0]))
    finally:
        caller.close()
    if answer.status != 200:
        raise BadValue(f"{load.url} refused the first request with {answer.refusal()}{_hint(load, answer)}")
    if problem := _problem(load, answer):
        raise BadValue(f"{load.url} answered, but {problem}: is it an endpoint for --backend {load.name}?")


def _hint(load: Prepared, answer: HttpReply) -> str:
    """A hint for the user after a refusal: flags that may be wrong."""
    models = {model.name: model for model in listed_models(load.target)}
    model = models.get(load.model)
    if model is not None and model.tasks and (fitting := fitting_backends(load.name, model.tasks)):
        return f"; for this model use --backend {' or '.join(fitting)}"
    return "; are --backend and --endpoint right?" if answer.status in (404, 405) else ""


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


def _model_name(server: ServerOptions, target: Target) -> str:
    """The model's name in requests: as given, otherwise as the server lists it."""
    if server.served_model_name is not None:
        return server.served_model_name
    if server.model is not None and not is_local(server.model):
        return server.model
    if server.model is None and BACKENDS[server.backend].names_model:
        return first_model(target)
    names = [model.name for model in listed_models(target)]
    if server.model is None:
        return names[0] if names else server.backend.value
    return _name_of_folder(server.model, names)


def _name_of_folder(folder: str, names: list[str]) -> str:
    """The server's name for a folder: its path, its last part, or the only listed name."""
    path = Path(folder).expanduser()
    for name in (folder, str(path), str(path.resolve()), path.resolve().name):
        if name in names:
            return name
    if len(names) > 1:
        raise BadValue(
            f"the server lists no model of the name {path.resolve().name!r}; give --served-model-name one of "
            f"{', '.join(names)}",
            param="served_model_name",
        )
    return names[0] if names else folder


def _extra(backend: Backend, body: BodyOptions) -> dict[str, Any]:
    sampling = {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None}
    generation_only = [*sampling, *(["ignore_eos"] if body.ignore_eos else [])]
    if generation_only and not backend.generates:
        raise BadValue(f"{', '.join(generation_only)}: only with --backend openai and openai-chat")
    return sampling | json_object(body.extra_body, "--extra-body")


def _is_binary(extra: dict[str, Any]) -> bool:
    return str(extra.get("encoding_format", "")).startswith("bytes")


def _apply_chat_template(items: list[Item], tokenizer: TokenizerFinder) -> tuple[list[Item], str]:
    if not any(isinstance(item.prompt, str) for item in items):
        return items, "prompts are sent as they are: they are not plain texts"
    try:
        done = templated(items, tokenizer.find())
    except BadValue as error:
        if error.param != "tokenizer":
            raise
        return items, f"prompts are sent as they are: {error.message}"
    if done is None:
        return items, "prompts are sent as they are: the model has no chat template"
    return done, "prompts are sent in the model's chat template (--skip-chat-template sends them as they are)"

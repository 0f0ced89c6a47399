"""Everything that is done before the clock starts: data, bodies, bytes, and one request as a trial."""

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
    """A load that is ready to be sent."""

    name: BackendName
    target: Target
    route: str
    model: str
    items: list[Item]
    bodies: list[bytes]
    reader: Reader
    binary: bool  # answers are vectors without JSON around them
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

    def counted(self) -> list[int] | None:
        """Input tokens of each request as counted here; None without a tokenizer."""
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
    tokenizers = _Tokenizers(server.tokenizer, server.model or model)
    items = load_items(data, tokenizers.find)
    notes: list[str] = []
    if data.dataset_name is DatasetName.CUSTOM and not data.skip_chat_template and not backend.chats:
        items, note = _in_template(items, tokenizers)
        notes.append(note)
    if backend.generates and data.random_batch_size > 1:
        raise BadValue("--random-batch-size: a completion has one prompt", param="random_batch_size")
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
        binary=_is_binary(extra),
        tokenizer_name=tokenizers.name,
        notes=notes,
        _tokenizer=tokenizers.found,
    )


def try_once(load: Prepared, timeout_s: float) -> None:
    """Send the first request and look at the answer; raise in clear words if it is not what it should be."""
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
    if load.binary:
        return None if answer.body else "the answer is empty"
    lacks = load.backend.missing(answer.json(), load.items[0])
    return f"the answer lacks {lacks}" if lacks else None


class _Tokenizers:
    """Looks for the tokenizer when it is first needed."""

    def __init__(self, tokenizer: str | None, model: str | None) -> None:
        self.name = tokenizer or model
        self.found: BenchTokenizer | None = None

    def find(self) -> BenchTokenizer:
        if self.found is None:
            self.found = load_tokenizer(self.name, None)
        return self.found


def _ask_model(server: ServerOptions, target: Target) -> str:
    return "tei" if server.backend is BackendName.TEI else first_model(target)


def _extra(backend: Backend, body: BodyOptions) -> dict[str, Any]:
    sampling = {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None}
    only_there = [*sampling, *(["ignore_eos"] if body.ignore_eos else [])]
    if only_there and not backend.generates:
        raise BadValue(f"{', '.join(only_there)}: only for --backend openai and openai-chat")
    return sampling | json_object(body.extra_body, "--extra-body")


def _is_binary(extra: dict[str, Any]) -> bool:
    return str(extra.get("encoding_format", "")).startswith("bytes")


def _in_template(items: list[Item], tokenizers: _Tokenizers) -> tuple[list[Item], str]:
    if not any(isinstance(item.prompt, str) for item in items):
        return items, "prompts are sent as they are: they are not plain texts"
    try:
        done = templated(items, tokenizers.find())
    except BadValue as error:
        if error.param != "tokenizer":
            raise
        return items, f"prompts are sent as they are: {error.message}"
    if done is None:
        return items, "prompts are sent as they are: the model has no chat template"
    return done, "prompts are sent in the model's chat template (--skip-chat-template sends them as they are)"

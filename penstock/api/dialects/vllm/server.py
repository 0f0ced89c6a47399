"""The dialect of vLLM's routes about the server itself: liveness, load, configuration, tokenizer."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from penstock import __version__
from penstock.api.call import Call, Reply
from penstock.api.routes import RouteSpec
from penstock.api.state import ServedModel
from penstock.checkpoint.files import optional_json
from penstock.config import ServerConfig
from penstock.errors import BadValue, NotFound
from penstock.types import Task
from penstock.wire.status import EngineStatus

_SECRET = (
    "api_keys",
    "api_key_file",
    "admin_keys",
    "admin_key_file",
    "chat_template",
    "result_cache_redis",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_keyfile_password",
    "ssl_keyfile_password_file",
    "ssl_ca_certs",
    "uds",
    "lora_root",
    "batch_folder",
    "allowed_local_media_path",
    "otlp_endpoint",  # a URL that may have credentials
)
_PATHS = ("vocab_file", "merges_file", "name_or_path", "tokenizer_file")  # on the machine that made the model


async def ping(call: Call) -> Reply:
    """Report whether requests can be served, as SageMaker asks; 503 with the reason otherwise."""
    call.state.check_engines()
    return Reply(b"{}")


class LoadAnswer(msgspec.Struct, kw_only=True):
    server_load: int  # requests in flight in the API process that answers


async def load(call: Call) -> Reply:
    """Count the requests in flight in the API process that answers."""
    return Reply(orjson.dumps({"server_load": call.state.in_flight}))


class LoraInfo(msgspec.Struct, kw_only=True):
    """The LoRA adapters of a model: which are loaded, and where its engines hold them."""

    adapters: list[str]
    max_loras: int | None  # adapters in one step; null until the engine has started
    max_lora_rank: int | None
    max_cpu_loras: int | None  # adapters in host memory
    on_device: int  # a sum over all engines, like the following
    in_host_memory: int
    device_loads: int  # adapters copied to the device since the engines started
    disk_loads: int  # adapters read from their files since the engines started


class ServedModelInfo(msgspec.Struct, kw_only=True):
    name: str
    architecture: str
    tasks: list[Task]
    max_model_len: int
    dimensions: int | None
    labels: list[str]
    tensor_parallel_size: int | None  # null until the engine has started
    lora: LoraInfo | None  # null: the model takes no LoRA adapters
    draft_model: str | None  # for speculative decoding; null: none


class ServerInfoAnswer(msgspec.Struct, kw_only=True):
    """How the server was started, without keys and paths."""

    version: str
    server_config: dict[str, Any]
    models: list[ServedModelInfo]


async def server_info(call: Call) -> Reply:
    """Show the server's configuration, without keys, and its models."""
    models = [
        ServedModelInfo(
            name=model.spec.name,
            architecture=model.spec.architecture,
            tasks=list(model.spec.tasks),
            max_model_len=model.spec.max_model_len,
            dimensions=model.spec.embed_dim,
            labels=list(model.spec.labels),
            tensor_parallel_size=getattr(model.engine, "engine_settings", {}).get("tensor_parallel_size"),
            lora=lora_info(model) if model.takes_adapters else None,
            draft_model=None if model.spec.draft is None else model.spec.draft.name,
        )
        for model in call.state.models.values()
        if call.may_use(model)
    ]
    answer = ServerInfoAnswer(version=__version__, server_config=shown(call.state.config), models=models)
    return Reply(msgspec.json.encode(answer))


def lora_info(model: ServedModel) -> LoraInfo:
    settings = getattr(model.engine, "engine_settings", {})
    status = EngineStatus() if model.status is None else model.status.read()
    return LoraInfo(
        adapters=list(model.adapters),
        max_loras=settings.get("max_loras"),
        max_lora_rank=settings.get("max_lora_rank"),
        max_cpu_loras=settings.get("max_cpu_loras"),
        on_device=status.adapters_on_device,
        in_host_memory=status.adapters_on_host,
        device_loads=status.adapter_device_loads,
        disk_loads=status.adapter_host_loads,
    )


def shown(config: ServerConfig) -> dict[str, Any]:
    """The configuration, without settings that clients may not see."""
    return {name: value for name, value in msgspec.structs.asdict(config).items() if name not in _SECRET}


async def tokenizer_info(call: Call) -> Reply:
    """Show the tokenizer's configuration, where the operator allows it."""
    if not call.state.config.enable_tokenizer_info_endpoint:
        raise NotFound("/tokenizer_info needs the flag --enable-tokenizer-info-endpoint")
    model = call.find(None)
    settings = optional_json(model.spec.path / "tokenizer_config.json")
    info = {name: _plain(value) for name, value in settings.items() if name not in _PATHS}
    info["tokenizer_class"] = str(settings.get("tokenizer_class") or "PreTrainedTokenizerFast")
    try:
        info["chat_template"] = model.text.chat.template.source
    except BadValue:  # it has none
        info.pop("chat_template", None)
    return Reply(orjson.dumps(info))


def _plain(value: Any) -> Any:
    """A special token as its text. Files store it as text, or as an object with its options."""
    if isinstance(value, dict):
        return value.get("content", {name: _plain(each) for name, each in value.items()})
    return [_plain(each) for each in value] if isinstance(value, list) else value


ROUTES = (
    RouteSpec(
        "/ping",
        None,
        ping,
        "vLLM",
        dict[str, Any],
        open_to_all=True,
        methods=("GET", "HEAD", "POST"),
        on="both",
    ),
    RouteSpec("/load", None, load, "vLLM", LoadAnswer, open_to_all=True, on="admin"),
    RouteSpec("/server_info", None, server_info, "vLLM", ServerInfoAnswer, on="admin"),
    RouteSpec("/tokenizer_info", None, tokenizer_info, "vLLM", dict[str, Any]),
)

"""`penstock serve`: a server for one model or several."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.arguments import hide_arguments
from penstock.cli.command import with_options
from penstock.cli.config_file import RAY, Convert, listed_models, read_mapping
from penstock.cli.flags import (
    GENERATION,
    SERVED_ENGINE,
    SERVED_MODEL,
    SERVER,
    SERVER_PANEL,
    EngineFields,
    ModelFields,
    ServerFields,
    api_keys,
)
from penstock.cli.foreign import FOREIGN, Given
from penstock.cli.protection import SECRET_FLAGS, check_protection, forget_secret_variables
from penstock.cli.ray import RayOptions, check_installed, flag_names, run_with_ray
from penstock.config import EngineConfig, ServerConfig, available_cpus, from_mapping
from penstock.errors import ConfigError
from penstock.logs import configure
from penstock.serving.child import spawned_engine

MAX_API_PROCESSES = 8  # limit for `auto`; a single engine cannot keep more processes busy
MAX_GIVEN_API_PROCESSES = 256
log = logging.getLogger("penstock.serve")


class Runner(enum.StrEnum):
    AUTO = "auto"
    POOLING = "pooling"
    GENERATE = "generate"


@with_options(SERVED_ENGINE, SERVED_MODEL, SERVER, FOREIGN, RayOptions)
def serve(
    engine: EngineFields,
    model: ModelFields,
    server: ServerFields,
    foreign: Given,
    ray: RayOptions,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL...]",
            help="Models to serve, each in an engine of its own. NAME=MODEL gives one a name.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=SERVER_PANEL,
            help="YAML file of flags, as in `port: 8080`. Flags of the command line come first. `models:` "
            "lists models with settings of their own.",
            show_default=False,
        ),
    ] = None,
    runner: Annotated[
        Runner,
        typer.Option(
            metavar="auto|pooling|generate",
            rich_help_panel=GENERATION,
            help="pooling means --no-enable-generation, generate means --enable-generation.",
        ),
    ] = Runner.AUTO,
) -> None:
    """Serve models over HTTP until SIGTERM or ctrl-C.

    \b
    Examples:
      penstock serve
      penstock serve BAAI/bge-base-en-v1.5 --port 8080
      penstock serve Qwen/Qwen3-0.6B --device cuda --kv-cache-gb 20
      penstock serve embed=BAAI/bge-base-en-v1.5 rerank=BAAI/bge-reranker-base
      penstock serve --config models.yaml
      penstock serve --ray --ray-replicas 1-4 BAAI/bge-base-en-v1.5
    """
    engine, server = foreign.merged("engine", engine), foreign.merged("server", server)
    read_environment(engine, server, models or ())
    hide_arguments(SECRET_FLAGS)
    if foreign.hub_token is not None:
        os.environ["HF_TOKEN"] = foreign.hub_token
    defaults = ServerConfig()
    configure(
        level=server.get("log_level", defaults.log_level),
        format=server.get("log_format", defaults.log_format),
        process="supervisor",
    )
    if server.get("log_inputs"):
        log.warning("--log-inputs is on: texts of requests are written to the log")
    forget_secret_variables()
    for warning in foreign.warnings:
        log.warning("%s", warning)
    if ray.ray:
        if foreign.tasks:
            raise ConfigError(f"{next(iter(foreign.tasks))} cannot be used with --ray; leave it out")
        wants_generation = generation(engine.get("enable_generation"), runner)
        shared = {**engine, **model, "enable_generation": wants_generation}
        raise typer.Exit(serve_with_ray(ray, config, server, models or [], shared))
    ray.check_unused()
    device = engine.get("device", EngineConfig().device)
    with spawned_engine(device) as begun:  # before the imports below, so that it starts in parallel
        from penstock.serving.adapters import check_base_names
        from penstock.serving.model_settings import describe_loaded, describe_model
        from penstock.serving.supervisor import Supervisor

        wants_generation = generation(engine.get("enable_generation"), runner)
        shared = {**engine, **model, "enable_generation": wants_generation}
        processes = api_processes(server.get("api_server_count", "auto"), device)
        server_config = from_mapping(ServerConfig, {**server, "api_server_count": processes})
        check_protection(server_config)
        listed = [] if config is None else listed_models(config, settings_of_models())
        for each in listed:
            each.pop(RAY, None)  # for --ray only; the same file works with and without it
        described = []
        for settings in model_settings(models or [], shared, listed):
            described.append(describe_model(settings, server_config))
            spec = described[-1][1]
            check_tasks(foreign.tasks, spec.name, [task.value for task in spec.tasks])
        check_base_names(shared.get("lora_modules", ()), described)
        describe = partial(describe_loaded, defaults=shared, server=server_config)
        supervisor = Supervisor(described, server_config, begun, describe=describe)
    raise typer.Exit(supervisor.run())


def serve_with_ray(
    ray: RayOptions,
    file: str | None,
    server: ServerFields,
    models: Sequence[str],
    shared: Mapping[str, Any],
) -> int:
    """Serve the same models with the same flags as a Ray Serve application."""
    check_installed()
    from penstock.scale.serving.config import app_config

    listed = [] if file is None else listed_models(file, settings_of_models())
    section = None if file is None else read_mapping(file).get(RAY)
    app = app_config(
        server,
        model_settings(models, shared, listed),
        ray.settings(section),
        flag_names(),
        shared.get("lora_modules", ()),
    )
    check_protection(app.server)
    return run_with_ray(app, ray.ray_address)


OF_A_MODEL = ("auto_truncate", "default_chunking", "chat_template", "sleep_after_s")


def settings_of_models() -> dict[str, Convert]:
    """What a model in the --config file may set: the engine's flags, some of the server's, and aliases."""
    flags = [(group, flag) for group in (SERVED_ENGINE, SERVED_MODEL) for flag in group.flags]
    flags += [(SERVER, flag) for flag in SERVER.flags if flag.field in OF_A_MODEL]
    settings: dict[str, Convert] = {
        name[2:]: partial(group.from_file, flag)
        for group, flag in flags
        for name in flag.all_names
        if name.startswith("--")
    }
    settings["aliases"] = lambda value: ("aliases", value if isinstance(value, list) else [value])
    settings[RAY] = lambda value: (RAY, value)  # settings of the model's replicas, with --ray
    return settings


def model_settings(
    arguments: Sequence[str], shared: Mapping[str, Any], listed: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The settings of each model. The arguments name the models, or otherwise the file. If neither does,
    there is one model with the settings of the flags."""
    named = shared.get("model"), shared.get("served_model_name")
    base = {name: value for name, value in shared.items() if name not in ("model", "served_model_name")}
    if len(arguments) == 1 and named[0] not in (None, arguments[0]):
        raise ConfigError(f"two models are named: {arguments[0]!r} and --model {named[0]!r}", param="model")
    if len(arguments) > 1 and named != (None, None):
        flag = "--model" if named[0] is not None else "--served-model-name"
        raise ConfigError(
            f"{flag} is for one model, and {len(arguments)} are given; write NAME=MODEL for each", param=flag
        )
    if arguments:
        own = {} if named[1] is None else {"served_model_name": named[1]}
        return [{**base, **own, **named_model(each)} for each in arguments]
    if not listed:
        return [dict(shared)]
    if named != (None, None):
        raise ConfigError("--config lists models with names: leave out --served-model-name and --model")
    return [{**base, **each} for each in listed]


def named_model(argument: str) -> dict[str, Any]:
    """The settings of the argument MODEL or NAME=MODEL."""
    name, equals, model = argument.partition("=")
    if not equals or Path(argument).exists():
        return {"model": argument}
    if not name or not model:
        raise ConfigError(f"the model {argument!r} has an empty part; use NAME=MODEL", param="model")
    return {"model": model, "served_model_name": (name,)}


def read_environment(engine: EngineFields, server: ServerFields, models: Sequence[str] = ()) -> None:
    """Read the environment variables of other servers: TEI's MODEL_ID and vLLM's VLLM_API_KEY."""
    model = os.environ.get("MODEL_ID")
    if model and not models and engine.get("model") is None:
        engine["model"] = model
    key = os.environ.pop("VLLM_API_KEY", None)  # no child process needs it
    if key and "api_keys" not in server:
        server["api_keys"] = api_keys([key])


def check_tasks(wanted: Mapping[str, str], model: str, tasks: Sequence[str]) -> None:
    """Refuse a model without the task that --task or --convert names."""
    for flag, task in wanted.items():
        if task not in tasks:
            raise ConfigError(f"{flag}: model {model} has no task {task}; its tasks are: {', '.join(tasks)}")


def generation(asked: bool | None, runner: str) -> bool | None:
    """Whether to generate. `--runner` is vLLM's flag for `--enable-generation`."""
    if runner == "auto":
        return asked
    wanted = runner == "generate"
    if asked is not None and asked is not wanted:
        name = "--enable-generation" if asked else "--no-enable-generation"
        raise ConfigError(f"--runner {runner} contradicts {name}", param="runner")
    return wanted


def api_processes(wanted: str, device: str, cores: int | None = None, has_gpu: bool | None = None) -> int:
    """Number of API processes for `--api-server-count`.

    `auto` leaves half of the cores to the engine, the system and clients on the same machine. If the engine
    computes on the CPU, it starts a single process.
    """
    if wanted != "auto":
        is_number = wanted.isascii() and wanted.isdigit() and len(wanted) < 10
        if not is_number or not 1 <= int(wanted) <= MAX_GIVEN_API_PROCESSES:
            raise ConfigError(
                f"--api-server-count is {wanted!r}; use auto or a number from 1 to {MAX_GIVEN_API_PROCESSES}",
                param="api_server_count",
            )
        return int(wanted)
    cores = available_cpus() if cores is None else cores
    has_gpu = Path("/dev/nvidiactl").exists() if has_gpu is None else has_gpu
    if device == "cpu" or (device == "auto" and not has_gpu):
        return 1
    return max(1, min(MAX_API_PROCESSES, cores // 2))

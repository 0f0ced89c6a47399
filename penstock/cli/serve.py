"""`penstock serve`: a server for one model."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from penstock.cli.arguments import hide_argument
from penstock.cli.command import with_options
from penstock.cli.flags import (
    GENERATION,
    SERVED_ENGINE,
    SERVER,
    SERVER_PANEL,
    EngineFields,
    ServerFields,
    api_key,
)
from penstock.cli.foreign import FOREIGN, Given
from penstock.config import EngineConfig, ServerConfig, available_cpus, from_mapping
from penstock.errors import ConfigError
from penstock.logs import configure
from penstock.serving.child import spawned_engine

MAX_API_PROCESSES = 8  # more than a single engine can keep busy
log = logging.getLogger("penstock.serve")


class Runner(enum.StrEnum):
    AUTO = "auto"
    POOLING = "pooling"
    GENERATE = "generate"


@with_options(SERVED_ENGINE, SERVER, FOREIGN)
def serve(
    engine: EngineFields,
    server: ServerFields,
    foreign: Given,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=SERVER_PANEL,
            help="YAML file of flags, as in `port: 8080`. Flags of the command line come first.",
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
    """Serve MODEL over HTTP until SIGTERM or ctrl-C.

    \b
    Examples:
      penstock serve
      penstock serve BAAI/bge-base-en-v1.5 --port 8080
      penstock serve Qwen/Qwen3-0.6B --device cuda --kv-cache-gb 20
    """
    engine, server = foreign.merged("engine", engine), foreign.merged("server", server)
    read_environment(engine, server)
    for secret in (server.get("api_key"), foreign.hub_token):
        hide_argument(secret)
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
    if os.environ.pop("PENSTOCK_API_KEY", None) == "":  # no child process needs it
        log.warning("PENSTOCK_API_KEY is empty, which sets no key")
    for warning in foreign.warnings:
        log.warning("%s", warning)
    device = engine.get("device", EngineConfig().device)
    with spawned_engine(device) as begun:  # before the imports below: it starts meanwhile
        from penstock.checkpoint.describe import describe
        from penstock.serving.supervisor import Supervisor

        wants_generation = generation(engine.get("enable_generation"), runner)
        engine_config = from_mapping(EngineConfig, {**engine, "enable_generation": wants_generation})
        processes = api_processes(server.get("api_server_count", "auto"), device)
        server_config = from_mapping(ServerConfig, {**server, "api_server_count": processes})
        if engine_config.pooler_config.enable_chunked_processing:
            server_config = msgspec.structs.replace(server_config, default_chunking="mean")
        check_long_texts(server_config)
        spec = describe(engine_config)
        check_tasks(foreign.tasks, spec.name, [task.value for task in spec.tasks])
        if server_config.chat_template is not None:
            from penstock.inputs.chat import ModelTemplate

            _ = ModelTemplate(spec.path, server_config.chat_template).template  # raises if it is not valid
        supervisor = Supervisor(engine_config, server_config, spec, begun)
    raise typer.Exit(supervisor.run())


def read_environment(engine: EngineFields, server: ServerFields) -> None:
    """Take what other servers read from the environment: TEI's MODEL_ID, and vLLM's VLLM_API_KEY."""
    model = os.environ.get("MODEL_ID")
    if model and engine.get("model") is None:
        engine["model"] = model
    key = os.environ.pop("VLLM_API_KEY", None)  # no child process needs it
    if key and "api_key" not in server:
        server["api_key"] = api_key(key)


def check_tasks(wanted: Mapping[str, str], model: str, tasks: Sequence[str]) -> None:
    """Refuse a model without the task that --task or --convert asks for."""
    for flag, task in wanted.items():
        if task not in tasks:
            raise ConfigError(f"{flag}: model {model} has no task {task}; its tasks are: {', '.join(tasks)}")


def check_long_texts(config: ServerConfig) -> None:
    if config.auto_truncate and config.default_chunking != "none":
        raise ConfigError(
            "--auto-truncate cuts long texts and --default-chunking embeds them whole; give only one",
            param="default_chunking",
        )


def generation(asked: bool | None, runner: str) -> bool | None:
    """Whether to generate. `--runner` is the name that other servers have for `--enable-generation`."""
    if runner == "auto":
        return asked
    wanted = runner == "generate"
    if asked is not None and asked is not wanted:
        name = "--enable-generation" if asked else "--no-enable-generation"
        raise ConfigError(f"--runner {runner} contradicts {name}", param="runner")
    return wanted


def api_processes(wanted: str, device: str, cores: int | None = None, has_gpu: bool | None = None) -> int:
    """Number of API processes for `--api-server-count`.

    `auto` leaves half of the cores to the engine, the system and clients on the same machine. Beside an
    engine that computes on the CPU it starts a single process.
    """
    if wanted != "auto":
        if not wanted.isascii() or not wanted.isdigit() or int(wanted) < 1:
            raise ConfigError(
                f"--api-server-count is {wanted!r}; use auto or a number from 1", param="api_server_count"
            )
        return int(wanted)
    cores = available_cpus() if cores is None else cores
    has_gpu = Path("/dev/nvidiactl").exists() if has_gpu is None else has_gpu
    if device == "cpu" or (device == "auto" and not has_gpu):
        return 1
    return max(1, min(MAX_API_PROCESSES, cores // 2))

"""`penstock serve --ray`: the flags for Ray, and running the application until a signal arrives."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import signal
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from penstock.errors import ConfigError, StartFailed

if TYPE_CHECKING:
    from penstock.scale.serving.config import AppConfig

RAY_PANEL = "Ray"
APP_NAME = "penstock"
log = logging.getLogger("penstock.serve")


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of `penstock serve` for Ray. The section `ray` of --config has more settings."""

    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            rich_help_panel=RAY_PANEL,
            help="Serve with Ray Serve: engines are replicas on the nodes of a Ray cluster. Needs the extra "
            "`scale`.",
        ),
    ] = False
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="HOST:PORT|auto|local",
            rich_help_panel=RAY_PANEL,
            help="The cluster to use; auto finds one on this machine, local starts one.",
            show_default="RAY_ADDRESS, else a cluster on this machine, else a new one",
        ),
    ] = None
    ray_replicas: Annotated[
        str | None,
        typer.Option(
            "--ray-replicas",
            metavar="N|MIN-MAX",
            rich_help_panel=RAY_PANEL,
            help="Engine replicas of each model; MIN-MAX scales them by queued tokens.",
            show_default="1",
        ),
    ] = None
    ray_gpu_share: Annotated[
        float | None,
        typer.Option(
            "--ray-gpu-share",
            metavar="NUMBER",
            rich_help_panel=RAY_PANEL,
            help="Share of a GPU for each engine replica, such as 0.5.",
            show_default="1 with --device cuda, else 0",
        ),
    ] = None
    ray_cpus: Annotated[
        float | None,
        typer.Option(
            "--ray-cpus",
            metavar="NUMBER",
            rich_help_panel=RAY_PANEL,
            help="CPUs for each engine replica.",
            show_default="1",
        ),
    ] = None

    def settings(self, section: Mapping[str, Any] | None) -> dict[str, Any]:
        """The section `ray` of the file, overridden by the flags of the command line."""
        given = dict(section or {})
        if self.ray_replicas is not None:
            given["min_replicas"], given["max_replicas"] = replica_range(self.ray_replicas)
        if self.ray_gpu_share is not None:
            given["gpu_share"] = self.ray_gpu_share
        if self.ray_cpus is not None:
            given["cpus"] = self.ray_cpus
        return given

    def check_unused(self) -> None:
        """Refuse flags that have no effect without --ray."""
        for name in ("ray_address", "ray_replicas", "ray_gpu_share", "ray_cpus"):
            if getattr(self, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} needs --ray", param=flag)


def replica_range(given: str) -> tuple[int, int]:
    """The value of --ray-replicas."""
    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", given, re.ASCII)
    if found is None:
        raise ConfigError(
            f"--ray-replicas is {given!r}; use a number such as 2, or a range such as 1-8",
            param="ray_replicas",
        )
    return int(found[1]), int(found[2] or found[1])


def flag_names() -> dict[str, str]:
    """Flag names of the server's fields, for error messages."""
    from penstock.cli.flags import SERVER

    return {flag.field: flag.name for flag in SERVER.flags}


def check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--ray needs Ray; run `pip install 'penstock[scale]'`, or `pip install '.[scale]'` in the clone",
            param="--ray",
        )


def run_with_ray(config: AppConfig, address: str | None) -> int:
    """Serve until SIGTERM or ctrl-C, then let requests in flight finish and return the exit status."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    ended = threading.Event()
    server = config.server
    _connect(address)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        _start(config)
        names = ", ".join(model.deployment for model in config.models)
        log.info("%s on Ray Serve is ready at http://%s:%d", names, server.host, server.port)
        while not ended.wait(1.0):
            pass
        log.info("stopping; requests in flight have %g s to finish", server.drain_s)
        serve.delete(APP_NAME)
    finally:
        ray.shutdown()  # stops the cluster if this process has started it
    return 0


def _start(config: AppConfig) -> None:
    """Start Serve and the application, and wait until its replicas run."""
    from ray import serve

    from penstock.scale.serve import bind

    server = config.server
    try:
        serve.start(http_options={"host": server.host, "port": server.port})
    except Exception as error:
        raise StartFailed(f"Ray Serve cannot start: {error}") from None
    _check_port(server.port)
    try:
        serve.run(bind(config), name=APP_NAME, route_prefix="/")
    except Exception as error:
        reason = why_deployments_fail() or str(error)
        serve.delete(APP_NAME)
        raise StartFailed(f"Ray Serve cannot start the application: {reason}") from None


def why_deployments_fail() -> str:
    """Serve's messages about unhealthy deployments; only the last line of a traceback."""
    from ray import serve

    reasons = []
    application = serve.status().applications.get(APP_NAME)
    for name, deployment in () if application is None else application.deployments.items():
        if deployment.status != "HEALTHY" and deployment.message:
            lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
            raised = [
                line for line in lines if re.match(r"[\w.]+(Error|Exception|Failed|NotFound)\b.*: ", line)
            ]
            reasons.append(f"{name}: {(raised or lines)[-1]}")
    return "; ".join(reasons)


def _check_port(wanted: int) -> None:
    """Raise an error if Serve already runs in this cluster on another port."""
    from ray.serve.context import _get_global_client

    options = getattr(_get_global_client(), "http_config", None)
    if options is not None and options.port != wanted:
        raise ConfigError(
            f"Ray Serve in this cluster listens on port {options.port}, not on {wanted}; use --port "
            f"{options.port}, or stop it with `serve shutdown`",
            param="port",
        )


def _connect(address: str | None) -> None:
    """Connect to a cluster, or start one on this machine."""
    import ray

    try:
        ray.init(address=address, namespace=APP_NAME, log_to_driver=False, logging_level="warning")
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"--ray-address {address} cannot be used: {error}", param="ray_address") from None

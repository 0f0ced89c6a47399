"""The files below deploy/, and checks of their configurations with the server's own code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from penstock.cli.config_file import listed_models, read_config
from penstock.cli.main import app
from penstock.cli.serve import settings_of_models
from tests.command_line import get_command

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/penstock"
DOCKERFILE = DEPLOY / "docker/Dockerfile"
COMPOSE = DEPLOY / "compose/compose.yaml"
RAY_SERVE, RAY_SERVICE = DEPLOY / "ray/serve.yaml", DEPLOY / "ray/rayservice.yaml"
UNIT = DEPLOY / "systemd/penstock.service"


def load(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def yaml_files() -> list[Path]:
    templates = CHART / "templates"
    found = [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")]
    return sorted(file for file in found if not file.is_relative_to(templates))


@cache
def serve_params() -> tuple[Any, ...]:
    command: Any = get_command(app)
    return tuple(command.commands["serve"].params)


@cache
def serve_flags() -> frozenset[str]:
    return frozenset(name for param in serve_params() for name in (*param.opts, *param.secondary_opts))


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Fail unless `penstock serve --config` accepts the configuration."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    read_config(str(file), serve_params())
    assert len(listed_models(str(file), settings_of_models())) == len(config["models"])


def seconds(duration: str) -> int:
    """The seconds of `60s` or `60`."""
    found = re.fullmatch(r"(\d+)s?", duration)
    assert found is not None, duration
    return int(found[1])


def unit_settings(file: Path) -> dict[str, list[str]]:
    """The values of each setting in a unit."""
    settings: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"(\w+)=(.*)", line):
            settings.setdefault(found[1], []).append(found[2])
    return settings

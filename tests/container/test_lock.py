"""The container's lock file covers what the project depends on, and every package in it has a hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements/container.txt").read_text()
PACKAGE = re.compile(
    r"^([A-Za-z0-9._-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)


def locked() -> dict[str, str]:
    return {canonicalize_name(name): version for name, version, _ in PACKAGE.findall(LOCK)}


def test_the_lock_covers_every_dependency_at_an_accepted_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = default_environment() | {"sys_platform": "linux", "platform_system": "Linux"}
    versions, wrong = locked(), []
    for line in project["dependencies"]:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate(dict(environment)):
            continue
        version = versions.get(canonicalize_name(wanted.name))
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{line}: locked is {version}; run make lock")
    assert not wrong, "\n".join(wrong)


def test_every_line_of_the_lock_is_a_pinned_package_with_hashes() -> None:
    rest = PACKAGE.sub("", LOCK)
    assert [line for line in rest.splitlines() if line and not line.startswith("#")] == []
    assert len(locked()) > 40


def test_the_image_checks_hashes_and_runs_without_privileges() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "--require-hashes" in text and "USER 10001" in text
    assert re.search(r"^ARG BASE=python:\d+\.\d+\.\d+-slim", text, re.MULTILINE)

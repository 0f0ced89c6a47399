"""Rules for the tests themselves: no test module is imported, and every one of them checks something."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST_MODULES = sorted((ROOT / "tests").rglob("test_*.py"))
CHECKS = ("assert", "check", "raises", "refused", "expect", "warns", "fail")  # beginnings or endings of names


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module or ''}.{alias.name}") for alias in node.names)


def test_no_module_imports_a_test_module() -> None:
    files = [file for name in ("tests", "benchmarks", "penstock") for file in (ROOT / name).rglob("*.py")]
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in imported_modules(file)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ]
    assert wrong == [], "move what is shared to a module whose name does not begin with test_"


def checks_something(function: ast.AST) -> bool:
    """Whether a function asserts, expects an exception or calls a helper whose name says that it checks."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rsplit(".", 1)[-1]
            if name.startswith(CHECKS) or name.endswith(CHECKS):
                return True
    return False


@pytest.mark.parametrize("file", TEST_MODULES, ids=lambda file: str(file.relative_to(ROOT / "tests")))
def test_every_test_module_checks_something(file: Path) -> None:
    tests = [
        node
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    if not any(isinstance(node, ast.ClassDef) for node in parsed(file).body):  # such as state machines
        assert tests, "there is no test in it"
    assert any(map(checks_something, tests or [parsed(file)])), "no test in it can fail"

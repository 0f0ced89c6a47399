"""The examples of the page "Use your client", as far as their packages are installed."""

from __future__ import annotations

import ast
import importlib.util
import os
from typing import Any

import pytest

from tests.clients.reference import reachable
from tests.docs.blocks import DOCS, Block, read_blocks
from tests.e2e.server import Server

__all__ = ["reachable"]  # a fixture
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
BLOCKS = [block for block in read_blocks(DOCS / "guides" / "clients.md") if block.language == "python"]


def modules(code: str) -> list[str]:
    """The modules that a block imports."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except ValueError:  # imported before, by a loader that leaves no trace
        return True


@pytest.mark.usefixtures("reachable")
@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in BLOCKS])
def test_an_example_of_the_guide_runs(block: Block, embedder: Server) -> None:
    if missing := [module for module in modules(block.code) if not is_installed(module)]:
        pytest.skip(f"{missing[0]} is not installed")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block.code.replace("http://127.0.0.1:8000", embedder.url), block.name, "exec"), names)

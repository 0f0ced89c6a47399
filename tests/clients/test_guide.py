"""The examples of the page "Use your client" whose packages are installed."""

from __future__ import annotations

import ast
import importlib.util
import os
from typing import Any

import httpx
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
    except ValueError:  # already imported by a loader that sets no `__spec__`
        return True


@pytest.mark.usefixtures("reachable")
@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in BLOCKS])
def test_an_example_of_the_guide_runs(block: Block, embedder: Server) -> None:
    if missing := [module for module in modules(block.code) if not is_installed(module)]:
        pytest.skip(f"{missing[0]} is not installed")
    names: dict[str, Any] = {"__name__": "__main__"}
    before = num_answered(embedder)
    exec(compile(block.code.replace("http://127.0.0.1:8000", embedder.url), block.name, "exec"), names)
    assert num_answered(embedder) > before


def num_answered(server: Server) -> float:
    """The number of requests that the server has answered with 200."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("penstock_requests_total") and 'status="200"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found if "/metrics" not in line)

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.server import Server, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The default model, on the CPU."""
    with serving("--device", "cpu", "--max-body-mb", "8", "--max-rows", "512") as running:
        yield running


@pytest.fixture(scope="session")
def null_server() -> Iterator[Server]:
    """Everything but the model."""
    with serving("--device", "null", "--api-key", "secret", "--api-server-count", "2") as running:
        yield running


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client

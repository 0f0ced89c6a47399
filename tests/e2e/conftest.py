from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.gates import Gates
from tests.e2e.llama import write_llama
from tests.e2e.server import Server, ServerPool, serving
from tests.text_models import TEMPLATE

STRICT_TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system message, please') }}{% endif %}"
    "{% if messages[0].role == 'tool' %}{{ messages[0].nothing.more }}{% endif %}" + TEMPLATE
)


@pytest.fixture(scope="session")
def servers() -> Iterator[ServerPool]:
    """Running servers, shared by modules that request the same flags."""
    pool = ServerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def server(servers: ServerPool) -> Server:
    """The default model on the CPU."""
    return servers.get("--device", "cpu", "--max-body-mb", "8", "--max-rows", "512")


@pytest.fixture(scope="session")
def null_server(servers: ServerPool) -> Server:
    """A server on the null device with two API processes that require a key."""
    return servers.get("--device", "null", "--api-key", "secret", "--api-server-count", "2")


@pytest.fixture
def http(server: Server) -> httpx.Client:
    return server.http


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llama_server(servers: ServerPool, llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A small Llama that generates text. Its chat template refuses system messages."""
    template = tmp_path_factory.mktemp("template") / "strict.jinja"
    template.write_text(STRICT_TEMPLATE)
    flags = ("--device", "cpu", "--threads", "1", "--served-model-name", "llama")
    return servers.get(str(llama_folder), *flags, "--chat-template", str(template))


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    folder = tmp_path / "gates"
    folder.mkdir()
    return Gates(folder)


@pytest.fixture(scope="session")
def shared_gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    return Gates(tmp_path_factory.mktemp("gates"))


@pytest.fixture(scope="session")
def gated_server(shared_gates: Gates) -> Iterator[Server]:
    """A server on the null device that runs one row per step; `shared_gates` can hold its steps."""
    flags = ("--device", "null", "--max-num-seqs", "1", "--max-queue-seconds", "0")
    with serving(*flags, environment=shared_gates.environment) as running:
        yield running

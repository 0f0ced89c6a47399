"""Servers for unmodified client packages, one for each kind of model. `make clients` runs these tests.

Tiny seeded models stand in for published ones. If PENSTOCK_TEST_MODELS names a folder with the real
`reranker-mini` or `smollm2`, those are used instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import (
    write_bert,
    write_cross_encoder,
    write_late,
    write_splade,
    write_token_classifier,
)
from tests.e2e.llama import write_llama
from tests.e2e.server import Server, ServerPool

HERE = Path(__file__).parent
FLAGS = ("--device", "cpu", "--threads", "1")
LABELS = ("negative", "neutral", "positive")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark these tests, and deselect them unless they are selected with `-m clients`."""
    own = [item for item in items if HERE in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.clients)
    if "clients" not in config.option.markexpr:
        items[:] = [item for item in items if item not in own]
        config.hook.pytest_deselected(items=own)


@pytest.fixture(scope="session")
def servers() -> Iterator[ServerPool]:
    pool = ServerPool()
    yield pool
    pool.close()


def real_model(name: str) -> Path | None:
    folder = os.environ.get("PENSTOCK_TEST_MODELS")
    found = Path(folder) / name if folder else None
    return found if found is not None and found.is_dir() else None


Start = Callable[..., Server]


@pytest.fixture(scope="session")
def start(servers: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return a function that starts a server for a written model: `start("name", write, "--flag")`. Calls
    with the same flags share a server."""
    folders: dict[str, Path] = {}

    def begin(name: str, write: Callable[[Path], Path], *flags: str) -> Server:
        if name not in folders:
            folders[name] = real_model(name) or write(tmp_path_factory.mktemp(name))
        return servers.get(str(folders[name]), *FLAGS, "--served-model-name", name, *flags)

    return begin


@pytest.fixture(scope="session")
def embedder(servers: ServerPool) -> Server:
    """A server of the real all-MiniLM-L6-v2."""
    return servers.get(*FLAGS)


@pytest.fixture(scope="session")
def reference() -> Any:
    """The model of `embedder`, in sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    from penstock.checkpoint.find import find

    return SentenceTransformer(str(find(None)))


@pytest.fixture(scope="session")
def truncating_embedder(servers: ServerPool) -> Server:
    return servers.get(*FLAGS, "--auto-truncate")


@pytest.fixture(scope="session")
def reranker(start: Start) -> Server:
    """A reranker. The real reranker-mini has two labels; the second one is relevance."""
    if real_model("reranker-mini") is not None:
        return start("reranker-mini", write_cross_encoder, "--pooler-config", '{"score_labels": [1, 0]}')
    return start("reranker-mini", write_cross_encoder)


@pytest.fixture(scope="session")
def classifier(start: Start) -> Server:
    def write(folder: Path) -> Path:
        names = {str(index): label for index, label in enumerate(LABELS)}
        return write_cross_encoder(folder, labels=len(LABELS), id2label=names)

    return start("classifier", write)


@pytest.fixture(scope="session")
def token_classifier(start: Start) -> Server:
    return start("token-classifier", write_token_classifier)


@pytest.fixture(scope="session")
def late(start: Start) -> Server:
    return start("late", write_late)


@pytest.fixture(scope="session")
def sparse(start: Start) -> Server:
    return start("sparse", write_splade)


@pytest.fixture(scope="session")
def tiny_embedder(start: Start) -> Server:
    """A BERT of a few layers, for tests that do not need real vectors."""
    return start("bert", write_bert)


@pytest.fixture(scope="session")
def generator(start: Start) -> Server:
    return start("smollm2", write_llama)

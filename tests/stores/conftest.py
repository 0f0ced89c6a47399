"""A collection in each kind of store. `make test` runs the embedded ones, `make store-test` all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stores.opensearch_stand_in import StandIn
from tests.stores.postgres import running_postgres

KINDS = [
    "lancedb",
    "qdrant",
    *(pytest.param(kind, marks=pytest.mark.stores) for kind in ("opensearch", "pgvector")),
]
_numbers = itertools.count()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests with database servers unless they are selected with `-m stores`."""
    if "stores" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("stores")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def opensearch() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with running_postgres() as address:
        yield address


@pytest.fixture
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that gives the URL of a new collection in a kind of store."""

    def url(kind: str) -> str:
        name = f"c{next(_numbers)}"
        if kind == "pgvector":
            return f"pgvector:{request.getfixturevalue('postgres')}&table={name}"
        if kind == "opensearch":
            return f"opensearch:{request.getfixturevalue('opensearch').address}/{name}"
        return f"{kind}:{tmp_path}/{kind}/{name}"

    return url


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, new_url: Callable[[str], str]) -> str:
    return new_url(kind)

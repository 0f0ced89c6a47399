"""Tests that start a Ray cluster run only if selected with `-m ray`, as `make scale-test` does."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "ray" not in config.option.markexpr:
        clusters = [item for item in items if item.get_closest_marker("ray") is not None]
        items[:] = [item for item in items if item not in clusters]
        config.hook.pytest_deselected(items=clusters)

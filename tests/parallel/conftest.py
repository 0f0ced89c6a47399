"""Tests with many sizes and real models take minutes: `make parallel-test` runs them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `parallel` unless they are selected with `-m parallel`."""
    if "parallel" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("parallel") is not None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]

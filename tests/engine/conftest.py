from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.chunked import write_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small decoder without weights."""
    return write_decoder(tmp_path_factory.mktemp("models") / "qwen3")

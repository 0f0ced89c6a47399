"""Fixtures of the bench tests: a tokenizer, data files, and a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.stub import Stub, stub
from tests.checkpoints import wordpiece_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and no weights."""
    folder = tmp_path_factory.mktemp("model")
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def server() -> Iterator[Stub]:
    with stub() as running:
        yield running


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A custom data set of 40 prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"the word number {i}"}) + "\n" for i in range(40)))
    return file


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

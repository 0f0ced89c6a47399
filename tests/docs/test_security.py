"""Every promise of SECURITY.md names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
PROMISES = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| cannot")]


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_named_test_exists(file: str, name: str) -> None:
    path = ROOT / file
    assert path.is_file(), f"SECURITY.md names {file}"
    assert re.search(rf"^\s*(?:async )?def {name}\(", path.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("line", PROMISES)
def test_every_promise_names_a_test(line: str) -> None:
    assert "::test_" in line.split("|")[3]

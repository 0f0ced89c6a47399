"""Rules for the tests: nothing imports a test module, and every test module checks something."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST_MODULES = sorted((ROOT / "tests").rglob("test_*.py"))
IMPORT = re.compile(r"^\s*(?:from tests\b.*\btest_\w+|import tests\.\S*\btest_\w+)", re.MULTILINE)
TEST = re.compile(r"^\s*(?:async )?def test_|\.TestCase\b", re.MULTILINE)
CHECK = re.compile(r"\bassert\b|\bassert_\w+\(|\braises\(|\bcheck\w*\(")


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_nobody_imports_a_test_module() -> None:
    files = [file for name in ("tests", "benchmarks", "penstock") for file in (ROOT / name).rglob("*.py")]
    wrong = [f"{named(file)}: {line.strip()}" for file in files for line in IMPORT.findall(file.read_text())]
    assert wrong == [], "move what is shared to a module whose name does not begin with test_"


def test_every_test_module_has_a_test_that_checks_something() -> None:
    texts = {named(file): file.read_text() for file in TEST_MODULES}
    assert [name for name, text in texts.items() if not TEST.search(text)] == []
    assert [name for name, text in texts.items() if not CHECK.search(text)] == []

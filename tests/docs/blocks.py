"""Read the code blocks of README.md and docs/, and the comments that control how tests run them.

A `python` or `bash` block runs unchanged. A comment on the lines above it changes that:

    <!-- not run: REASON -->       it cannot run in a test
    <!-- stand-in: KIND -->        it runs with a small seeded model instead of the model in its code
    <!-- expect: failure -->       its last command must fail
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^\s*```(\S*)")
_COMMENT = re.compile(r"^\s*<!-- (not run|stand-in|expect): (.+) -->$")


@dataclass(frozen=True)
class Block:
    page: str  # path from the root of the repository
    line: int
    language: str
    code: str
    not_run: str | None = None  # the reason
    stand_in: str | None = None
    expects_failure: bool = False

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks() -> list[Block]:
    return [block for page in pages() for block in read_blocks(page)]


def read_blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    comments: dict[str, str] = {}
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if comment := _COMMENT.match(line):
            comments[comment[1]] = comment[2]
        elif fence := _FENCE.match(line):
            begin = number
            while not _FENCE.match(lines[number]):
                number += 1
            found.append(
                Block(
                    str(page.relative_to(ROOT)),
                    begin,
                    fence[1],
                    "\n".join(lines[begin:number]) + "\n",
                    comments.get("not run"),
                    comments.get("stand-in"),
                    comments.get("expect") == "failure",
                )
            )
            number += 1
            comments = {}
        elif line.strip():
            comments = {}
    return found

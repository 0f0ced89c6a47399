"""Write docs/models.md: every family with an example, its tasks, the command and its parity figures.

    python docs/tools/models.py

The families come from `penstock/checkpoint/families.py`, examples from `models.toml`, figures from
docs/parity.md, which `benchmarks/parity_table.py --save` writes.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from penstock.checkpoint.families import CLASS_SUFFIXES, FAMILIES, Family  # noqa: E402
from penstock.types import Task  # noqa: E402

PAGE = ROOT / "docs/models.md"
PARITY = ROOT / "docs/parity.md"
EXAMPLES = Path(__file__).with_name("models.toml")
_ROW = re.compile(r"^\| (\S+)(?: \([^|]*\))? \| (\w+) \|")
_COLUMNS = 10  # columns of the table of pooling tasks in docs/parity.md; generation has a separate table
_HEAD = ("family", "classes", "published in it", "tasks", "command", "fp32", "bf16")
PROSE = """\
# Model families

Every family that Penstock serves natively, with a published model and the tasks that checkpoints of the
family can have. A checkpoint has the tasks of its head, which is the ending of its class name in
`config.json`: {suffixes}.

The last columns are the worst cosines against the reference library over all tasks and layouts of the
family. [Parity](parity.md) has each of them, and says how the bf16 figures are judged.
[Models](reference/models.md) tells which layouts and formats are read. `penstock info MODEL` says what a
model is, and [`penstock verify MODEL`](guides/verify.md) compares it with its reference.

Written by `python docs/tools/models.py` from the families' records and the parity table."""
_ORDER = (Task.EMBED, Task.TOKEN_EMBED, Task.SPARSE, Task.SCORE, Task.CLASSIFY, Task.TOKEN_CLASSIFY)


@dataclass(frozen=True, slots=True)
class Figures:
    """The worst cosines of a family over its tasks and layouts."""

    tasks: tuple[str, ...]
    fp32: float
    bf16: float


def parity() -> dict[str, Figures]:
    found: dict[str, list[tuple[str, float, float]]] = {}
    for line in PARITY.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if (match := _ROW.match(line)) and match[1] in FAMILIES and len(cells) == _COLUMNS:
            found.setdefault(match[1], []).append((match[2], float(cells[4]), float(cells[6])))
    return {
        name: Figures(
            tuple(dict.fromkeys(task for task, _, _ in rows)),
            min(fp32 for _, fp32, _ in rows),
            min(bf16 for _, _, bf16 in rows),
        )
        for name, rows in found.items()
    }


def tasks(family: Family) -> str:
    """All tasks that checkpoints of the family can have. A single checkpoint has the tasks of its head."""
    if family.page_dim is not None:  # there are only token vectors
        return f"{Task.TOKEN_EMBED.value}, {Task.SCORE.value}"
    own = set(family.heads)
    # Models that take labels from the request have no other tasks.
    if own.isdisjoint((Task.ENTITIES, Task.ZERO_SHOT)):
        own |= {Task.EMBED, Task.SCORE} if family.is_dual else {Task.EMBED, Task.TOKEN_EMBED, Task.SCORE}
    if family.is_dual:
        own.add(Task.ZERO_SHOT)  # labels for images
    ordered = [task for task in _ORDER if task in own] + sorted(
        own - set(_ORDER), key=lambda task: task.value
    )
    return ", ".join(task.value for task in ordered)


def page() -> str:
    examples = tomllib.loads(EXAMPLES.read_text(encoding="utf-8"))
    figures = parity()
    groups = {
        "Encoders": [family for family in FAMILIES.values() if not family.is_decoder],
        "Decoders": [family for family in FAMILIES.values() if family.is_decoder],
    }
    lines = [PROSE.format(suffixes=", ".join(f"`{suffix}`" for suffix in CLASS_SUFFIXES))]
    for title, families in groups.items():
        rows = (_row(family, examples[family.name], figures.get(family.name)) for family in families)
        lines += ["", f"## {title}", "", *_table(rows)]
    return "\n".join(lines) + "\n"


def _row(family: Family, example: dict[str, str], figures: Figures | None) -> tuple[str, ...]:
    return (
        f"`{family.name}`",
        f"`{family.class_prefix}*`",
        example["published"],
        tasks(family),
        f"`penstock serve {example['example']}`",
        "–" if figures is None else f"{figures.fp32:.5f}",
        "–" if figures is None else f"{figures.bf16:.4f}",
    )


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(_HEAD)} |"
    yield f"|{'---|' * len(_HEAD)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

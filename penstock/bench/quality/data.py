"""Evaluation data: sentence pairs with a score, and folders in BEIR's layout."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.bench.datasets.files import json_lines
from penstock.bench.quality.scores import Judgements, Values
from penstock.errors import BadValue

_SCORE_NAMES = ("score", "label", "similarity", "similarity_score", "gold")
_TEXT_NAMES = (
    ("sentence1", "sentence2"),
    ("sentence_1", "sentence_2"),
    ("text1", "text2"),
    ("premise", "hypothesis"),
)
_STS_BENCHMARK = (4, 5, 6)  # the columns of the STS benchmark's own files


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    scores: Values
    left: list[str]
    right: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class RetrievalData:
    """Documents, queries, and judgements of which document answers which query."""

    documents: dict[str, str]
    queries: dict[str, str]  # only those with judgements
    qrels: dict[str, Judgements]


def read_pairs(path: str, columns: str | None = None) -> Pairs:
    """Read a CSV or TSV file.

    Its columns are those of `columns` ("5,6,7" or names). Without `columns`, they are found by their names in
    the first line. If it has no such names, they are 5–7 as in the STS benchmark, or the only three columns.
    """
    file = Path(path)
    if not file.is_file():
        raise BadValue(f"--sts {path}: there is no such file", param="sts")
    with file.open(encoding="utf-8", newline="") as lines:
        first = lines.readline()
        lines.seek(0)
        if "\t" in first:  # in TSV files, quotation marks are ordinary characters
            rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
        else:
            rows = list(csv.reader(lines))
    rows = [row for row in rows if row]
    if not rows:
        raise BadValue(f"--sts {path}: the file is empty", param="sts")
    places, named = _places(rows[0], columns, path)
    found = [_pair(row, places, f"{path}, row {n}") for n, row in enumerate(rows, 1) if n > 1 or not named]
    if len(found) < 2:
        raise BadValue(f"--sts {path}: at least two pairs are needed", param="sts")
    scores, left, right = zip(*found, strict=True)
    return Pairs(np.array(scores, np.float64), list(left), list(right))


def _places(first: list[str], columns: str | None, path: str) -> tuple[tuple[int, int, int], bool]:
    """The columns of score and texts, and whether the first row is a header."""
    lower = [cell.strip().lower() for cell in first]
    if columns is not None:
        wanted = [part.strip() for part in columns.split(",")]
        if len(wanted) == 3 and all(part.isdigit() and int(part) > 0 for part in wanted):
            a, b, c = (int(part) - 1 for part in wanted)
            return (a, b, c), a < len(first) and not _is_number(first[a])
        if len(wanted) == 3 and all(part.lower() in lower for part in wanted):
            a, b, c = (lower.index(part.lower()) for part in wanted)
            return (a, b, c), True
        raise BadValue(f"--sts-columns {columns!r}: give score,sentence,sentence as numbers or names")
    score = next((lower.index(name) for name in _SCORE_NAMES if name in lower), None)
    texts = next(
        ((lower.index(a), lower.index(b)) for a, b in _TEXT_NAMES if a in lower and b in lower), None
    )
    if score is not None and texts is not None:
        return (score, *texts), True
    if len(first) >= 7 and _is_number(first[4]):
        return _STS_BENCHMARK, False
    if len(first) == 3 and any(_is_number(cell) for cell in first):
        at = next(i for i, cell in enumerate(first) if _is_number(cell))
        a, b = (i for i in range(3) if i != at)
        return (at, a, b), False
    raise BadValue(f"--sts {path}: cannot tell score and sentences apart; use --sts-columns", param="sts")


def _pair(row: list[str], places: tuple[int, int, int], where: str) -> tuple[float, str, str]:
    score, left, right = places
    if max(places) >= len(row) or not _is_number(row[score]):
        raise BadValue(f"{where}: no score in column {score + 1}, or too few columns", param="sts")
    return float(row[score]), row[left], row[right]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def read_beir(folder: str) -> RetrievalData:
    """Read `corpus.jsonl` and `queries.jsonl` (either may be .gz), and the first of `qrels/test.tsv`,
    `qrels.tsv` and `qrels/dev.tsv`."""
    root = Path(folder)
    if not root.is_dir():
        raise BadValue(f"--beir {folder}: there is no such folder", param="beir")
    documents = {}
    for place, row in json_lines(_one_of(root, "corpus.jsonl", "corpus.jsonl.gz")):
        text = f"{row.get('title') or ''} {row.get('text') or ''}".strip()
        documents[_id(row, place)] = text
    qrels = _read_qrels(_one_of(root, "qrels/test.tsv", "qrels.tsv", "qrels/dev.tsv"))
    queries = {
        _id(row, place): str(row.get("text", ""))
        for place, row in json_lines(_one_of(root, "queries.jsonl", "queries.jsonl.gz"))
    }
    judged = {name: text for name, text in queries.items() if name in qrels}
    if not judged or not documents:
        raise BadValue(f"--beir {folder}: none of its queries has a judgement", param="beir")
    return RetrievalData(documents, judged, {name: qrels[name] for name in judged})


def _one_of(root: Path, *names: str) -> Path:
    for name in names:
        if (root / name).is_file():
            return root / name
    raise BadValue(f"--beir {root}: there is no {' or '.join(names)}", param="beir")


def _id(row: dict[str, object], place: str) -> str:
    if "_id" not in row:
        raise BadValue(f"{place}: no `_id`", param="beir")
    return str(row["_id"])


def _read_qrels(path: Path) -> dict[str, Judgements]:
    """Read lines of query, document and grade, after an optional header."""
    found: dict[str, dict[str, int]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        parts = line.split("\t")
        if len(parts) == 3 and parts[2].strip().lstrip("-").isdigit():
            found.setdefault(parts[0], {})[parts[1]] = int(parts[2])
        elif number > 1 and line.strip():
            raise BadValue(f"{path}, line {number}: give query, document and grade, tab-separated")
    return dict(found)

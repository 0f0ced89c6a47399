"""Quality and similarity of the answers of two stores: overlap@k, nDCG@k and MRR@k.

Ids are compared as texts, because judgement files do not distinguish numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from penstock.errors import BadValue

Gains = Mapping[str, float]  # document id → relevance; documents with 0 or without entry are not relevant
Judgements = dict[str, dict[str, float]]  # query id → gains
_HEADERS = {"query-id", "query_id", "qid"}
_QUERY_KEYS = ("query_id", "query-id", "qid")
_DOCUMENT_KEYS = ("id", "doc_id", "corpus_id", "corpus-id", "docid")
_SCORE_KEYS = ("score", "relevance", "rel")


def overlap(first: Sequence[str], second: Sequence[str], k: int) -> float:
    """Compute the share of the first k of one list that are also among the first k of the other.

    If both lists are shorter than k, because the stores have fewer rows, the longer length is used.
    """
    depth = min(k, max(len(first), len(second)))
    return len(set(first[:k]) & set(second[:k])) / depth if depth else 1.0


def ndcg(found: Sequence[str], gains: Gains, k: int) -> float:
    """Compute nDCG@k: the sum of gain / log2(rank + 1), divided by the best possible sum."""
    best = sorted((gain for gain in gains.values() if gain > 0), reverse=True)[:k]
    ideal = sum(gain / math.log2(rank + 1) for rank, gain in enumerate(best, 1))
    got = sum(max(0.0, gains.get(each, 0.0)) / math.log2(rank + 1) for rank, each in enumerate(found[:k], 1))
    return got / ideal if ideal else 0.0


def reciprocal_rank(found: Sequence[str], gains: Gains, k: int) -> float:
    """Compute 1 / rank of the first relevant document; 0 if none is among the first k."""
    ranks = (rank for rank, each in enumerate(found[:k], 1) if gains.get(each, 0.0) > 0)
    return next((1 / rank for rank in ranks), 0.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Means over the queries. nDCG and MRR cover only queries with at least one relevant document."""

    k: int
    num_queries: int
    overlap: float
    same_first: float  # share of queries whose first document is the same
    num_judged: int = 0
    old_ndcg: float = 0.0
    new_ndcg: float = 0.0
    old_mrr: float = 0.0
    new_mrr: float = 0.0

    @property
    def ndcg_ratio(self) -> float:
        """The new nDCG over the old one."""
        if self.old_ndcg:
            return self.new_ndcg / self.old_ndcg
        return math.inf if self.new_ndcg else 1.0


def compare(
    query_ids: Sequence[str],
    old: Sequence[Sequence[str]],
    new: Sequence[Sequence[str]],
    k: int,
    judgements: Judgements | None = None,
) -> Comparison:
    """Compare what two stores found for the same queries."""
    if not query_ids:
        raise BadValue("there are no queries to compare with", param="--queries")
    overlaps = [overlap(first, second, k) for first, second in zip(old, new, strict=True)]
    firsts = [first[:1] == second[:1] for first, second in zip(old, new, strict=True)]
    plain = Comparison(k, len(query_ids), fmean(overlaps), fmean(firsts))
    if judgements is None:
        return plain
    judged = [
        (judgements[each], first, second)
        for each, first, second in zip(query_ids, old, new, strict=True)
        if any(gain > 0 for gain in judgements.get(each, {}).values())
    ]
    if not judged:
        raise BadValue(
            f"no query has a judged relevant document; queries have ids such as {query_ids[0]!r}, judgements "
            f"such as {next(iter(judgements), None)!r}",
            param="--judgements",
        )
    return Comparison(
        k,
        len(query_ids),
        plain.overlap,
        plain.same_first,
        len(judged),
        fmean(ndcg(first, gains, k) for gains, first, _ in judged),
        fmean(ndcg(second, gains, k) for gains, _, second in judged),
        fmean(reciprocal_rank(first, gains, k) for gains, first, _ in judged),
        fmean(reciprocal_rank(second, gains, k) for gains, _, second in judged),
    )


def table(comparison: Comparison) -> str:
    """Format a comparison as lines of text."""
    k = comparison.k
    lines = [
        f"{comparison.num_queries:,} queries",
        f"{f'overlap@{k}':14}{comparison.overlap:9.3f}",
        f"{'same first':14}{comparison.same_first:9.3f}",
    ]
    if comparison.num_judged:
        lines += [
            f"{comparison.num_judged:,} judged queries",
            f"{'':14}{'old':>9}{'new':>9}",
            f"{f'nDCG@{k}':14}{comparison.old_ndcg:9.3f}{comparison.new_ndcg:9.3f}",
            f"{f'MRR@{k}':14}{comparison.old_mrr:9.3f}{comparison.new_mrr:9.3f}",
        ]
    return "\n".join(lines)


def read_judgements(file: Path) -> Judgements:
    """Read judgements: JSONL (`query_id`, `id`, `score`), TSV with three columns, or TREC's four columns."""
    if not file.is_file():
        raise BadValue(f"there is no file {file}", param="--judgements")
    rows = _jsonl(file) if file.suffix in (".jsonl", ".ndjson") else _columns(file)
    judgements: Judgements = {}
    for query, document, gain in rows:
        judgements.setdefault(query, {})[document] = gain
    if not judgements:
        raise BadValue(f"{file} has no judgements", param="--judgements")
    return judgements


def _columns(file: Path) -> Iterator[tuple[str, str, float]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        parts = line.split("\t") if "\t" in line else line.split()
        if not parts or (number == 1 and parts[0] in _HEADERS):
            continue
        if len(parts) == 4:  # TREC: query, 0, document, relevance
            parts = [parts[0], parts[2], parts[3]]
        if len(parts) != 3 or (gain := _number(parts[2])) is None:
            raise _bad_line(file, number, "query id, document id and score, separated by tabs")
        yield parts[0], parts[1], gain


def _jsonl(file: Path) -> Iterator[tuple[str, str, float]]:
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            row = None
        values = [_first(row, keys) for keys in (_QUERY_KEYS, _DOCUMENT_KEYS, _SCORE_KEYS)]
        gain = _number(values[2])
        if values[0] is None or values[1] is None or gain is None:
            raise _bad_line(file, number, "an object with query_id, id and score")
        yield str(values[0]), str(values[1]), gain


def _first(row: Any, keys: Sequence[str]) -> Any:
    return next((row[key] for key in keys if key in row), None) if isinstance(row, dict) else None


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _bad_line(file: Path, number: int, wanted: str) -> BadValue:
    return BadValue(f"{file}: line {number} is not {wanted}", param="--judgements")

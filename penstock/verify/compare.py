"""Comparison of two libraries' answers to one check: cosines, differences, rankings, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from penstock.types import Task
from penstock.verify.samples import Answers, Check, Sample

# Answers count as the same down to these cosines, and up to these differences of scores.
FP32_COSINE, LOW_PRECISION_COSINE = 0.9999, 0.999
FP32_SCORE, LOW_PRECISION_SCORE = 1e-3, 2e-2
TIE = 1e-4  # documents whose similarities differ by less have no defined order
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How closely two libraries agree in one check."""

    name: str
    inputs: int
    worst_cosine: float | None = None
    mean_cosine: float | None = None
    max_difference: float | None = None  # of a single number
    ordered_alike: float | None = None  # share of document pairs that both rank in the same order
    same_best: float | None = None  # share of queries whose best document is the same
    same_tokens: int | None = None  # inputs for which both have the same token ids; None: not observable
    worst_input: int | None = None
    reasons: tuple[str, ...] = ()  # why the answers are not the same

    @property
    def is_same(self) -> bool:
        return not self.reasons

    def but(self, reason: str) -> Finding:
        """Return a copy with one more reason why the answers differ."""
        return replace(self, reasons=(*self.reasons, reason))


def compare(check: Check, sample: Sample, ours: Answers, theirs: Answers, *, is_fp32: bool) -> Finding:
    same_tokens, token_reason = _tokens(ours, theirs)
    known = Finding(
        name=check.name,
        inputs=len(theirs.values),
        same_tokens=same_tokens,
        reasons=(token_reason,) if token_reason else (),
    )
    if check.task is Task.GENERATE:
        return _same_texts(known, ours, theirs)
    pairs = list(zip(ours.values, theirs.values, strict=True))
    if wrong := next(((mine.shape, other.shape) for mine, other in pairs if mine.shape != other.shape), None):
        return known.but(f"an answer has the shape {list(wrong[0])}, the reference's has {list(wrong[1])}")
    if not all(np.isfinite(value).all() for pair in pairs for value in pair):
        return known.but("an answer has values that are not finite")
    known = replace(
        known, max_difference=max(float(np.abs(mine - other).max(initial=0.0)) for mine, other in pairs)
    )
    if check.task is Task.SCORE:
        return _scores(known, sample, ours, theirs, is_fp32=is_fp32)
    near = np.array([_cosine(mine, other) for mine, other in pairs])
    known = replace(
        known,
        worst_cosine=float(near.min()),
        mean_cosine=float(near.mean()),
        worst_input=int(near.argmin()),
    )
    if check.task in (Task.EMBED, Task.SPARSE):
        ordered, best = _rankings(_similarities(ours.values), _similarities(theirs.values))
        known = replace(known, ordered_alike=ordered, same_best=best)
    bar = FP32_COSINE if is_fp32 else LOW_PRECISION_COSINE
    return known if near.min() >= bar else known.but(f"the worst cosine is {near.min():.5f}, below {bar}")


def _tokens(ours: Answers, theirs: Answers) -> tuple[int | None, str]:
    if ours.tokens is None or theirs.tokens is None:
        return None, ""
    rows = list(zip(ours.tokens, theirs.tokens, strict=True))
    same = sum(mine == other for mine, other in rows)
    if same == len(rows):
        return same, ""
    at = next(number for number, (mine, other) in enumerate(rows) if mine != other)
    mine, other = rows[at]
    position = next(
        (place for place, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b),
        min(len(mine), len(other)),
    )
    return same, (
        f"the tokens of {len(rows) - same} inputs differ; input {at} first at position {position}: "
        f"{_excerpt(mine, position)}, the reference {_excerpt(other, position)}"
    )


def _excerpt(row: Sequence[int], position: int) -> str:
    return f"{list(row[position : position + 4])} of {len(row)} tokens"


def _same_texts(known: Finding, ours: Answers, theirs: Answers) -> Finding:
    differing = [
        number
        for number, (mine, other) in enumerate(zip(ours.values, theirs.values, strict=True))
        if mine.tolist() != other.tolist()
    ]
    if not differing:
        return known
    reason = f"{len(differing)} of {len(theirs.values)} greedy continuations differ"
    return replace(known, worst_input=differing[0]).but(reason)


def _scores(known: Finding, sample: Sample, ours: Answers, theirs: Answers, *, is_fp32: bool) -> Finding:
    mine, other = (np.array([float(value.ravel()[0]) for value in each.values]) for each in (ours, theirs))
    groups = [
        np.array([number for number, _ in rows])
        for _, rows in groupby(enumerate(sample.pairs), key=lambda item: item[1][0])
    ]
    found = [_agreement(mine[rows], other[rows]) for rows in groups if len(rows) > 1]
    pairs = sum(total for _, total, _ in found)
    known = replace(
        known,
        ordered_alike=sum(same for same, _, _ in found) / pairs if pairs else None,
        same_best=sum(best for _, _, best in found) / len(found) if found else None,
        worst_input=int(np.abs(mine - other).argmax()),
    )
    bar, largest = FP32_SCORE if is_fp32 else LOW_PRECISION_SCORE, np.abs(mine - other).max()
    return known if largest <= bar else known.but(f"scores differ by up to {largest:.2g}, above {bar:g}")


def _cosine(first: Array, second: Array) -> float:
    """Compute the smallest cosine over the rows of two matrices. Two zero vectors count as equal."""
    first, second = np.atleast_2d(first), np.atleast_2d(second)
    if first.size == 0:
        return 1.0
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    both_zero = (np.abs(first).max(axis=1) == 0) & (np.abs(second).max(axis=1) == 0)
    near = np.einsum("ij,ij->i", first, second) / np.where(lengths == 0, 1.0, lengths)
    return float(np.where(both_zero, 1.0, near).min())


def _similarities(values: Sequence[Array]) -> Array:
    rows = np.stack(values)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows / np.where(lengths == 0, 1.0, lengths)
    return np.asarray(rows @ rows.T)


def _rankings(mine: Array, other: Array) -> tuple[float | None, float | None]:
    """Compare rankings with each text as a query for all others."""
    if len(mine) < 3:
        return None, None
    keep = ~np.eye(len(mine), dtype=bool)
    found = [_agreement(mine[row][keep[row]], other[row][keep[row]]) for row in range(len(mine))]
    pairs = sum(total for _, total, _ in found)
    return (
        sum(same for same, _, _ in found) / pairs if pairs else None,
        sum(best for _, _, best in found) / len(found),
    )


def _agreement(mine: Array, other: Array) -> tuple[int, int, bool]:
    """Count pairs in the same order and pairs that have an order; check whether the best is the same."""
    gaps = other[:, None] - other[None, :]
    ordered = np.triu(np.abs(gaps) > TIE, k=1)
    same = np.sign(gaps) == np.sign(mine[:, None] - mine[None, :])
    best = bool(other[mine.argmax()] >= other.max() - TIE)
    return int((same & ordered).sum()), int(ordered.sum()), best

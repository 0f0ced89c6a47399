"""Entities from the scores of a GLiNER model: the best spans above a threshold that do not overlap.

As in GLiNER, spans are taken greedily in descending order of score; a span that overlaps a chosen one is
skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadValue
from penstock.outputs.entities import Entity
from penstock.types import Ints

Floats = NDArray[np.float32]
MAX_CANDIDATES = 1 << 20  # candidate spans of one text


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOptions:
    """Which spans are entities. The names are the same as in the HTTP API."""

    threshold: float = 0.5
    flat: bool = True  # entities do not overlap; False: one may be inside another
    multi_label: bool = False  # a span may have several labels


class Candidate(NamedTuple):
    start: int  # first word
    end: int  # last word
    label: int
    score: float


def span_candidates(scores: Floats, num_labels: int, threshold: float) -> list[Candidate]:
    """The spans above the threshold. `scores` [words, widths · labels] are for spans that begin at a word."""
    cube = scores.reshape(len(scores), scores.shape[1] // num_labels, num_labels)
    start, width, label = np.nonzero(cube > threshold)
    inside = start + width < len(scores)
    start, width, label = start[inside], width[inside], label[inside]
    _check_count(len(start), threshold)
    columns = (start, start + width, label, cube[start, width, label])
    return [Candidate(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def word_candidates(scores: Floats, num_labels: int, threshold: float) -> list[Candidate]:
    """The runs of words whose start, end and inside scores exceed the threshold.

    `scores` [words, labels · 3] has these three scores for each word and label.
    """
    cube = scores.reshape(len(scores), num_labels, 3)
    found: list[Candidate] = []
    for label in range(num_labels):
        start, end, inside = cube[:, label].T
        outside = np.flatnonzero(inside < threshold)
        ends = np.flatnonzero(end > threshold)
        for first in np.flatnonzero(start > threshold).tolist():
            beyond = np.searchsorted(outside, first)
            limit = int(outside[beyond]) if beyond < len(outside) else len(scores)
            low, high = np.searchsorted(ends, (first, limit))
            _check_count(len(found) + int(high - low), threshold)
            lowest = np.minimum.accumulate(inside[first:limit])
            for last in ends[low:high].tolist():
                score = min(float(lowest[last - first]), float(start[first]), float(end[last]))
                found.append(Candidate(first, last, label, score))
    found.sort(key=lambda each: (each.start, each.label, each.end))
    return found


def choose(candidates: Sequence[Candidate], options: SpanOptions) -> list[Candidate]:
    """Choose the best candidates that may coexist, ordered by start."""
    verdicts: dict[tuple[int, int], bool] = {}  # span → whether it was chosen
    spans = np.empty((len({(each.start, each.end) for each in candidates}), 2), dtype=np.int32)
    num_spans = 0  # chosen so far
    chosen: list[Candidate] = []
    for each in sorted(candidates, key=lambda candidate: -candidate.score):
        span = (each.start, each.end)
        known = verdicts.get(span)
        if known is None:
            fits = verdicts[span] = not _overlaps(span, spans[:num_spans], options.flat)
            if fits:
                spans[num_spans] = span
                num_spans += 1
        else:
            fits = known and options.multi_label
        if fits:
            chosen.append(each)
    chosen.sort(key=lambda candidate: candidate.start)
    return chosen


def to_entities(text: str, chosen: Sequence[Candidate], chars: Ints, labels: Sequence[str]) -> list[Entity]:
    """The chosen spans as entities. `chars` [words, 2] are the character spans of the text's words."""
    char_spans = chars.tolist()
    return [
        Entity(labels[each.label], each.score, begin, end, text[begin:end])
        for each in chosen
        for begin, end in ((char_spans[each.start][0], char_spans[each.end][1]),)
    ]


def _overlaps(span: tuple[int, int], others: Ints, flat: bool) -> bool:
    """Whether a span shares words with one of the others. Unless `flat`, nested spans do not count."""
    begins, ends = others.T
    meets = (span[0] <= ends) & (begins <= span[1])
    if not flat:
        meets &= ~((span[0] <= begins) & (span[1] >= ends))
        meets &= ~((begins <= span[0]) & (ends >= span[1]))
    return bool(meets.any())


def _check_count(count: int, threshold: float) -> None:
    if count > MAX_CANDIDATES:
        raise BadValue(
            f"more than {MAX_CANDIDATES} spans of one text exceed the threshold of {threshold:g}; raise it",
            param="threshold",
        )

"""Named entities from the label scores of tokens, for all texts of a request at once.

Tokens are grouped as in the token-classification pipeline of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.types import Array, Ints

Aggregation = Literal["none", "simple", "first", "average", "max"]
OUTSIDE = ("O",)  # tag of tokens outside all entities
AGGREGATIONS = ("none", "simple", "first", "average", "max")

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Entity:
    label: str
    score: float
    start: int  # characters within the text
    end: int
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The tokens, words or entities of all texts, concatenated; all arrays are [n]."""

    text: Ints
    begins: Ints
    ends: Ints
    scores: Floats  # [n, labels] before a label is chosen, then [n]

    def grouped(self, new: Flags, scores: Floats) -> _Run:
        """Merge neighbours into groups. `new` is true at the start of each group."""
        starts = np.flatnonzero(new)
        lasts = np.append(starts[1:], len(new)) - 1
        return _Run(self.text[starts], self.begins[starts], self.ends[lasts], scores)


def find_entities(
    texts: Sequence[str],
    scores: Array,  # [tokens, labels]
    lengths: Ints,  # [texts]
    chars: Ints,  # [tokens, 2]
    words: Ints,  # [tokens], -1 for tokens that are not part of the text
    labels: Sequence[str],
    aggregation: Aggregation = "simple",
    ignored: Sequence[str] = OUTSIDE,
) -> list[list[Entity]]:
    """Find the entities of each text, except for entities with `ignored` labels.

    `none` reports every token with its own label. `simple` merges neighbours with the same tag. `first`,
    `average` and `max` choose one label for each word before they merge.
    """
    kept = np.flatnonzero(words >= 0)
    text = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[kept]
    run = _Run(text, chars[kept, 0], chars[kept, 1], scores[kept].astype(np.float32))
    if not len(kept):
        return [[] for _ in texts]
    if aggregation not in ("none", "simple"):
        run = _by_word(run, words[kept], aggregation)
    chosen = run.scores.argmax(axis=1)
    run = _Run(run.text, run.begins, run.ends, run.scores.max(axis=1))
    names, tag_of, begins_entity, ends_entity = _tags(labels)
    if aggregation == "none":
        return _entities(texts, run, chosen, labels, ignored)
    tags = tag_of[chosen]
    new = _changes(run.text) | _changes(tags) | begins_entity[chosen]
    new[1:] |= ends_entity[chosen[:-1]]
    starts = np.flatnonzero(new)
    means = np.add.reduceat(run.scores, starts) / np.diff(np.append(starts, len(new)))
    return _entities(texts, run.grouped(new, means.astype(np.float32)), tags[starts], names, ignored)


def _by_word(run: _Run, words: Ints, aggregation: str) -> _Run:
    new = _changes(run.text) | _changes(words)
    starts = np.flatnonzero(new)
    if aggregation == "first":
        return run.grouped(new, run.scores[starts])
    if aggregation == "average":
        counts = np.diff(np.append(starts, len(new)))
        means = np.add.reduceat(run.scores, starts, axis=0) / counts[:, None]
        return run.grouped(new, means.astype(np.float32))
    peaks = run.scores.max(axis=1)
    group = np.cumsum(new) - 1
    highest = np.flatnonzero(peaks == np.maximum.reduceat(peaks, starts)[group])
    _, firsts = np.unique(group[highest], return_index=True)
    return run.grouped(new, run.scores[highest[firsts]])


def _tags(labels: Sequence[str]) -> tuple[list[str], Ints, Flags, Flags]:
    """The tag names, the tag index of each label, and whether each label begins and ends an entity.

    If the labels include both S-PER and B-PER, for example, they are BIOES labels: E- ends an entity, and S-
    is an entity of a single token.
    """
    known = set(labels)
    is_bioes = any(label.startswith("S-") and f"B-{label[2:]}" in known for label in labels)
    prefixes = ("B-", "I-", "E-", "S-") if is_bioes else ("B-", "I-")
    first, last = (("B-", "S-"), ("E-", "S-")) if is_bioes else (("B-",), ())
    tags = [label[2:] if label.startswith(prefixes) else label for label in labels]
    names = list(dict.fromkeys(tags))
    index_of = {name: index for index, name in enumerate(names)}
    tag_of = np.array([index_of[tag] for tag in tags], dtype=np.int32)
    begins = np.array([label.startswith(first) for label in labels], dtype=bool)
    ends = np.array([label.startswith(last) for label in labels], dtype=bool)
    return names, tag_of, begins, ends


def _changes(values: Array) -> Flags:
    """True at the first value and where a value differs from the one before it."""
    out = np.ones(len(values), dtype=bool)
    out[1:] = values[1:] != values[:-1]
    return out


def _entities(
    texts: Sequence[str], run: _Run, chosen: Array, names: Sequence[str], ignored: Sequence[str]
) -> list[list[Entity]]:
    out: list[list[Entity]] = [[] for _ in texts]
    is_kept = np.array([name not in ignored for name in names], dtype=bool)
    kept = np.flatnonzero(is_kept[chosen])
    columns = (run.text, chosen, run.scores, run.begins, run.ends)
    for text, name, score, begin, end in zip(*(column[kept].tolist() for column in columns), strict=True):
        out[text].append(Entity(names[name], score, begin, end, texts[text][begin:end]))
    return out

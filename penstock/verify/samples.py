"""Inputs, checks and answers of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.types import Task

MAX_QUERIES = 8  # texts without queries become pairs: the first MAX_QUERIES × the first MAX_DOCUMENTS texts
MAX_DOCUMENTS = 16
DEFAULT_TEXTS = (
    "A penstock carries water from the reservoir to the turbines of a power station.",
    "How does a hydroelectric dam turn falling water into electricity?",
    "The turbine's shaft drives a generator; its blades are adjusted to the flow.",
    "water",
    "Who wrote the novel about a whaling ship and its captain?",
    "Herman Melville published Moby-Dick in 1851, and it sold poorly during his lifetime.",
    "The committee postponed the vote, because two of its members were ill.",
    "I really enjoyed this film: the plot was thin, but the acting was superb!",
    "The battery died after a week and nobody answered my emails.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "SELECT name, COUNT(*) FROM visits WHERE year >= 2024 GROUP BY name;",
    "Die Staumauer wurde 1936 fertiggestellt und ist 221 Meter hoch.",
    "Où se trouve la gare la plus proche, s'il vous plaît ?",
    "水力发电站利用水的落差发电。",
    "Гидроэлектростанция превращает энергию воды в электричество.",
    "توجد محطة الطاقة عند سفح السد.",
    "Prices rose by 3.75 % in Q2 (from €1,204.50 to €1,249.67).",
    "naïve café — “quotes”, ellipsis… and emoji 🚰⚡",
    "John Smith flew from Berlin to New York on 4 July to meet engineers at Siemens.",
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer",
    "Photosynthesis lets plants turn light, water and carbon dioxide into sugar and oxygen.",
    "The recipe needs two eggs, a cup of flour, half a cup of milk and a pinch of salt.",
    "Gravity pulls water down the pipe, and its pressure grows with the height of the fall. " * 12,
    "The quick brown fox jumps over the lazy dog. " * 60,
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The inputs of one comparison."""

    texts: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]  # (query, document); pairs with the same query are adjacent

    @classmethod
    def of(cls, texts: Sequence[str], queries: Sequence[str] | None = None) -> Sample:
        """`queries` has one query for each text. Without them, the first texts are used as queries."""
        if queries is not None:
            return cls(tuple(texts), tuple(zip(queries, texts, strict=True)))
        asked = list(texts)[:MAX_QUERIES]
        grid = ((query, document) for query in asked for document in list(texts)[:MAX_DOCUMENTS])
        return cls(tuple(texts), tuple(grid))


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: a task, with the options of Penstock's call."""

    name: str
    task: Task
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """A library's answers: one array and one list of token ids for each input."""

    values: list[NDArray[np.float64]]
    tokens: list[list[int]] | None  # None: not observable


def array(value: Any) -> NDArray[np.float64]:
    return np.asarray(value, dtype=np.float64)

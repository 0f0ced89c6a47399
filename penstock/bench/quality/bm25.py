"""BM25 over a small corpus. It selects candidates for rerankers, so that their evaluation needs no other
model."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

_WORD = re.compile(r"\w+")
_K1, _B = 0.9, 0.4  # the values that BEIR's baselines use


class Bm25:
    def __init__(self, documents: Mapping[str, str]) -> None:
        self.ids = list(documents)
        counts = [Counter(words(text)) for text in documents.values()]
        lengths = np.array([sum(count.values()) for count in counts], np.float64)
        self._norm = _K1 * (1 - _B + _B * lengths / max(1.0, float(lengths.mean())))
        self._where: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for place, count in enumerate(counts):
            for word, times in count.items():
                self._where[word].append((place, times))

    def top(self, query: str, count: int) -> list[str]:
        """Ids of the best documents, best first. Only documents that share a word with the query."""
        scores = np.zeros(len(self.ids))
        for word in set(words(query)):
            if found := self._where.get(word):
                documents, times = (np.array(column) for column in zip(*found, strict=True))
                rarity = math.log(1 + (len(self.ids) - len(found) + 0.5) / (len(found) + 0.5))
                scores[documents] += rarity * times * (_K1 + 1) / (times + self._norm[documents])
        order = np.argsort(-scores, kind="stable")[:count]
        return [self.ids[i] for i in order if scores[i] > 0]


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())

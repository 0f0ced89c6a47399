"""An engine's answers, to compare several ranks with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import Engine, SamplingParams

TEXTS = [
    "the quick brown fox",
    "water and oil do not mix",
    "word " * 40,
    "is it",
    "what all were we when your can said there use an each which she do how their if will up other",
]
MIN_COSINE = 0.99999


def vectors(folder: Path | str, **options: Any) -> NDArray[np.float32]:
    with Engine(str(folder), **options) as engine:
        return np.concatenate([engine.embed(TEXTS), engine.embed(TEXTS[:1])])


def scores(folder: Path | str, **options: Any) -> NDArray[np.float32]:
    with Engine(str(folder), **options) as engine:
        return np.array(engine.score("water and oil", TEXTS), dtype=np.float32).reshape(-1)


def tokens(folder: Path | str, max_tokens: int = 16, **options: Any) -> list[list[int]]:
    """Greedy tokens of several prompts, some with a common prefix, together and one at a time."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    with Engine(str(folder), **options) as engine:
        found = engine.generate(TEXTS, sampling) + engine.generate(TEXTS[2], sampling)
        return [list(each.token_ids) for each in found]


def cosines(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    found: NDArray[np.float32] = (a * b).sum(axis=1) / lengths
    return found

"""Natural English paragraphs of mixed length, from the documentation in every Python installation."""

from __future__ import annotations

import itertools
import random
import re
from pydoc_data import topics


def natural_texts(count: int, seed: int = 0) -> list[str]:
    """`count` paragraphs of the Python language reference, shuffled."""
    paragraphs = []
    for topic in sorted(topics.topics):
        for block in re.split(r"\n\s*\n", topics.topics[topic]):
            text = " ".join(block.split())
            if 20 <= len(text) <= 4000 and sum(c.isalpha() for c in text) > 0.6 * len(text):
                paragraphs.append(text)
    paragraphs = sorted(set(paragraphs))
    random.Random(seed).shuffle(paragraphs)
    while len(paragraphs) < count:
        paragraphs += [f"{a} {b}" for a, b in itertools.pairwise(paragraphs)]
    return paragraphs[:count]

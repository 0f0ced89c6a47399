"""Natural English paragraphs of mixed length, from the documentation that every Python installation has."""

from __future__ import annotations

import itertools
import math
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


def mixed_texts(count: int, seed: int = 0, median_words: int = 42, sigma: float = 0.9) -> list[str]:
    """Pieces of running text whose lengths vary like those of stored paragraphs. With a BERT vocabulary the
    mean is 110 tokens, the median 70, and p99 540."""
    draw = random.Random(seed)
    words = " ".join(natural_texts(4000)).split()
    texts = []
    for _ in range(count):
        size = max(3, min(1500, round(draw.lognormvariate(math.log(median_words), sigma))))
        first = draw.randrange(len(words) - size)
        texts.append(" ".join(words[first : first + size]))
    return texts

"""The shapes that steps of natural texts take: what is captured before any shape is known."""

from __future__ import annotations

from collections import Counter

import numpy as np

from penstock.runner.buckets import Bucket, bucket_of

# Lengths of texts in tokens, log-normal: half of them have up to 64, one in a hundred more than 600.
MEDIAN_LENGTH, SPREAD = 64, 1.0
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)  # of a step
STEPS = 48  # drawn for each number of rows
SINGLE_ROW_WEIGHT = 4  # a request that runs alone waits for nothing but its own step


def likely_buckets(max_length: int, max_tokens: int, max_rows: int) -> Counter[Bucket]:
    """Buckets of steps with few to many rows, and how often they come if every number of rows does equally
    often. The same on every start."""
    draw = np.random.default_rng(0)
    counts: Counter[Bucket] = Counter()
    for rows in ROWS:
        lengths = draw.lognormal(np.log(MEDIAN_LENGTH), SPREAD, (STEPS, rows)).astype(int)
        lengths = lengths.clip(1, max_length)
        weight = SINGLE_ROW_WEIGHT if rows == 1 else 1
        for tokens, longest in zip(lengths.sum(1).tolist(), lengths.max(1).tolist(), strict=True):
            fits = tokens <= max_tokens and rows <= max_rows
            bucket = bucket_of(tokens, rows, longest) if fits else None
            if bucket is not None:
                counts[bucket] += weight
    return counts

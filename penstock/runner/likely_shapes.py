"""Likely shapes of steps with natural texts, which are captured before any request."""

from __future__ import annotations

from collections import Counter

import numpy as np

from penstock.runner.buckets import Bucket, bucket_of

# Text lengths in tokens are log-normal: the median is 64, and one in a hundred exceeds 600.
MEDIAN_LENGTH, SPREAD = 64, 1.0
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)  # rows of a step
STEPS = 48  # sampled steps for each number of rows
SINGLE_ROW_WEIGHT = 4  # the latency of a request that runs alone is its step time


def likely_buckets(max_length: int, max_tokens: int, max_rows: int) -> Counter[Bucket]:
    """Buckets of likely steps with their frequencies, if all numbers of rows are equally frequent. The result
    is the same on every start."""
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

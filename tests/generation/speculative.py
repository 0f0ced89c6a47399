"""Settings of speculation, and prompts that it predicts well."""

from __future__ import annotations

from penstock import Engine
from penstock.scheduler.speculation import Speculation

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
ALWAYS = NGRAM | {"adaptive": False}
REPETITIVE = [[7, 8, 9, 10, 11] * 6, [3, 4] * 20, [*range(5, 40), *range(5, 30)], [6]]


def speculation_of(used: Engine) -> Speculation:
    generation = used.local.engine.core.generation
    assert generation is not None and generation.speculation is not None
    return generation.speculation

"""Settings for speculation, and prompts whose continuations it predicts well."""

from __future__ import annotations

from penstock import Engine
from penstock.scheduler.speculation import Speculation
from penstock.types import SamplerParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
ALWAYS = NGRAM | {"adaptive": False}
REPETITIVE = [[7, 8, 9, 10, 11] * 6, [3, 4] * 20, [*range(5, 40), *range(5, 30)], [6]]

KINDS: dict[str, SamplerParams] = {
    "greedy": SamplerParams(temperature=0),
    "seeded": SamplerParams(temperature=0.4, seed=3),
    "filters": SamplerParams(temperature=0.8, seed=4, top_k=8, top_p=0.9, min_p=0.02),
    "logprobs": SamplerParams(temperature=0, logprobs=3),
    "prompt logprobs": SamplerParams(temperature=0, logprobs=0, prompt_logprobs=1),
    "penalties": SamplerParams(temperature=0, presence_penalty=0.6, repetition_penalty=1.3),
    "bias": SamplerParams(temperature=0, logit_bias={7: 2.0}),
    "bad words": SamplerParams(temperature=0, bad_token_ids=((8,), (9, 10))),
    "allowed": SamplerParams(temperature=0.5, seed=9, allowed_token_ids=tuple(range(4, 60))),
    "min tokens": SamplerParams(temperature=0, min_tokens=9, stop_token_ids=tuple(range(0, 96, 2))),
    "stop tokens": SamplerParams(temperature=0, stop_token_ids=tuple(range(0, 96, 7))),
}


def speculation_of(used: Engine) -> Speculation:
    generation = used.local.engine.core.generation
    assert generation is not None and generation.speculation is not None
    return generation.speculation

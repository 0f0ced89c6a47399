"""Generation and chunked prefill with an fp8 KV cache: close to full precision, with half the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import SamplingParams
from penstock.errors import ConfigError
from tests.checkpoints import write_bert
from tests.generation.families import TOKENS, check_nothing_is_held, engine, logits_after, prompts, write

FAMILIES = ("qwen3", "gemma2")  # plain attention, and soft-capped scores with sliding windows
DRAWN = SamplingParams(max_tokens=TOKENS, temperature=1.5, seed=5, ignore_eos=True, logprobs=0)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"pipeline_depth": 2},
    "chunked": {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 13, "pipeline_depth": 2},
    "preempted": {"kv_cache_gb": 1e-9, "max_num_batched_tokens": 40},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name: str = request.param
    return name, write(name, tmp_path_factory.mktemp("fp8") / name)


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_stay_near_those_of_transformers(model: tuple[str, Path], way: str) -> None:
    name, folder = model
    errors = []
    with engine(folder, kv_cache_dtype="fp8", **WAYS[way]) as used:
        for row, got in zip(prompts(), used.generate(prompts(), DRAWN), strict=True):
            assert got.logprobs is not None
            values = logits_after(name, folder, row, got.token_ids).log_softmax(-1)
            own = values.gather(1, torch.tensor(got.token_ids)[:, None]).numpy()
            errors.append(np.abs(np.asarray(got.logprobs.values) - own).ravel())
        check_nothing_is_held(used)
    found = np.concatenate(errors)
    assert 1e-6 < found.mean() < 0.02 and found.max() < 0.2  # rounded, but only a little


def test_the_cache_takes_about_half_the_memory(model: tuple[str, Path]) -> None:
    def held(**options: Any) -> int:
        with engine(model[1], **options) as used:
            cache = used.local.engine.core.runner.cache
            return int(cache.store.nbytes)

    # Heads are small: there is a scale of 4 bytes for each 16 or 32 values.
    assert held(kv_cache_dtype="fp8") < 0.4 * held()  # the model is in fp32


def test_other_formats_and_models_without_a_cache_are_refused(
    model: tuple[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="one of auto, fp8, fp8_e4m3"):
        engine(model[1], kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ConfigError, match="keeps no KV cache"):
        engine(write_bert(tmp_path / "bert"), kv_cache_dtype="fp8")

"""An engine with two ranks in processes: answers equal to one device, and the death of a rank.

`make parallel-test` runs many more models and sizes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock import Engine, SamplingParams
from penstock.errors import EngineUnavailable
from penstock.runner.parallel.runner import ParallelRunner
from tests.parallel.answers import MIN_COSINE, TEXTS, cosines
from tests.parallel.checkpoints import EXPERTS, write_checkpoint
from tests.waiting import wait_until

# A model with experts that embeds and generates, in steps shorter than its rows.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "kv_cache_gb": 0.01,
    "max_num_batched_tokens": 32,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "enable_generation": True,
}
SAMPLING = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """An engine with one rank, and one with two."""
    folder = write_checkpoint(tmp_path_factory.mktemp("ranks"), EXPERTS, pooling="lasttoken")
    with Engine(str(folder), **OPTIONS) as one, Engine(str(folder), tensor_parallel_size=2, **OPTIONS) as two:
        yield one, two


def rank_process(engine: Engine) -> Any:
    runner = engine.local.engine.core.runner
    assert isinstance(runner, ParallelRunner)
    return runner._ranks._processes[0]


def test_vectors_are_those_of_one_rank(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    assert cosines(one.embed(TEXTS), two.embed(TEXTS)).min() > MIN_COSINE
    assert cosines(one.embed(TEXTS[2]), two.embed(TEXTS[2])).min() > MIN_COSINE  # with the prefix cache


def test_greedy_tokens_and_their_probabilities_are_those_of_one_rank(engines: tuple[Engine, Engine]) -> None:
    expected, found = (engine.generate(TEXTS, SAMPLING) for engine in engines)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    for a, b in zip(found, expected, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            np.testing.assert_allclose(getattr(a, name).values, getattr(b, name).values, atol=1e-4)


def test_the_settings_show_the_size(engines: tuple[Engine, Engine]) -> None:
    assert [engine.settings.tensor_parallel_size for engine in engines] == [1, 2]


def test_a_rank_that_dies_ends_the_engine_with_a_reason(engines: tuple[Engine, Engine]) -> None:
    _, two = engines
    os.kill(rank_process(two).pid, signal.SIGKILL)
    wait_until(lambda: not two.local.engine.ready)
    with pytest.raises(EngineUnavailable, match="rank 1 of this engine was killed by signal 9"):
        two.embed(TEXTS)

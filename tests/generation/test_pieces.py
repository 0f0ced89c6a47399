"""A real model gives each sequence the tokens that it would get alone, however prompts are chunked."""

from __future__ import annotations

from collections import deque
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kvcache.blocks import BlockPool
from penstock.runner.base import BLOCK_SIZE
from penstock.scheduler import prefill_budget
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.types import GeneratedTokens, PoolingParams, Request, SampledResult, SamplerParams, Task
from tests.generation.fakes import split_decoded
from tests.kernels.generators import BLOCKS, LENGTH, SLOTS, make_runner
from tests.thinning import num_examples

PROMPTS = [list(range(5, 5 + length)) for length in (1, 3, 17, 30, 33, 40)] + [[9] * 20, [9] * 35]
OUTPUT = 8


def request_of(name: str, prompt: list[int], **options: object) -> Request:
    sampling = SamplerParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True, **options)  # type: ignore[arg-type]
    ids, lengths = np.array(prompt, dtype=np.int32), np.array([len(prompt)], dtype=np.int32)
    return Request(name, ids, lengths, PoolingParams(Task.GENERATE), sampling=sampling)


@cache
def alone(number: int) -> tuple[list[int], list[float]]:
    """Tokens and prompt log probabilities of one prompt that runs alone, prefilled in one chunk."""
    generation = GenerationScheduler(
        BlockPool(BLOCKS, BLOCK_SIZE), GenerationLimits(SLOTS, 64, 64, LENGTH, 999)
    )
    generation.add(request_of("0", PROMPTS[number], prompt_logprobs=1))
    runner, tokens, logprobs = make_runner(graphs=False), [], []
    while (plan := generation.schedule(0.0)) is not None:
        result = runner.launch(plan).result()
        assert isinstance(result, SampledResult)
        for part in split_decoded(list(generation.collect(plan, result))):
            assert isinstance(part, GeneratedTokens)
            tokens += part.token_ids.tolist()
            if part.prompt_logprobs is not None:
                logprobs += part.prompt_logprobs.ravel().tolist()
    runner.close()
    return tokens, logprobs


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> object:
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("MIN_PIECE", 4), ("MIN_PROGRESS", 2), ("STEP_SIZES", (4, 8, 16, 24))):
            patch.setattr(prefill_budget, name, size)
        yield


@given(data=st.data())
@settings(max_examples=num_examples(25), deadline=None)
def test_any_schedule_gives_the_tokens_of_running_each_sequence_alone(data: st.DataObject) -> None:
    choose = data.draw
    limits = GenerationLimits(
        SLOTS,
        max_tokens=choose(st.integers(SLOTS, 48)),
        max_chunk_tokens=choose(st.integers(1, 40)),
        max_length=LENGTH,
        max_queued_tokens=10_000,
        prefix_caching=choose(st.booleans()),
        target_itl_s=choose(st.sampled_from([0.004, 0.01, 0.03])),
        max_partial_prefills=choose(st.integers(0, 2)),
    )
    generation = GenerationScheduler(BlockPool(choose(st.integers(6, BLOCKS)), BLOCK_SIZE), limits)
    runner, waiting = make_runner(graphs=False), choose(st.permutations(range(len(PROMPTS))))
    asks = choose(st.sampled_from(waiting))  # the request with prompt log probabilities
    cancelled = choose(st.sampled_from([-1, *waiting]))
    found: dict[int, tuple[list[int], list[float]]] = {number: ([], []) for number in waiting}
    in_flight: deque[tuple[object, object]] = deque()
    queue = list(waiting)
    for step in range(2000):
        if queue and (not generation.busy or choose(st.booleans())):
            number = queue.pop()
            options = {"prompt_logprobs": 1} if number == asks else {}
            generation.add(request_of(str(number), PROMPTS[number], **options))
        if step == 9:
            generation.cancel(str(cancelled))
        while len(in_flight) < 2 and (plan := generation.schedule(0.0)) is not None:
            in_flight.append((plan, runner.launch(plan).result()))
        if not in_flight:
            if not queue and not generation.busy:
                break
            continue
        plan, result = in_flight.popleft()
        assert isinstance(result, SampledResult)
        timed = result.timed(0.003 + 0.0003 * plan.num_tokens)  # type: ignore[attr-defined]
        for part in split_decoded(list(generation.collect(plan, timed))):  # type: ignore[arg-type]
            assert isinstance(part, GeneratedTokens)
            found[int(part.id)][0].extend(part.token_ids.tolist())
            if part.prompt_logprobs is not None:
                found[int(part.id)][1].extend(part.prompt_logprobs.ravel().tolist())
        generation.check_integrity()
    assert not generation.busy and not queue
    runner.close()
    for number, (tokens, logprobs) in found.items():
        expected, close = alone(number)
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == OUTPUT or number == cancelled
        if number == asks and number != cancelled:
            np.testing.assert_allclose(logprobs, close, rtol=1e-4, atol=1e-4)

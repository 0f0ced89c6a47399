"""Mixed steps of prompts and decodes as CUDA graphs run them, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels import language
from penstock.kvcache.blocks import BlockPool
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.capture import Work
from penstock.runner.mixed import MAX_CACHED_KEYS, Key, MixedGraphs, warm_up_keys
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.types import (
    GeneratedTokens,
    GeneratePlan,
    Join,
    PoolingParams,
    Request,
    SampledResult,
    SamplerParams,
    Task,
)
from tests.generation.fakes import split_decoded
from tests.kernels.generators import BLOCKS, LENGTH, SLOTS, fake, make_runner, sampling
from tests.thinning import ALL_CASES, thorough

PROMPTS = [[5] * 3, [9] * 18, [11, 12, 13], [14] * 9, [7, 8], [21] * 20]  # few, as kernels are interpreted
GREEDY = sampling(temperature=0.0)
KINDS = {
    "greedy": [GREEDY] * 6,
    "noise": [GREEDY, sampling(seed=3), GREEDY, sampling(seed=4, temperature=0.5), GREEDY, GREEDY],
    "filtered": [sampling(seed=3, top_k=5), GREEDY, sampling(seed=5, top_p=0.8), GREEDY, GREEDY, GREEDY],
    "edited": [sampling(temperature=0.0, presence_penalty=1.0), *[GREEDY] * 4, sampling(seed=2)],
    "logprobs": [sampling(temperature=0.0, logprobs=2), *[GREEDY] * 4, sampling(seed=1, logprobs=0)],
}
Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    if not language.IS_INTERPRETED:
        pytest.skip("on a CUDA device tests/gpu/test_generation.py replays real graphs")
    before = language._devices
    language.set_kernel_devices("cpu", "cuda")
    yield
    language.set_kernel_devices(*before)


@pytest.fixture
def captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture a shape at its first step. Shapes are small, because kernels are interpreted."""
    monkeypatch.setattr("penstock.runner.mixed.STEP_SIZES", (8, 16, 24, 32))
    monkeypatch.setattr("penstock.runner.mixed.DECODES", (4, 8))
    monkeypatch.setattr("penstock.runner.mixed.MixedGraphs.uses_before_capture", 0)
    monkeypatch.setattr("penstock.runner.mixed._CAPTURE_PAUSE", -1.0)


def mixed_runner(capture: object = fake, layers: int = 1) -> ModelRunner:
    runner = make_runner(graphs=False, dtype=torch.float16, layers=layers)
    assert runner.generator is not None and runner.cache is not None
    runner.mixed = MixedGraphs(
        runner.model,
        runner.generator,
        runner.staging,
        runner.cache.store,
        capture,  # type: ignore[arg-type]
    )
    return runner


def make_scheduler(chunk: int, blocks: int = BLOCKS, prefixes: bool = False) -> GenerationScheduler:
    limits = GenerationLimits(SLOTS, 24, chunk, LENGTH, 1000, prefix_caching=prefixes)
    return GenerationScheduler(BlockPool(blocks, BLOCK_SIZE), limits)


def add(generation: GenerationScheduler, number: int, params: SamplerParams) -> None:
    ids = np.array(PROMPTS[number], dtype=np.int32)
    lengths = np.array([len(ids)], dtype=np.int32)
    generation.add(Request(str(number), ids, lengths, PoolingParams(Task.GENERATE), sampling=params))


def is_mixed(plan: GeneratePlan) -> bool:
    return 0 < plan.paged.num_rows < plan.num_rows


def run(
    runner: ModelRunner, params: list[SamplerParams], chunk: int = 12, arrivals: tuple[int, ...] = (2, 3)
) -> Answers:
    """Tokens and log probabilities of each prompt. Two prompts start at once; two more arrive at each step in
    `arrivals`."""
    generation = make_scheduler(chunk)
    found: Answers = [([], []) for _ in PROMPTS]
    add(generation, 0, params[0])
    add(generation, 1, params[1])
    num_added, num_mixed = 2, 0
    for step in range(300):
        for _ in range(2 * arrivals.count(step)):
            add(generation, num_added, params[num_added])
            num_added += 1
        if (plan := generation.schedule(0.0)) is None:
            break
        num_mixed += is_mixed(plan)
        result = runner.launch(plan).result()
        assert isinstance(result, SampledResult)
        for part in split_decoded(list(generation.collect(plan, result))):
            assert isinstance(part, GeneratedTokens)
            tokens, logprobs = found[int(part.id)]
            tokens.extend(part.token_ids.tolist())
            if part.logprobs is not None:
                logprobs.extend(part.logprobs.ravel().tolist())
        generation.check_integrity()
    assert not generation.busy and num_mixed >= 3
    if runner.mixed is not None and runner.mixed.captured:
        assert runner.mixed.replays == num_mixed
    return found


def poison(runner: ModelRunner) -> None:
    """Fill the buffers with stale data of a larger step, which a step must not read."""
    assert runner.mixed is not None
    runner.mixed.integers.fill_(3)
    take = runner.staging.pinned_ints
    runner.staging.pinned_ints = lambda size: take(size).fill_(1)  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", KINDS if ALL_CASES else ("filtered",))
def test_a_graph_gives_the_tokens_of_steps_without_one(kind: str, captured_at_once: None) -> None:
    layers = 2 if kind == "greedy" else 1
    expected = run(make_runner(graphs=False, dtype=torch.float16, layers=layers), KINDS[kind])
    runner = mixed_runner(layers=layers)
    poison(runner)
    got = run(runner, KINDS[kind])
    assert runner.mixed is not None and runner.mixed.captured
    samples = {key.samples for key in runner.mixed.captured}
    assert (False in samples) == (kind in ("edited", "logprobs"))
    assert any(key.filters for key in runner.mixed.captured) == (kind == "filtered")
    for (tokens, logprobs), (same, close) in zip(got, expected, strict=True):
        assert tokens == same and len(tokens) == GREEDY.max_tokens
        np.testing.assert_allclose(logprobs, close, rtol=2e-3, atol=2e-3)


@thorough
@pytest.mark.parametrize(("chunk", "arrivals"), [(7, (1, 5)), (17, (3, 4))])
def test_any_chunks_and_arrivals_give_the_same_tokens(
    chunk: int, arrivals: tuple[int, ...], captured_at_once: None
) -> None:
    expected = run(make_runner(graphs=False, dtype=torch.float16), KINDS["noise"])
    assert [tokens for tokens, _ in run(mixed_runner(), KINDS["noise"], chunk, arrivals)] == [
        tokens for tokens, _ in expected
    ]


def test_a_capture_changes_no_sequence() -> None:
    runner = mixed_runner()
    assert runner.mixed is not None and runner.generator is not None and runner.cache is not None
    generator, keys = runner.generator, runner.cache.store.keys
    last, positions, kept = generator.last.clone(), generator.sampler.positions.clone(), keys.clone()
    with torch.inference_mode():
        for key in [Key(64, 8, 4, 64, 256, 12, True, False)]:
            assert runner.mixed.ensure(key) is not None
    assert torch.equal(generator.last[:-1], last[:-1]) and torch.equal(keys, kept)
    assert torch.equal(generator.sampler.positions[:-1], positions[:-1])


def test_steps_run_without_a_graph_when_capture_fails(captured_at_once: None) -> None:
    def broken(work: Work) -> tuple[Callable[[], None], list[Tensor]]:
        raise RuntimeError("no")

    runner = mixed_runner(capture=broken)
    expected = run(make_runner(graphs=False, dtype=torch.float16), KINDS["noise"])
    assert run(runner, KINDS["noise"]) == expected
    assert runner.mixed is not None and not runner.mixed.captured
    assert runner.mixed.gave_up and not runner.mixed.is_usable


@thorough
def test_a_frequent_shape_is_captured_after_a_pause() -> None:
    now = 0.0
    runner = mixed_runner()
    assert runner.mixed is not None
    mixed = runner.mixed
    mixed.clock = lambda: now
    make, key = mixed._make_graph, Key(64, 8, 4, 64, 256, 12, True, False)

    def slow(key: Key) -> object:
        nonlocal now
        now += 1.0
        return make(key)

    mixed._make_graph = slow  # type: ignore[assignment]
    other = key._replace(tokens=192)
    with torch.inference_mode():
        uses = [mixed._graph_for(key) is not None for _ in range(6)]
        assert uses == [False] * 2 + [True] * 4
        for _ in range(6):
            assert mixed._graph_for(other) is None  # 192 tokens do not fit into 64
        now += 1.1
        assert mixed._graph_for(other) is not None


def test_a_graph_serves_steps_that_fit_and_are_not_much_smaller() -> None:
    large = Key(192, 16, 4, 192, 256, 20, True, True)
    assert large.serves(large)
    assert large.serves(Key(128, 8, 4, 128, 64, 12, True, False))
    assert large.serves(Key(64, 8, 4, 64, 256, 12, True, False))  # small enough for any step
    larger = large._replace(tokens=1024, max_length=1024)
    assert larger.serves(large._replace(tokens=768)) and not larger.serves(large._replace(tokens=512))
    assert not large.serves(Key(192, 32, 4, 192, 256, 20, True, True))
    assert not large.serves(Key(192, 16, 16, 192, 256, 20, True, True))
    assert not large.serves(Key(192, 16, 4, 192, 1024, 20, True, True))
    assert not large.serves(Key(192, 16, 4, 192, 256, 36, True, True))
    assert not large.serves(large._replace(samples=False))
    assert not large.serves(large._replace(adapter_rank=16))
    assert not large._replace(filters=False).serves(large)


def test_dropped_mixed_graphs_are_not_expected_again() -> None:
    now = 100.0
    mixed = mixed_runner().mixed
    assert mixed is not None
    mixed.clock = lambda: now
    with torch.inference_mode():
        mixed.ensure(Key(32, 8, 4, 32, 256, 12, True, False))
    assert mixed.is_usable
    mixed.drop()  # as if memory ran out: prompts and decodes alternate for a while
    assert not mixed.is_usable
    now += 61.0
    assert mixed.is_usable


def mixed_plan() -> GeneratePlan:
    """One decode and one prompt chunk."""
    generation = make_scheduler(chunk=12)
    add(generation, 0, GREEDY)
    for _ in range(2):
        plan = generation.schedule(0.0)
        assert plan is not None
        new = np.full(len(plan.sample.sampled_rows), 4, dtype=np.int32)
        generation.collect(plan, SampledResult(new))
    add(generation, 1, GREEDY)
    plan = generation.schedule(0.0)
    assert plan is not None and plan.lengths.tolist() == [1, 12]
    return plan


def test_a_step_that_cannot_be_replayed_has_no_key() -> None:
    runner, plan = mixed_runner(), mixed_plan()
    assert runner.mixed is not None and runner.generator is not None
    runner.generator.update_slots(plan.sample)
    key = runner.mixed.key_of(plan)
    assert key == Key(32, 8, 4, 32, 256, 12, True, False)
    of_images = replace(plan, rope_positions=np.zeros(3, dtype=np.int32))
    assert runner.mixed.key_of(of_images) is None
    many = np.zeros(MAX_CACHED_KEYS + 1, dtype=np.int32)
    assert runner.mixed.key_of(replace(plan, kv=replace(plan.kv, read_slots=many))) is None
    nothing = plan.sample.sampled_tokens[:0]
    none_sampled = replace(plan.sample, sampled_tokens=nothing, sampled_slots=nothing, sampled_rows=nothing)
    assert runner.mixed.key_of(replace(plan, sample=none_sampled)) is None


def test_a_row_may_sample_at_several_of_its_tokens() -> None:
    """The logits of any token can be read, which verifying proposals needs."""
    runner, plan = mixed_runner(), mixed_plan()
    assert runner.mixed is not None and runner.generator is not None
    sample_ids = np.array([5], dtype=np.int32)
    places = np.array([0, 3, 4, 12], dtype=np.int32)  # tokens of the decode, and of the prompt's chunk
    sample = replace(
        plan.sample,
        sampled_tokens=places,
        sampled_rows=np.array([0, 1, 1, 1], dtype=np.int32),
        sampled_slots=np.array([0, 1, 2, 3], dtype=np.int32),
        num_logprobs=np.full(4, -1, dtype=np.int32),
        joins=tuple(Join(slot, GREEDY, sample_ids) for slot in range(4)),
    )
    plan = replace(plan, sample=sample)
    expected = runner.launch(plan).result()
    plan = replace(plan, sample=replace(sample, joins=()))
    runner.mixed.ensure(Key(32, 8, 4, 32, 256, 12, True, False))
    got = runner.launch(plan).result()
    assert runner.mixed.replays == 1
    assert isinstance(got, SampledResult) and isinstance(expected, SampledResult)
    assert got.token_ids.tolist() == expected.token_ids.tolist() and len(got.token_ids) == 4


def test_the_first_graphs_cover_as_many_decodes_as_can_run() -> None:
    keys = warm_up_keys(1024)
    assert {key.decodes for key in keys} == {8, 16, 32, 64} and {key.prompts for key in keys} == {4, 16}
    assert {key.decodes for key in warm_up_keys(16)} == {8, 16}
    assert all(key.decodes < key.tokens and key.sampled == key.decodes + key.prompts for key in keys)
    assert len(set(keys)) == len(keys)

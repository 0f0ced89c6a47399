"""Decode steps as CUDA graphs run them, in Triton's interpreter.

They are padded to the rows of a bucket and read their integers from one buffer. They give the same tokens as
steps without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels import language
from penstock.kernels.sampled_tokens import insert_sampled_tokens
from penstock.kvcache.blocks import BlockPool
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.capture import Work
from penstock.runner.decode import Key, verify_warm_up_keys, warm_up_keys
from penstock.runner.graphs import Graphs
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.prompt_lookup import Proposals
from penstock.scheduler.slots import SlotTable
from penstock.types import GeneratedTokens, Ints, PoolingParams, Request, SamplerParams, Task
from tests.generation.fakes import split_decoded
from tests.kernels.generators import BLOCKS, CONFIG, LENGTH, SLOTS, TOKENS, fake, make_runner, sampling
from tests.thinning import ALL_CASES

PROMPTS = [[5], [7, 8], [9] * 17, [11, 12, 13], [14] * 5]


@pytest.fixture
def captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture a shape at its first step."""
    monkeypatch.setattr("penstock.runner.decode.DecodeGraphs.uses_before_capture", 0)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    if not language.IS_INTERPRETED:
        pytest.skip("on a CUDA device tests/gpu/test_generation.py replays real graphs")
    before = language._devices
    language.set_kernel_devices("cpu", "cuda")
    yield
    language.set_kernel_devices(*before)


class Recorded:
    """Proposes recorded outputs. Every third proposal begins with a wrong token."""

    num_tokens = 3
    is_free = True

    def __init__(self, slots: SlotTable, outputs: list[list[int]]) -> None:
        self._slots, self._outputs = slots, outputs
        self._num_proposals = 0

    def propose(self, slots: Ints, max_counts: Ints) -> Proposals:
        proposed, counts = np.zeros((len(slots), self.num_tokens), np.int32), np.zeros(len(slots), np.int32)
        for index, slot in enumerate(slots.tolist()):
            known = self._slots.token_ids[slot, : self._slots.num_known[slot]].tolist()
            prompt = max((row for row in PROMPTS if known[: len(row)] == row), key=len)
            following = self._outputs[PROMPTS.index(prompt)][len(known) - len(prompt) :][: self.num_tokens]
            proposed[index, : len(following)], counts[index] = following, len(following)
            self._num_proposals += 1
            proposed[index, 0] = (proposed[index, 0] + (self._num_proposals % 3 == 0)) % CONFIG["vocab_size"]
        return Proposals(proposed, counts)

    def forget(self, slots: Ints) -> None:
        return None


def run(
    runner: ModelRunner,
    params: list[SamplerParams],
    apart: bool = False,
    known: list[list[int]] | None = None,
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log probabilities of each prompt. Two prompts join after a few steps. `known` outputs, if
    given, are proposed."""
    limits = GenerationLimits(SLOTS, 32, 12, LENGTH, 1000, prefix_caching=False, separate_prefill=apart)
    generation = GenerationScheduler(BlockPool(BLOCKS, BLOCK_SIZE), limits)
    if known is not None:
        generation.enable_speculation(lambda slots: Recorded(slots, known), is_adaptive=False)
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in PROMPTS]

    def add(number: int) -> None:
        ids = np.array(PROMPTS[number], dtype=np.int32)
        lengths = np.array([len(ids)], dtype=np.int32)
        generation.add(
            Request(str(number), ids, lengths, PoolingParams(Task.GENERATE), sampling=params[number])
        )

    for number in range(len(PROMPTS) - 2):
        add(number)
    for step in range(200):
        if step == 3:
            add(len(PROMPTS) - 2)
            add(len(PROMPTS) - 1)
        plan = generation.schedule(0.0)
        if plan is None:
            break
        for part in split_decoded(generation.collect(plan, runner.launch(plan).result())):
            assert isinstance(part, GeneratedTokens)
            tokens, logprobs = found[int(part.id)]
            tokens.extend(part.token_ids.tolist())
            if part.logprobs is not None:
                logprobs.extend(part.logprobs.ravel().tolist())
        generation.check_integrity()
    assert not generation.busy
    if generation.speculation is not None:
        counts = generation.speculation.counts
        assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    return found


@cache
def run_without_graphs(
    kind: str, dtype: torch.dtype = torch.float32, layers: int = 1
) -> list[tuple[list[int], list[float]]]:
    """The expected results, computed once for all tests."""
    return run(make_runner(graphs=False, dtype=dtype, layers=layers), KINDS[kind])


GREEDY = sampling(temperature=0.0)
KINDS = {
    "greedy": [GREEDY] * 5,
    "noise": [GREEDY, sampling(seed=3), GREEDY, sampling(seed=4, temperature=0.5), GREEDY],
    "filtered": [sampling(seed=3, top_k=5), GREEDY, sampling(seed=5, top_p=0.8), GREEDY, sampling(seed=6)],
    "edited": [sampling(temperature=0.0, presence_penalty=1.0), GREEDY, sampling(seed=2), GREEDY, GREEDY],
    "logprobs": [sampling(temperature=0.0, logprobs=2), GREEDY, GREEDY, sampling(seed=1, logprobs=0), GREEDY],
}


@pytest.mark.parametrize("kind", KINDS if ALL_CASES else ("noise", "filtered", "logprobs"))
def test_a_graph_gives_the_tokens_of_steps_without_one(kind: str, captured_at_once: None) -> None:
    layers = 2 if kind == "greedy" else 1
    expected = run_without_graphs(kind, layers=layers)
    runner = make_runner(graphs=True, layers=layers)
    got = run(runner, KINDS[kind])
    assert runner.decode is not None and runner.decode.replays > TOKENS // 2
    samples = {key.samples for key in runner.decode.captured}
    assert (False in samples) == (kind in ("edited", "logprobs"))
    assert any(key.filters for key in runner.decode.captured) == (kind == "filtered")
    for (tokens, logprobs), (same, close) in zip(got, expected, strict=True):
        assert tokens == same and len(tokens) == TOKENS
        np.testing.assert_allclose(logprobs, close, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", KINDS if ALL_CASES else ("greedy",))
def test_proposals_are_verified_with_and_without_graphs(
    kind: str, graphs: bool, captured_at_once: None
) -> None:
    expected = run_without_graphs(kind)
    runner = make_runner(graphs=graphs, max_rows=4 * SLOTS)
    got = run(runner, KINDS[kind], known=[tokens for tokens, _ in expected])
    if runner.decode is not None:
        assert runner.decode.replays > 1 and False in {key.samples for key in runner.decode.captured}
        assert max(key.rows for key in runner.decode.captured) > SLOTS
    for (tokens, logprobs), (same, close) in zip(got, expected, strict=True):
        assert tokens == same and len(tokens) == TOKENS
        np.testing.assert_allclose(logprobs, close, rtol=1e-5, atol=1e-5)


def test_chunked_prompts_are_replayed_too(captured_at_once: None) -> None:
    runner = make_runner(graphs=True, dtype=torch.float16)
    runner.graphs = Graphs(runner.model, runner.pooler, runner.staging, fake, cache=runner.cache)
    with runner.graphs.capture_on_first_use():
        got = run(runner, KINDS["greedy"], apart=True)
    # The prompt of 17 tokens runs in two chunks of at most 12; the prompt of one token needs no prefill step.
    assert runner.graphs.replays >= 3 and all(key.is_prompt for key in runner.graphs.captured)
    assert runner.decode is not None and runner.decode.replays > TOKENS // 2
    expected = run_without_graphs("greedy", torch.float16)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]


def test_steps_run_without_a_graph_when_capture_fails() -> None:
    def broken(work: Work) -> tuple[Callable[[], None], list[Tensor]]:
        raise RuntimeError("no")

    runner = make_runner(graphs=True, capture=broken)
    assert run(runner, KINDS["noise"]) == run_without_graphs("noise")
    assert runner.decode is not None and not runner.decode.captured and runner.decode.replays == 0


def test_capture_pauses_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runner.decode.DecodeGraphs.uses_before_capture", 2)
    tries = []

    def full(work: Work) -> tuple[Callable[[], None], list[Tensor]]:
        tries.append(work())
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner = make_runner(graphs=True, capture=full)
    assert run(runner, KINDS["noise"]) == run_without_graphs("noise")
    assert len(tries) == 1  # for the first frequent shape
    assert runner.decode is not None
    runner.decode.drop()
    assert not runner.decode.captured


def test_a_capture_changes_no_sequence() -> None:
    runner = make_runner(graphs=True)
    assert runner.decode is not None and runner.generator is not None and runner.cache is not None
    generator, keys = runner.generator, runner.cache.store.keys
    last, positions, kept = generator.last.clone(), generator.sampler.positions.clone(), keys.clone()
    with torch.inference_mode():
        for key in warm_up_keys(SLOTS):
            assert runner.decode.ensure(key) is not None
    assert torch.equal(generator.last[:-1], last[:-1]) and torch.equal(keys, kept)
    assert torch.equal(generator.sampler.positions[:-1], positions[:-1])


def test_the_first_graphs_of_verification_end_with_logits() -> None:
    keys = verify_warm_up_keys(20)
    assert [key.rows for key in keys] == [32, 16, 8, 4, 2, 1] and not any(key.samples for key in keys)
    assert max(key.rows for key in verify_warm_up_keys(5000)) == 128


def test_the_first_graphs_cover_as_many_rows_as_can_run() -> None:
    assert max(key.rows for key in warm_up_keys(100)) == 128
    assert warm_up_keys(1) == [Key(1, 16, True, True), Key(1, 16, True, False)]
    assert [key.rows for key in warm_up_keys(100) if key.filters] == [1, 32, 128]


def test_a_larger_graph_serves_a_shape_until_it_has_come_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runner.decode.DecodeGraphs.uses_before_capture", uses := 2)
    runner = make_runner(graphs=True)
    assert runner.decode is not None
    with torch.inference_mode():
        runner.decode.ensure(Key(8, 16, True, True))
    got = run(runner, KINDS["noise"])
    assert got == run_without_graphs("noise")
    # Sequences have joined and ended. Frequent shapes have their own graph now.
    assert Key(8, 16, True, True) in runner.decode.captured and len(runner.decode.captured) > 1
    assert runner.decode.replays > uses


def test_a_graph_serves_only_steps_that_fit_into_it() -> None:
    large = Key(8, 64, True, True)
    assert large.serves(Key(4, 16, True, False)) and large.serves(large)
    assert not large.serves(Key(16, 16, True, False)) and not large.serves(Key(4, 256, True, False))
    assert not large.serves(Key(4, 16, False, False))
    assert not Key(8, 64, True, False).serves(Key(4, 16, True, True))


@pytest.mark.parametrize("count", [1, 3, 130])
def test_sampled_tokens_are_inserted_where_a_slot_is_given(count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, 50, (count,), generator=draw, dtype=torch.int32)
    slots = torch.randint(-1, 9, (count,), generator=draw, dtype=torch.int32)
    last = torch.randint(100, 200, (9,), generator=draw, dtype=torch.int32)
    wanted = [int(last[s]) if s >= 0 else int(t) for s, t in zip(slots, tokens, strict=True)]
    by_torch = tokens.clone()
    insert_sampled_tokens(tokens, slots, last)
    assert tokens.tolist() == wanted
    language.set_kernel_devices()
    insert_sampled_tokens(by_torch, slots, last)
    assert by_torch.tolist() == wanted

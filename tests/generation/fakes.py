"""A fake device that stores token ids instead of keys, so that a wrong block shows as a wrong token."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from penstock.engine.loop import EngineCore
from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.prompt_lookup import Proposals
from penstock.scheduler.scheduler import Budget, Scheduler
from penstock.scheduler.slots import SlotTable
from penstock.types import (
    DecodedTokens,
    Failure,
    GeneratedTokens,
    GeneratePlan,
    Ints,
    PoolingParams,
    Request,
    SampledResult,
    SamplerParams,
    StepPlan,
    StepResult,
    Task,
)

VOCABULARY = 97
BLOCK = 4
LENGTH = 64


def following(tokens: list[int]) -> int:
    """The next token, which depends on every token and its position."""
    total = 7
    for token in tokens:
        total = (total * 31 + int(token) + 1) % 1_000_003
    return total % VOCABULARY


def continued(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


class MemoryRunner:
    """Runs a plan like a model. Reads only the cache slots that the plan names."""

    def __init__(
        self, blocks: int, slots: int, fails: Callable[[StepPlan], bool] = lambda plan: False
    ) -> None:
        self.memory = np.full(blocks * BLOCK, -1, dtype=np.int32)
        self.last = np.zeros(slots, dtype=np.int32)
        self.joined: set[int] = set()
        self.fails = fails
        self.error: Exception = RuntimeError("this step fails")
        self.steps = 0

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self.steps += 1
        assert isinstance(plan, GeneratePlan)
        sample, kv = plan.sample, plan.kv
        self.joined -= set(sample.leaves)
        assert not self.joined & {join.slot for join in sample.joins}, "a slot is taken twice"
        self.joined |= {join.slot for join in sample.joins}
        if self.fails(plan):
            future.set_exception(self.error)
            return future
        ids = plan.token_ids.copy()
        ids[sample.fed_tokens] = self.last[sample.fed_slots]
        self.memory[kv.write_slots] = ids[kv.write_tokens]
        run = np.full(int(kv.cu_keys[-1]), -1, dtype=np.int32)
        run[kv.cached_key_at] = self.memory[kv.read_slots]
        run[kv.new_key_at] = ids[plan.paged.num_rows :]
        new = [self._next(plan, int(row), run) for row in sample.sampled_rows]
        out: Ints = np.array(new, dtype=np.int32)
        assert {int(slot) for slot in sample.sampled_slots} <= self.joined
        self.last[sample.sampled_slots] = out
        future.set_result(SampledResult(out, device_s=0.001))
        return future

    def _next(self, plan: GeneratePlan, row: int, run: Ints) -> int:
        paged = plan.paged
        if row < paged.num_rows:
            table = paged.block_tables.reshape(paged.num_rows, paged.max_blocks)[row]
            slots = (table[:, None] * BLOCK + np.arange(BLOCK)).ravel()[: paged.num_keys[row]]
            return following(self.memory[slots].tolist())
        begin, end = plan.kv.cu_keys[row : row + 2] - paged.num_rows  # decode rows count one key each
        return following(run[begin:end].tolist())

    def close(self) -> None:
        return None


class Oracle:
    """Proposes the tokens that will follow. Sometimes one is wrong, and sometimes it proposes nothing."""

    num_tokens = 5
    is_free = True

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots

    def propose(self, slots: Ints, max_counts: Ints) -> Proposals:
        proposed = np.zeros((len(slots), self.num_tokens), dtype=np.int32)
        counts = np.zeros(len(slots), dtype=np.int32)
        for row, slot in enumerate(slots.tolist()):
            known = self._slots.token_ids[slot, : self._slots.num_known[slot]].tolist()
            draw = np.random.default_rng(sum(known) + 31 * len(known))
            proposed[row] = continued(known, self.num_tokens)
            if (wrong := int(draw.integers(0, 2 * self.num_tokens))) < self.num_tokens:
                proposed[row, wrong] = (proposed[row, wrong] + 1) % VOCABULARY
            counts[row] = draw.integers(0, self.num_tokens + 1)
        return Proposals(proposed, counts)

    def forget(self, slots: Ints) -> None:
        return None


SEPARATE_PREFILL = False  # whether prefill and decode steps alternate
TARGET_ITL_S = 0.0  # target inter-token latency, which limits prompt tokens; a step takes a millisecond
SPECULATES = False  # whether an `Oracle` proposes tokens for every sequence


def make_core(
    *,
    blocks: int = LENGTH // BLOCK,
    rows: int = 6,
    tokens: int = 24,
    chunk: int = 9,
    depth: int = 2,
    prefixes: bool = True,
    fails: Callable[[StepPlan], bool] = lambda plan: False,
) -> EngineCore:
    limits = GenerationLimits(
        rows,
        tokens,
        chunk,
        LENGTH,
        10_000,
        prefixes,
        separate_prefill=SEPARATE_PREFILL,
        target_itl_s=TARGET_ITL_S,
    )
    generation = GenerationScheduler(BlockPool(blocks, BLOCK), limits)
    if SPECULATES:
        generation.enable_speculation(Oracle, is_adaptive=False)
    runner = MemoryRunner(blocks, rows, fails)
    return EngineCore(
        runner, Scheduler(Budget(tokens, rows, 10_000)), depth=depth, generation=generation, clock=lambda: 1.0
    )


def generation_request(name: str, prompts: list[list[int]], count: int, **params: object) -> Request:
    sampling = SamplerParams(max_tokens=count, temperature=0, **params)  # type: ignore[arg-type]
    flat = np.array([token for prompt in prompts for token in prompt], dtype=np.int32)
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
    return Request(name, flat, lengths, PoolingParams(Task.GENERATE), sampling=sampling)


def split_decoded(outcomes: list[object]) -> list[object]:
    """Split `DecodedTokens` among the outcomes into one part per sequence."""
    return [
        part
        for outcome in outcomes
        for part in (outcome.parts() if isinstance(outcome, DecodedTokens) else [outcome])
    ]


class Answers:
    """Collects the outcomes by request and row."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], str] = {}
        self.failed: dict[str, Failure] = {}

    def take(self, outcomes: list[object]) -> None:
        for outcome in split_decoded(outcomes):
            if isinstance(outcome, Failure):
                self.failed[outcome.id] = outcome
                continue
            assert isinstance(outcome, GeneratedTokens)
            key = (outcome.id, outcome.row)
            assert key not in self.finished, "a sequence has tokens after its end"
            self.tokens.setdefault(key, []).extend(outcome.token_ids.tolist())
            if outcome.finish_reason is not None:
                self.finished[key] = outcome.finish_reason


def run(core: EngineCore, answers: Answers, steps: int = 10_000) -> None:
    for _ in range(steps):
        if not core.busy:
            return
        answers.take(list(core.step()))
        assert core.generation is not None
        core.generation.check_integrity()
    assert not core.busy, "the core is still busy"

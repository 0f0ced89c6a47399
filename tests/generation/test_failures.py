"""Failed steps with later steps of the same sequences in flight: every returned token is right."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.engine.loop import EngineCore
from penstock.errors import DeviceOutOfMemory
from penstock.types import GeneratePlan, StepPlan, StepResult
from tests.generation.fakes import Answers, MemoryRunner, continued, generation_request, make_core
from tests.thinning import num_examples

_GARBAGE = -5


class LateRunner(MemoryRunner):
    """A fake device whose steps end when a test calls `finish`. Failed steps leave garbage in the cache."""

    def __init__(self, runner: MemoryRunner, failing: set[int], full: set[int]) -> None:
        super().__init__(len(runner.memory), len(runner.last))
        self.memory = np.full_like(runner.memory, _GARBAGE)
        self.failing, self.full = failing, full
        self.waiting: deque[tuple[Future[StepResult], StepResult | Exception]] = deque()
        self.most_in_flight = 0
        self.poisoned: set[int] = set()  # tokens that make a step fail

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        number, future = self.steps, Future[StepResult]()
        result: StepResult | Exception = super().launch(plan).result()
        assert isinstance(plan, GeneratePlan)
        # Ignore tokens that are fed on the device: the plan has stale values for them.
        read = np.delete(plan.token_ids, plan.sample.fed_tokens)
        bad = number in self.failing or self.poisoned & set(read.tolist())
        if bad or number in self.full:
            self.memory[plan.kv.write_slots] = _GARBAGE
            self.last[plan.sample.sampled_slots] = _GARBAGE
            result = RuntimeError("this step fails") if bad else DeviceOutOfMemory("no room")
        self.waiting.append((future, result))
        self.most_in_flight = max(self.most_in_flight, len(self.waiting))
        return future

    def finish(self) -> None:
        future, result = self.waiting.popleft()
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def make(failing: set[int], full: set[int], **options: int) -> tuple[EngineCore, LateRunner]:
    core = make_core(**options)  # type: ignore[arg-type]
    assert isinstance(core.runner, MemoryRunner)
    runner = core.runner = LateRunner(core.runner, failing, full)
    return core, runner


def run(core: EngineCore, runner: LateRunner) -> Answers:
    answers = Answers()
    for _ in range(20_000):
        if not core.busy:
            break
        before = runner.steps
        answers.take(list(core.step()))
        assert core.generation is not None
        core.generation.check_integrity()
        if runner.waiting and runner.steps == before:
            runner.finish()
    assert not core.busy, "the core is still busy"
    return answers


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("failing", range(8))
def test_sequences_continue_from_their_known_tokens_when_a_step_fails(depth: int, failing: int) -> None:
    core, runner = make({failing}, set(), depth=depth)
    prompts = {"a": list(range(3, 20)), "b": [1, 2, 3], "c": list(range(40, 60))}
    for name, prompt in prompts.items():
        core.add(generation_request(name, [prompt], 9))
    answers = run(core, runner)
    assert runner.most_in_flight == depth and not answers.failed
    for name, prompt in prompts.items():
        assert answers.tokens[name, 0] == continued(prompt, 9)


@settings(max_examples=num_examples(200), deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.integers(1, 25), st.integers(1, 12), st.integers(0, 2)), min_size=2, max_size=6
    ),
    failing=st.sets(st.integers(0, 40), max_size=6),
    full=st.sets(st.integers(0, 40), max_size=3),
    poisoned=st.booleans(),
    depth=st.integers(1, 4),
    blocks=st.integers(12, 30),
)
@example(  # the last sequence reuses the slot of the poisoned one
    calls=[(17, 1, 0), (1, 1, 0), (9, 5, 0), (13, 5, 1)],
    failing=set(),
    full=set(),
    poisoned=True,
    depth=4,
    blocks=12,
)
def test_every_token_is_right_whichever_steps_fail(
    calls: list[tuple[int, int, int]],
    failing: set[int],
    full: set[int],
    poisoned: bool,
    depth: int,
    blocks: int,
) -> None:
    core, runner = make(failing, full, depth=depth, blocks=blocks)
    prompts = [[10 + shared] * (n // 2) + [20 + i] * (n - n // 2) for i, (n, _, shared) in enumerate(calls)]
    if poisoned:
        prompts[0][-1] = 900  # a token that the model never samples
        runner.poisoned = {900}
    for i, (prompt, (_, count, _)) in enumerate(zip(prompts, calls, strict=True)):
        core.add(generation_request(f"r{i}", [prompt], count))
    answers = run(core, runner)
    for i, (prompt, (_, count, _)) in enumerate(zip(prompts, calls, strict=True)):
        given_tokens, right = answers.tokens.get((f"r{i}", 0), []), continued(prompt, count)
        if f"r{i}" in answers.failed:
            assert failing or full or (poisoned and i == 0), "no step of it failed"
            assert given_tokens == right[: len(given_tokens)]
        else:
            assert given_tokens == right

"""The generation scheduler on a fake device that stores tokens: whatever the order of events, each sequence
gets its own tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.loop import EngineCore
from penstock.errors import (
    BadValue,
    DeadlineExceeded,
    DeviceFailed,
    DeviceOutOfMemory,
    NotPossible,
    QueueFull,
    RowFailed,
)
from penstock.scheduler import prefill_budget
from penstock.scheduler.scheduler import Budget, Scheduler
from penstock.types import GeneratedTokens, StepPlan, StepResult
from tests.generation import fakes
from tests.generation.fakes import (
    LENGTH,
    Answers,
    MemoryRunner,
    continued,
    generation_request,
    make_core,
    run,
)
from tests.helpers import ints
from tests.thinning import ALL_CASES, num_examples

PROMPTS = [[5, 6, 7], [1], list(range(20)), [9] * 13, [*range(20), 3]]


def check_idle(core: EngineCore) -> None:
    assert core.generation is not None and not core.busy
    core.check_integrity()
    core.generation.pool.check_integrity()
    assert core.generation.queued_tokens == 0 and core.generation.running == core.generation.waiting == 0


WAYS = [f"{way}{more}" for more in ("", "-speculative") for way in ("together", "bounded", "apart")]


@pytest.fixture(
    autouse=True,
    params=WAYS if ALL_CASES else ("together", "bounded-speculative", "apart"),
    scope="module",
)
def turns(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every test with mixed steps, with mixed steps whose prompt tokens are limited, and with separate
    steps for prefill and decode; each without and with speculation."""
    way, _, speculative = request.param.partition("-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fakes, "SEPARATE_PREFILL", way == "apart")
        patch.setattr(fakes, "SPECULATES", bool(speculative))
        if way == "bounded":
            patch.setattr(fakes, "TARGET_ITL_S", 0.001)
            for name, size in (("MIN_PIECE", 3), ("MIN_PROGRESS", 1), ("STEP_SIZES", (4, 6, 8, 12, 16))):
                patch.setattr(prefill_budget, name, size)
        yield


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("blocks", [LENGTH // 4, 100])
def test_every_sequence_gets_the_tokens_it_would_get_alone(depth: int, prefixes: bool, blocks: int) -> None:
    core, answers = make_core(depth=depth, prefixes=prefixes, blocks=blocks), Answers()
    core.add(generation_request("a", PROMPTS, 30))
    core.add(generation_request("b", PROMPTS[::-1], 11))
    run(core, answers)
    for row, prompt in enumerate(PROMPTS):
        assert answers.tokens["a", row] == continued(prompt, 30)
        assert answers.tokens["b", len(PROMPTS) - 1 - row] == continued(prompt, 11)
    assert set(answers.finished.values()) == {"length"}
    assert core.generation is not None
    assert bool(core.generation.num_preemptions) == (blocks < 100)
    check_idle(core)


@settings(max_examples=num_examples(150), deadline=None)
@given(data=st.data())
def test_any_arrivals_cancellations_and_failures_leave_nothing_behind(data: st.DataObject) -> None:
    choose = data.draw
    bad, steps = choose(st.sets(st.integers(0, 40), max_size=4)), itertools.count()
    core = make_core(
        fails=lambda plan: next(steps) in bad,
        blocks=choose(st.integers(LENGTH // 4, 40)),
        rows=choose(st.integers(1, 7)),
        tokens=choose(st.integers(7, 40)),
        chunk=choose(st.integers(1, 20)),
        depth=choose(st.integers(1, 3)),
        prefixes=choose(st.booleans()),
    )
    answers, asked, cancelled = Answers(), {}, set()
    for number in range(choose(st.integers(1, 8))):
        shared = choose(st.integers(0, 18))
        lengths = choose(st.lists(st.integers(1, 20), min_size=1, max_size=3))
        prompts = [[4] * shared + [(number * 7 + i) % 90 for i in range(n)] for n in lengths]
        count = choose(st.integers(1, 24))
        asked[str(number)] = (prompts, count)
        core.add(generation_request(str(number), prompts, count))
        for _ in range(choose(st.integers(0, 6))):
            answers.take(list(core.step()))
            assert core.generation is not None
            core.generation.check_integrity()
        if choose(st.booleans()):
            name = choose(st.sampled_from(sorted(asked)))
            core.cancel(name)
            cancelled.add(name)
            assert core.generation is not None
            core.generation.check_integrity()
    run(core, answers)
    for name, (prompts, count) in asked.items():
        for row, prompt in enumerate(prompts):
            got, whole = answers.tokens.get((name, row), []), continued(prompt, count)
            assert got == whole[: len(got)]
            assert name in cancelled or name in answers.failed or got == whole
    check_idle(core)


@settings(max_examples=num_examples(60), deadline=None)
@given(data=st.data())
def test_speculation_may_be_switched_at_any_step(data: st.DataObject) -> None:
    choose = data.draw
    bad, steps = choose(st.sets(st.integers(0, 40), max_size=2)), itertools.count()
    core = make_core(
        fails=lambda plan: next(steps) in bad,
        blocks=choose(st.integers(LENGTH // 4, 40)),
        rows=choose(st.integers(1, 7)),
        tokens=choose(st.integers(7, 40)),
        depth=choose(st.integers(1, 3)),
        prefixes=choose(st.booleans()),
    )
    assert core.generation is not None
    core.generation.enable_speculation(fakes.Oracle)
    speculation = core.generation.speculation
    assert speculation is not None
    switches = itertools.cycle(choose(st.lists(st.booleans(), min_size=1, max_size=12)))
    speculation._pays = lambda decoding: next(switches)  # type: ignore[method-assign]
    answers = Answers()
    core.add(generation_request("a", PROMPTS, choose(st.integers(1, 30))))
    for _ in range(choose(st.integers(0, 6))):
        answers.take(list(core.step()))
    core.add(generation_request("b", PROMPTS[::-1], choose(st.integers(1, 30)), presence_penalty=0.5))
    run(core, answers)
    for (name, row), got in answers.tokens.items():
        prompt = PROMPTS[row if name == "a" else len(PROMPTS) - 1 - row]
        assert got == continued(prompt, len(got))
    for name in {"a", "b"} - answers.failed.keys():  # a request that is alone in a failed step fails
        assert all((name, row) in answers.finished for row in range(len(PROMPTS)))
    check_idle(core)


def test_a_sequence_ends_at_a_stop_token_which_is_not_shown() -> None:
    whole = continued([5, 6, 7], 30)
    at = next(i for i in range(4, 30) if whole[i] not in whole[:i])
    for depth in (1, 2, 3):
        core, answers = make_core(depth=depth), Answers()
        core.add(generation_request("a", [[5, 6, 7]], 30, eos_token_ids=(whole[at],)))
        core.add(generation_request("b", [[5, 6, 7]], 30, stop_token_ids=(whole[at],), min_tokens=at + 1))
        core.add(generation_request("c", [[5, 6, 7]], 30, eos_token_ids=(whole[at],), ignore_eos=True))
        run(core, answers)
        assert answers.tokens["a", 0] == whole[:at] and answers.finished["a", 0] == "stop"
        assert answers.tokens["b", 0][: at + 1] == whole[: at + 1]
        assert answers.tokens["c", 0] == whole and answers.finished["c", 0] == "length"
        check_idle(core)


def test_prefixes_of_prompts_and_outputs_are_reused_within_a_salt() -> None:
    core, answers = make_core(blocks=60), Answers()
    core.add(generation_request("a", [list(range(20))], 20))
    run(core, answers)
    assert core.generation is not None
    before = core.generation.pool.hit_tokens
    core.add(generation_request("b", [list(range(20)) + answers.tokens["a", 0]], 5))
    run(core, answers)
    assert core.generation.pool.hit_tokens - before >= 36
    before = core.generation.pool.hit_tokens
    salted = generation_request("c", [list(range(20))], 5)
    salted.cache_salt = "other"
    core.add(salted)
    run(core, answers)
    assert core.generation.pool.hit_tokens == before
    assert answers.tokens["c", 0] == answers.tokens["a", 0][:5]
    check_idle(core)


def test_decodes_go_first_and_prompts_fill_the_rest_of_a_step() -> None:
    core = make_core(tokens=10, chunk=10, depth=1, blocks=60)
    core.add(generation_request("a", [[1, 2], [3]], 20))
    answers = Answers()
    for _ in range(3):
        answers.take(list(core.step()))
    core.add(generation_request("b", [list(range(30))], 2))
    answers.take(list(core.step()))
    plan = core._in_flight.steps[0].plan
    if fakes.SPECULATES and not fakes.SEPARATE_PREFILL:  # proposals take at most half of the rest
        assert plan.num_tokens <= 10 and plan.lengths[-1] >= (1 if fakes.TARGET_ITL_S else 4)
    else:
        piece = 2 if fakes.TARGET_ITL_S else 8
        assert plan.lengths.tolist() == ([10] if fakes.SEPARATE_PREFILL else [1, 1, piece])
    run(core, answers)
    check_idle(core)


def test_a_failing_request_fails_alone() -> None:
    def fails(plan: StepPlan) -> bool:
        return bool((plan.token_ids == 200).any())

    core, answers = make_core(fails=fails, depth=2, blocks=60), Answers()
    core.add(generation_request("good", [[1, 2, 3], [4]], 20))
    for _ in range(3):
        answers.take(list(core.step()))
    core.add(generation_request("bad", [[200, 2]], 20))
    core.add(generation_request("other", [[7, 7]], 20))
    run(core, answers)
    assert set(answers.failed) == {"bad"} and isinstance(answers.failed["bad"].error, RowFailed)
    good = [continued(row, 20) for row in ([1, 2, 3], [4])]
    assert [answers.tokens["good", row] for row in (0, 1)] == good
    assert answers.tokens["other", 0] == continued([7, 7], 20)
    check_idle(core)


def test_a_request_that_can_never_run_is_refused() -> None:
    core = make_core()
    for request, words in (
        (generation_request("a", [[1]], 0), "max_tokens is 0"),
        (generation_request("a", [[1] * 60], 5), "at most 4 may follow"),
        (generation_request("a", [[1] * 70], 5), "at most 0 may follow"),
        (generation_request("a", [[1], []], 5), "no tokens"),
        (generation_request("a", [[1]], 5, min_tokens=6), "min_tokens is 6"),
    ):
        with pytest.raises(BadValue, match=words):
            core.add(request)
    core.add(generation_request("a", [[1]], 5))
    with pytest.raises(BadValue, match="already in use"):
        core.add(generation_request("a", [[1]], 5))
    with pytest.raises(QueueFull):
        core.add(generation_request("b", [[1] * 50] * 200, 5))
    plain = EngineCore(MemoryRunner(4, 1), Scheduler(Budget(8, 8, 100)))
    with pytest.raises(NotPossible):
        plain.add(generation_request("a", [[1]], 5))
    run(core, Answers())
    check_idle(core)


def test_an_expired_request_fails_and_frees_its_blocks() -> None:
    now = 1.0
    core, answers = make_core(), Answers()
    core.clock = lambda: now
    late = generation_request("late", [[1, 2, 3]], 40)
    late.deadline_s = 2.0
    core.add(late)
    core.add(generation_request("other", [[1, 2]], 20))
    assert core.next_deadline_s() == 2.0
    for _ in range(4):
        answers.take(list(core.step()))
    now = 2.5
    run(core, answers)
    assert isinstance(answers.failed["late"].error, DeadlineExceeded)
    assert answers.tokens["other", 0] == continued([1, 2], 20)
    check_idle(core)


def test_an_urgent_request_goes_first_and_the_newest_is_preempted() -> None:
    core, answers = make_core(blocks=LENGTH // 4, rows=2), Answers()
    first, second = generation_request("first", [[1] * 20], 30), generation_request("second", [[2] * 20], 30)
    second.priority = 1
    core.add(second)
    core.add(first)
    order = []
    while core.busy:
        for outcome in fakes.split_decoded(list(core.step())):
            answers.take([outcome])
            assert isinstance(outcome, GeneratedTokens)
            if outcome.id not in order and ("first", 0) in answers.finished:
                order.append(outcome.id)
    assert core.generation is not None and core.generation.num_preemptions
    assert answers.tokens["first", 0] == continued([1] * 20, 30)
    assert answers.tokens["second", 0] == continued([2] * 20, 30)
    assert order[0] == "first"
    check_idle(core)


def test_sequences_start_over_in_smaller_steps_when_memory_runs_out() -> None:
    core, answers = (
        make_core(fails=lambda plan: plan.num_tokens > 3, tokens=24, depth=2, blocks=60),
        Answers(),
    )
    assert isinstance(core.runner, MemoryRunner) and core.generation is not None
    core.runner.error = DeviceOutOfMemory("out of memory")
    prompts = [[1, 2, 3], [4], [5, 6], list(range(12))]
    core.add(generation_request("a", prompts[:2], 20))
    core.add(generation_request("b", prompts[2:], 20))
    run(core, answers)
    made = [answers.tokens[name, row] for name in ("a", "b") for row in (0, 1)]
    assert made == [continued(prompt, 20) for prompt in prompts] and not answers.failed
    check_idle(core)
    core.runner.fails = lambda plan: False
    for number in range(160 if fakes.SPECULATES else 40):
        core.add(generation_request(f"c{number}", [[number % 90]], 20))
    run(core, answers)
    assert core.generation.limits.max_tokens == 24, "the budget grows back"


def test_a_lost_device_fails_all_generation_requests() -> None:
    core, answers = make_core(fails=lambda plan: True, blocks=60), Answers()
    assert isinstance(core.runner, MemoryRunner)
    core.runner.error = DeviceFailed("the device failed")
    core.add(generation_request("a", [[1, 2], [3]], 20))
    core.add(generation_request("b", [[4]], 20))
    run(core, answers)
    assert answers.failed.keys() == {"a", "b"} and core.device_failure is core.runner.error
    check_idle(core)


def test_sequences_with_different_adapters_share_no_prefix_block() -> None:
    core, answers = make_core(blocks=60), Answers()
    assert core.generation is not None
    pool = core.generation.pool
    hits = []
    for name, adapters in (("a", None), ("b", [0]), ("c", [1]), ("d", [1])):
        request = generation_request(name, [list(range(20))], 3)
        request.adapters = None if adapters is None else ints(adapters)
        before = pool.hit_tokens
        core.generation.add(request)  # added here, because the engine refuses adapters that are not loaded
        run(core, answers)
        hits.append(pool.hit_tokens - before)
    assert hits == [0, 0, 0, 16]
    check_idle(core)


def test_an_engine_without_adapters_refuses_to_generate_with_one() -> None:
    core = make_core(blocks=20)
    request = generation_request("a", [[1, 2, 3]], 4)
    request.adapters = ints([0])
    with pytest.raises(NotPossible, match="this model has no adapters"):
        core.add(request)
    assert not core.busy


def test_sequences_that_run_together_have_no_more_adapters_than_there_are_slots() -> None:
    core, answers = make_core(blocks=60), Answers()
    assert core.generation is not None
    core.generation.max_adapters = 2
    for number, adapter in enumerate((0, 1, 2, -1, 0, 3, 2, 1)):
        request = generation_request(str(number), [[number + 1, 2, 3]], 3)
        request.adapters = ints([adapter])
        core.generation.add(request)
    seen: list[set[int]] = []
    launch = core.runner.launch

    def watched(plan: StepPlan) -> Future[StepResult]:
        ids = set() if plan.adapters is None else set(plan.adapters.tolist()) - {-1}
        seen.append(ids)
        return launch(plan)

    core.runner.launch = watched  # type: ignore[method-assign]
    run(core, answers)
    assert max(map(len, seen)) == 2 and set.union(*seen) == {0, 1, 2, 3}
    assert not answers.failed
    check_idle(core)

"""Prompt lookup, and when and how much sequences speculate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.decode_times import (
    FIRST_TRIAL_AFTER,
    MIN_STEPS,
    TRIAL_STEPS,
    DecodeTimes,
)
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.prompt_lookup import PromptLookup, Proposals
from penstock.scheduler.slots import SlotTable
from penstock.types import GeneratePlan, Ints, SampledResult
from tests.generation.fakes import Oracle, continued, generation_request
from tests.helpers import ints
from tests.thinning import num_examples

ALL = np.arange(2, dtype=np.int32)


def table_with(*rows: list[int], length: int = 64) -> SlotTable:
    table = SlotTable(len(rows), length, 16)
    for slot, row in enumerate(rows):
        table.token_ids[slot, : len(row)] = row
        table.num_known[slot] = table.num_tokens[slot] = len(row)
    return table


def expected_proposal(row: list[int], count: int, smallest: int, largest: int) -> list[int]:
    """What follows the latest earlier occurrence of the row's longest final n-gram, found by plain search."""
    for size in range(largest, smallest - 1, -1):
        for end in range(len(row) - 1, size - 1, -1):
            if len(row) >= size and row[end - size : end] == row[-size:]:
                period = row[end:]
                return [period[at % len(period)] for at in range(count)]
    return []


def test_the_tokens_behind_the_last_n_gram_are_proposed() -> None:
    table = table_with([1, 2, 3, 4, 5, 9, 1, 2, 3], [1, 2, 3])
    found = PromptLookup(table, 3, 2, 3).propose(ALL, ALL)
    assert found.counts.tolist() == [3, 0]
    assert found.token_ids[0].tolist() == [4, 5, 9]


def test_the_longest_n_gram_wins_and_of_equal_ones_the_latest() -> None:
    table = table_with([7, 1, 2, 50, 1, 2, 60, 7, 1, 2], [1, 2, 50, 1, 2, 60, 8, 1, 2])
    found = PromptLookup(table, 1, 2, 3).propose(ALL, ALL)
    assert found.token_ids[:, 0].tolist() == [50, 60]


def test_a_loop_is_proposed_for_as_long_as_a_proposal_may_be() -> None:
    table = table_with([9, 5, 5, 5], [8, 1, 2, 1, 2])
    found = PromptLookup(table, 5, 2, 2).propose(ALL, ALL)
    assert found.token_ids[0].tolist() == [5] * 5
    assert found.token_ids[1].tolist() == [1, 2, 1, 2, 1]


@settings(max_examples=num_examples(100), deadline=None)
@given(data=st.data())
def test_proposals_equal_a_plain_search_while_sequences_grow_and_change(data: st.DataObject) -> None:
    smallest = data.draw(st.integers(1, 3))
    largest = data.draw(st.integers(smallest, 3))
    tokens = st.integers(0, 2)
    rows = [data.draw(st.lists(tokens, min_size=1, max_size=20)) for _ in range(2)]
    table = table_with(*rows, length=1 << 14)  # enough buckets that no two of these n-grams collide
    lookup = PromptLookup(table, 4, smallest, largest)
    for _ in range(data.draw(st.integers(1, 8))):
        found = lookup.propose(ALL, ALL)
        for slot, row in enumerate(rows):
            expected = expected_proposal(row, 4, smallest, largest)
            assert found.counts[slot] == len(expected)
            assert not expected or found.token_ids[slot].tolist() == expected
        for slot in range(2):
            if data.draw(st.booleans()) and len(rows[slot]) < 40:
                rows[slot] = rows[slot] + data.draw(st.lists(tokens, max_size=5))
            elif data.draw(st.integers(0, 3)) == 0:  # another sequence takes the slot
                rows[slot] = data.draw(st.lists(tokens, min_size=1, max_size=20))
                lookup.forget(ints([slot]))
            table.token_ids[slot, : len(rows[slot])] = rows[slot]
            table.num_known[slot] = len(rows[slot])


class Fixed:
    """Always proposes the same tokens."""

    is_free = True

    def __init__(self, *token_ids: int) -> None:
        self.num_tokens = len(token_ids)
        self._token_ids = ints(list(token_ids))

    def propose(self, slots: Ints, max_counts: Ints) -> Proposals:
        repeated = np.repeat(self._token_ids[None], len(slots), axis=0)
        return Proposals(repeated, np.full(len(slots), self.num_tokens, dtype=np.int32))

    def forget(self, slots: Ints) -> None:
        return None


def scheduler_with(
    proposer: Callable[[SlotTable], Oracle | Fixed],
    *,
    blocks: int = 64,
    is_adaptive: bool = False,
    max_tokens: int = 64,
) -> GenerationScheduler:
    generation = GenerationScheduler(
        BlockPool(blocks, 4), GenerationLimits(4, max_tokens, max_tokens, 64, 1000)
    )
    generation.enable_speculation(proposer, is_adaptive=is_adaptive)
    return generation


def next_plan(generation: GenerationScheduler, now_s: float = 0.0) -> GeneratePlan:
    plan = generation.schedule(now_s)
    assert plan is not None
    return plan


def finish(generation: GenerationScheduler, plan: GeneratePlan, *tokens: int) -> list[object]:
    outcomes = generation.collect(plan, SampledResult(ints(list(tokens))))
    generation.check_integrity()
    return list(outcomes)


def test_a_sequence_runs_its_last_token_and_the_proposals_as_rows_that_share_its_blocks() -> None:
    generation = scheduler_with(lambda slots: Fixed(11, 12, 13))
    generation.add(generation_request("a", [[1, 2, 3]], 20))
    finish(generation, next_plan(generation), 4)
    plan = next_plan(generation)
    assert plan.token_ids.tolist() == [4, 11, 12, 13] and plan.positions.tolist() == [3, 4, 5, 6]
    assert plan.paged.num_rows == 4 and plan.paged.num_keys.tolist() == [4, 5, 6, 7]
    tables = plan.paged.block_tables.reshape(4, -1)
    assert (tables == tables[0]).all()
    assert plan.sample.verify is not None and len(plan.sample.fed_tokens) == 0
    assert plan.sample.verify.proposed.tolist() == [11, 12, 13, -1]
    assert generation.schedule(0.0) is None, "its tokens have to be read first"
    first, second, *none = finish(generation, plan, 11, 99, 55, 66)
    assert [each.token_ids.tolist() for each in (first, second)] == [[11], [99]] and not none
    plan = next_plan(generation)
    assert plan.token_ids.tolist()[0] == 99 and plan.positions.tolist()[0] == 5
    assert generation.speculation is not None
    assert generation.speculation.accepted_at.tolist() == [1, 0, 0]


def test_no_more_is_proposed_than_a_sequence_may_have() -> None:
    generation = scheduler_with(lambda slots: Fixed(11, 12, 13))
    generation.add(generation_request("a", [[1, 2, 3]], 3))
    finish(generation, next_plan(generation), 4)
    plan = next_plan(generation)
    assert plan.token_ids.tolist() == [4, 11]
    outcomes = finish(generation, plan, 11, 12)
    assert outcomes[-1].finish_reason == "length"  # type: ignore[attr-defined]
    assert not generation.busy


def test_a_stop_token_ends_a_sequence_before_later_accepted_proposals() -> None:
    generation = scheduler_with(lambda slots: Fixed(11, 12, 13))
    generation.add(generation_request("a", [[1, 2, 3]], 20, eos_token_ids=(12,)))
    finish(generation, next_plan(generation), 4)
    first, second = finish(generation, next_plan(generation), 11, 12, 13, 14)
    assert first.token_ids.tolist() == [11] and first.finish_reason is None  # type: ignore[attr-defined]
    assert second.finish_reason == "stop" and second.stop_token == 12  # type: ignore[attr-defined]
    assert not generation.busy


def test_nobody_is_preempted_for_proposals() -> None:
    generation = scheduler_with(lambda slots: Fixed(*range(11, 20)), blocks=4)
    generation.add(generation_request("a", [[1, 2, 3, 4, 5, 6, 7]], 8))
    generation.add(generation_request("b", [[1, 2, 3]], 4))
    finish(generation, next_plan(generation), 8, 9)
    plan = next_plan(generation)
    assert plan.num_tokens >= 2 and generation.num_preemptions == 0
    ends = plan.sample.ends
    assert ends[plan.sample.slots == plan.sample.slots[-1]].max() <= 12, "no block is free for more"


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": (1, 2, 3)},
        {"bad_token_ids": ((4, 5),)},
        {"min_tokens": 4},
    ],
    ids=lambda params: next(iter(params)),
)
def test_sequences_whose_logits_are_edited_run_one_token_a_step(params: dict[str, object]) -> None:
    generation = scheduler_with(lambda slots: Fixed(11, 12))
    generation.add(generation_request("a", [[1, 2, 3]], 20, **params))
    generation.add(generation_request("b", [[4, 5]], 20))
    finish(generation, next_plan(generation), 7, 8)
    plan = next_plan(generation)
    assert sorted(np.bincount(plan.sample.slots, minlength=4).tolist()) == [0, 0, 1, 3]
    assert plan.sample.verify is not None
    a_slot = int(plan.sample.slots[plan.positions == 3][-1])
    assert np.count_nonzero(plan.sample.slots == a_slot) == 1


def test_a_sequence_speculates_once_it_has_its_min_tokens() -> None:
    generation = scheduler_with(lambda slots: Fixed(11, 12))
    generation.add(generation_request("a", [[1, 2, 3]], 20, min_tokens=2))
    finish(generation, next_plan(generation), 7)
    plan = next_plan(generation)
    assert plan.num_tokens == 1
    finish(generation, plan, 8)
    assert next_plan(generation).num_tokens == 3


class AnyToken:
    """A constraint that allows every token."""

    done = False

    def mask(self) -> Ints:
        return np.full(4, -1, dtype=np.int32)

    def accept(self, token: int) -> None:
        return None


def test_sequences_with_a_grammar_run_one_token_a_step_beside_others() -> None:
    generation = scheduler_with(lambda slots: Fixed(11, 12))
    generation.add(generation_request("a", [[1, 2, 3]], 20), constraints=[AnyToken()])
    generation.add(generation_request("b", [[4, 5]], 20))
    finish(generation, next_plan(generation), 7, 8)
    plan = next_plan(generation)
    assert plan.token_ids.tolist() == [7, 11, 12, 8] and plan.positions.tolist() == [2, 3, 4, 3]
    assert len(plan.sample.masks) == 1


# Whether speculation is faster.


def steps(times: DecodeTimes, count: int, seconds: float, *, is_speculative: bool, now_s: float) -> float:
    for _ in range(count):
        times.begin(now_s, 4, 12 if is_speculative else 0, is_speculative=is_speculative)
        now_s += seconds
    return now_s


def test_times_of_both_kinds_are_measured_before_they_are_compared() -> None:
    times = DecodeTimes()
    assert not times.prefers_speculation(3.0, is_on=False, margin=1.0)
    now_s = steps(times, MIN_STEPS + 1, 1.0, is_speculative=False, now_s=0.0)
    assert times.prefers_speculation(3.0, is_on=False, margin=1.0)
    assert not times.prefers_speculation(1.0, is_on=False, margin=1.02), "nothing is gained"
    steps(times, MIN_STEPS + 1, 2.0, is_speculative=True, now_s=now_s)
    assert times.prefers_speculation(2.5, is_on=True, margin=1.0)
    assert not times.prefers_speculation(1.5, is_on=True, margin=1.0), "steps take twice as long"
    assert times.row_cost(4) == pytest.approx(4 / 12, rel=0.2)


def test_a_prompt_between_two_decode_steps_does_not_count() -> None:
    times = DecodeTimes()
    now_s = steps(times, MIN_STEPS, 1.0, is_speculative=False, now_s=0.0)
    times.interrupt()
    now_s = steps(times, 2, 1.0, is_speculative=False, now_s=now_s + 50)
    steps(times, MIN_STEPS + 1, 1.0, is_speculative=True, now_s=now_s)
    assert times.prefers_speculation(1.1, is_on=True, margin=1.0)
    assert times.speedup(0.0) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("is_on", [False, True])
def test_the_kind_that_loses_is_tried_again_now_and_then(is_on: bool) -> None:
    times, seconds = DecodeTimes(), {False: 1.0, True: 1.5 if is_on else 4.0}
    now_s = steps(times, MIN_STEPS + 1, seconds[False], is_speculative=False, now_s=0.0)
    now_s = steps(times, MIN_STEPS + 1, seconds[True], is_speculative=True, now_s=now_s)
    kinds, current = [], is_on
    for _ in range(3 * FIRST_TRIAL_AFTER):
        current = times.prefers_speculation(2.0, is_on=current, margin=1.0)
        kinds.append(current)
        now_s = steps(times, 1, seconds[current], is_speculative=current, now_s=now_s)
    others = sum(kind != is_on for kind in kinds)
    assert TRIAL_STEPS <= others <= 3 * TRIAL_STEPS


def simulate(step_s: Callable[[int], float], *, is_right: bool, count: int = 400) -> GenerationScheduler:
    """Run one sequence on a simulated device. `step_s` gives the time of a step with some number of rows.
    Proposals are all right or all wrong."""
    prompt = [1, 2, 3]
    made = continued(prompt, 400)
    limits = GenerationLimits(4, 64, 64, 512, 1000)
    generation = GenerationScheduler(BlockPool(256, 4), limits)

    class Known(Fixed):
        def __init__(self, slots: SlotTable) -> None:
            super().__init__(0, 0, 0)
            self._slots = slots

        def propose(self, slots: Ints, max_counts: Ints) -> Proposals:
            at = int(self._slots.num_known[slots[0]]) - len(prompt)
            self._token_ids = ints([(t + (not is_right)) % 97 for t in [*made[at : at + 3], 0, 0, 0][:3]])
            return super().propose(slots, max_counts)

    generation.enable_speculation(Known)
    generation.add(generation_request("a", [prompt], count))
    now_s, num_made = 0.0, 0
    while (plan := generation.schedule(now_s)) is not None:
        now_s += step_s(plan.num_rows)
        rows = len(plan.sample.sampled_rows)
        tokens = ints([made[min(num_made + at, 399)] for at in range(rows)])
        before = int(generation._slots.num_known[0])
        generation.collect(plan, SampledResult(tokens))
        num_made += int(generation._slots.num_known[0]) - before if generation.busy else rows
    assert not generation.busy
    return generation


def test_it_is_on_where_it_wins_and_off_where_it_loses() -> None:
    wins = simulate(lambda rows: 1.0 + 0.05 * rows, is_right=True).speculation
    assert wins is not None and wins.counts.num_accepted_tokens > 200
    assert wins.speedup > 2
    too_slow = simulate(lambda rows: float(rows), is_right=True).speculation
    assert too_slow is not None and too_slow.counts.num_drafts < 60
    wrong = simulate(lambda rows: 1.0 + 0.05 * rows, is_right=False).speculation
    assert wrong is not None and wrong.counts.num_drafts < 30
    assert wrong.speedup == 1.0


# A proposer that takes time.


class Draft:
    """A draft model that takes `seconds` and predicts the tokens of `WithDraft` rightly or wrongly."""

    is_free = False
    num_tokens = 3

    def __init__(self, slots: SlotTable) -> None:
        self.is_right, self.seconds, self.num_calls = True, 0.1, 0
        self._slots = slots

    def propose(self, slots: Ints, max_counts: Ints) -> Proposals:
        self.num_calls += 1
        ahead = np.arange(self.num_tokens, dtype=np.int32)
        token_ids = token_at(self._slots.num_known[slots][:, None] + ahead) + np.int32(not self.is_right)
        seconds = self.seconds if max_counts.any() else 0.0
        return Proposals(token_ids.astype(np.int32), max_counts, seconds)

    def forget(self, slots: Ints) -> None:
        return None


def token_at(positions: Ints) -> Ints:
    found: Ints = positions * 7 % 97
    return found


class WithDraft:
    """Sequences that decode together on a simulated clock. A step takes 1 s, plus 0.02 s per row and the time
    of the draft."""

    def __init__(self, num_sequences: int = 2) -> None:
        length = 1 << 15
        limits = GenerationLimits(4, 64, 64, length, 1000)
        self.generation = GenerationScheduler(BlockPool(num_sequences * length // 16 + 8, 16), limits)
        self.generation.enable_speculation(Draft)
        for number in range(num_sequences):
            self.generation.add(generation_request(f"{number}", [[1, 2, 3]], length - 8))
        assert self.generation.speculation is not None
        self.speculation = self.generation.speculation
        assert isinstance(self.speculation.proposer, Draft)
        self.draft, self.now_s = self.speculation.proposer, 0.0

    def run(self, num_steps: int) -> int:
        """Run steps; returns how many of them had proposals."""
        num_speculative = 0
        for _ in range(num_steps):
            draft_s = self.speculation.counts.draft_s
            plan = next_plan(self.generation, self.now_s)
            draft_s = self.speculation.counts.draft_s - draft_s
            self.now_s += 1.0 + 0.02 * plan.num_rows + draft_s
            num_speculative += plan.sample.verify is not None
            rows = plan.sample.sampled_rows
            self.generation.collect(plan, SampledResult(token_at(plan.positions[rows] + 1)))
        return num_speculative


@pytest.mark.parametrize(("is_right", "seconds"), [(False, 0.3), (True, 4.0)], ids=["wrong", "slow"])
def test_a_draft_that_does_not_pay_runs_only_in_trials(is_right: bool, seconds: float) -> None:
    used = WithDraft()
    used.draft.is_right, used.draft.seconds = is_right, seconds
    used.run(200)
    assert used.draft.num_calls >= MIN_STEPS, "it is tried at first"
    assert not used.speculation.is_on
    before, num_trials = used.draft.num_calls, 3  # the steps until the next trial double each time
    used.run(FIRST_TRIAL_AFTER * (2**num_trials) - 200)
    num_calls = used.draft.num_calls - before
    assert TRIAL_STEPS <= num_calls <= num_trials * TRIAL_STEPS
    assert not used.speculation.is_on and used.speculation.speedup == 1.0


@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_a_draft_that_becomes_good_is_used_again(seconds: float) -> None:
    used = WithDraft(num_sequences=1)
    used.draft.seconds = seconds
    used.run(50)
    assert used.run(100) == 100, "it pays"
    used.draft.is_right = False
    assert used.run(4 * FIRST_TRIAL_AFTER) < 30 and not used.speculation.is_on
    used.draft.is_right = True
    assert not used.run(100), "nobody notices before the next trial"
    used.run(4 * FIRST_TRIAL_AFTER - 100)
    accepted = used.speculation.counts.num_accepted_tokens
    assert used.run(100) >= 100 - TRIAL_STEPS, "one trial of plain steps may fall into these"
    assert used.speculation.counts.num_accepted_tokens - accepted > 200
    assert used.speculation.speedup > 1.2


def test_a_draft_that_becomes_fast_is_used_again() -> None:
    used = WithDraft()
    used.draft.seconds = 4.0
    used.run(200)
    assert not used.speculation.is_on
    used.draft.seconds = 0.1
    used.run(FIRST_TRIAL_AFTER + 4 * TRIAL_STEPS)
    assert used.run(100) >= 100 - TRIAL_STEPS, "one trial of plain steps may fall into these"

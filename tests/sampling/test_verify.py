"""Proposed tokens: sampling after each of them gives the same tokens as plain sampling, and so the same
distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.sampling.sampler import Sampler, VerifyTensors
from penstock.types import Ints, SamplerParams, VerifyPlan
from tests.helpers import ints
from tests.sampling.plain import distribution
from tests.sampling.statistics import chi_square
from tests.thinning import num_examples

VOCAB, SLOTS = 24, 6
CPU = torch.device("cpu")
ONE_ROW_KINDS = [  # earlier tokens change their logits, so they get one row per step
    SamplerParams(temperature=0, presence_penalty=0.7),
    SamplerParams(temperature=1.0, seed=4, bad_token_ids=((3,), (5, 9)), logit_bias={5: 2.0}),
]
KINDS = [
    SamplerParams(temperature=0),
    SamplerParams(temperature=0.8, seed=5),
    SamplerParams(temperature=1.3, seed=6, top_k=6, top_p=0.9),
    SamplerParams(temperature=1.0, seed=7, min_p=0.05, logprobs=2),
    *ONE_ROW_KINDS,
]


def logits_of(kind: int, history: list[int]) -> torch.Tensor:
    """A model whose logits depend on all sampled tokens."""
    seed = hash((kind, *history)) % 2**32
    return torch.from_numpy(np.random.default_rng(seed).normal(size=VOCAB) * 2).float()


def verify_plan(rows: list[list[int]]) -> VerifyPlan:
    """The plan for the proposals of each sequence."""
    proposed = [token for row in rows for token in (*row, -1)]
    offsets = [at for row in rows for at in range(len(row) + 1)]
    firsts = np.flatnonzero(np.array(offsets) == 0).astype(np.int32)
    return VerifyPlan(ints(proposed), ints(offsets), firsts)


def tensors(plan: VerifyPlan) -> VerifyTensors:
    return VerifyTensors(*map(torch.from_numpy, (plan.proposed, plan.offsets, plan.firsts)))


def run_plain(count: int) -> list[list[int]]:
    sampler = Sampler(VOCAB, SLOTS, CPU, seed=1)
    for slot, params in enumerate(KINDS):
        sampler.join(slot, params, ints([1, 2]))
    history: list[list[int]] = [[] for _ in KINDS]
    slots = np.arange(len(KINDS), dtype=np.int32)
    for _ in range(count):
        logits = torch.stack([logits_of(kind, history[kind]) for kind in range(len(KINDS))])
        for kind, token in enumerate(sampler(logits, slots, torch.from_numpy(slots)).token_ids.tolist()):
            history[kind].append(token)
    return history


Propose = Callable[[int, list[int]], list[int]]


def run_verified(count: int, propose: Propose) -> tuple[list[list[int]], int]:
    """Like `run_plain`, with proposals. Also returns the number of steps."""
    sampler = Sampler(VOCAB, SLOTS, CPU, seed=1)
    for slot, params in enumerate(KINDS):
        sampler.join(slot, params, ints([1, 2]))
    history: list[list[int]] = [[] for _ in KINDS]
    steps = 0
    while min(map(len, history)) < count:
        steps += 1
        rows = [propose(kind, history[kind]) for kind in range(len(KINDS))]
        plan = verify_plan(rows)
        logits, slots = [], []
        for kind, row in enumerate(rows):
            logits += [logits_of(kind, history[kind] + row[:at]) for at in range(len(row) + 1)]
            slots += [kind] * (len(row) + 1)
        slots_array = ints(slots)
        sampled = sampler(torch.stack(logits), slots_array, torch.from_numpy(slots_array), tensors(plan))
        tokens: Ints = sampled.token_ids.numpy()
        for kind, accepted in enumerate(plan.num_accepted(tokens).tolist()):
            first = int(plan.firsts[kind])
            history[kind] += tokens[first : first + accepted + 1].tolist()
            assert int(sampler.last[kind]) == history[kind][-1]
            assert int(sampler.positions[kind]) == len(history[kind])
    return history, steps


def test_any_proposals_give_the_tokens_of_plain_sampling() -> None:
    """With seeded and unseeded requests, for right and wrong proposals."""
    count = 40
    expected = run_plain(count + 8)
    draw = np.random.default_rng(2)

    def propose(kind: int, history: list[int]) -> list[int]:
        if kind >= len(KINDS) - len(ONE_ROW_KINDS):
            return []
        row = expected[kind][len(history) : len(history) + int(draw.integers(0, 6))]
        if row and draw.random() < 0.5:
            row[int(draw.integers(0, len(row)))] = int(draw.integers(0, VOCAB))
        return row

    got, steps = run_verified(count, propose)
    assert [row[:count] for row in got] == [row[:count] for row in expected]
    assert steps >= count  # sequences without proposals take one step per token


def test_right_proposals_are_all_accepted_and_wrong_ones_are_not() -> None:
    plan = verify_plan([[5, 6, 7], [], [1, 2], [4]])
    tokens = ints([5, 6, 7, 8, 9, 1, 3, 2, -1, 4])
    assert plan.num_accepted(tokens).tolist() == [3, 0, 1, 0]
    assert plan.counts.tolist() == [4, 1, 3, 2]
    assert plan.num_accepted(ints([5, 0, 7, 8, -1, 1, 2, -1, 4, -1])).tolist() == [1, 0, 2, 1]


@pytest.mark.parametrize(
    "params",
    [SamplerParams(temperature=0.7), SamplerParams(top_k=9, top_p=0.8, min_p=0.02, temperature=1.2)],
    ids=["temperature", "filters"],
)
@pytest.mark.parametrize("proposed", [0, 5, 11])
def test_tokens_behind_proposals_are_distributed_as_the_reference_says(
    params: SamplerParams, proposed: int
) -> None:
    """The proposal is likely, unlikely or in between. The first token has the model's distribution, and so
    has the second one if the proposal was accepted."""
    draw = np.random.default_rng(4)
    first, second = (draw.normal(size=VOCAB) * 1.5 for _ in range(2))
    rounds, rows = num_examples(36) // 2, 256
    logits = torch.from_numpy(np.stack([first, second] * rows)).float()
    slots = np.repeat(np.arange(rows, dtype=np.int32), 2)
    plan = verify_plan([[proposed]] * rows)
    counts = [np.zeros(VOCAB), np.zeros(VOCAB)]
    sampler = Sampler(VOCAB, rows, CPU, seed=11)
    for number in range(rounds):
        for slot in range(rows):
            if number:
                sampler.leave(slot)
            sampler.join(slot, params, ints([1]))
        tokens = sampler(logits, slots, torch.from_numpy(slots), tensors(plan)).token_ids.numpy()
        accepted = plan.num_accepted(tokens) > 0
        assert (accepted == (tokens[::2] == proposed)).all()
        counts[0] += np.bincount(tokens[::2], minlength=VOCAB)
        counts[1] += np.bincount(tokens[1::2][accepted], minlength=VOCAB)
    for values, found in zip((first, second), counts, strict=True):
        expected = distribution(values, params, [], [])
        assert found[expected == 0].sum() == 0, "a token came that cannot"
        if found.sum() > 500:
            assert chi_square(found, expected) < 4.5, "standard deviations from what chance explains"

"""Sampling kernels: noise, filters, edits and the sampled tokens equal their references."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels import logit_thresholds as filters
from penstock.kernels.language import set_kernel_devices
from penstock.kernels.logit_thresholds import logit_thresholds, logit_thresholds_reference
from penstock.kernels.sampling import (
    ALL_TOKENS_MASKED,
    MAX_SEQUENCE_ROWS,
    NON_FINITE_LOGITS,
    PHILOX_ROUNDS,
    SLOT_TABLE_WIDTH,
    TOKENS_PER_PROGRAM,
    accept_proposals,
    accept_proposals_reference,
    logsumexp_and_ranks,
    logsumexp_and_ranks_reference,
    philox_reference,
    sample_tokens,
    sample_tokens_reference,
)
from penstock.sampling import plan
from penstock.sampling.plan import Column, SlotPlan
from penstock.sampling.sampler import Sampler
from penstock.types import SamplerParams, VerifyPlan
from tests.helpers import ints
from tests.sampling.driver import KINDS, SLOTS, Driver

VOCAB = TOKENS_PER_PROGRAM + 905  # for two programs, the second with fewer tokens


@pytest.fixture
def kernels(device: torch.device) -> Iterator[None]:
    set_kernel_devices("cuda", "cpu")
    yield
    set_kernel_devices("cuda")


def slots_table(params: list[SamplerParams], device: torch.device, vocab: int = VOCAB) -> Tensor:
    slots = SlotPlan(vocab, len(params), seed=3)
    for slot, one in enumerate(params):
        slots.join(slot, one, 0)
    return torch.from_numpy(slots.table).to(device)


def settings(table: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return table[:rows, :6].contiguous().view(torch.float32), table[:rows, 6:10]


def test_the_kernels_columns_are_those_of_the_plan() -> None:
    assert SLOT_TABLE_WIDTH == plan.WIDTH == Column.MIN_TOKENS + 1
    names = ("TEMPERATURE", "TOP_P", "MIN_P", "REPETITION", "PRESENCE", "FREQUENCY", "KEY")
    assert [Column[name] for name in names] == list(range(7))
    rest = ("STREAM", "TOP_K", "COUNT_ROW", "MASK_ROW", "WORK_ROW", "MIN_TOKENS")
    assert [Column[name] for name in rest] == [8, 10, 11, 12, 13, 14]


def test_noise_is_philox() -> None:
    """Compare with the same rounds computed in unsigned 64-bit integers."""
    keys = np.array([[7, 0, 0, 0], [0xFFFFFFFF, 0x80000001, 5, 1]], np.uint64)
    positions = np.array([0, 2**31 - 1], np.uint64)
    got = philox_reference(
        torch.from_numpy(keys.astype(np.uint32).view(np.int32)),
        torch.from_numpy(positions.view(np.int64)),
        5000,
    )
    for row in range(2):
        for token in (0, 1, 1023, 1024, 4095, 4096, 4999):
            low = np.uint64(0xFFFFFFFF)
            counter = np.uint64(token // 4096 * 1024 + token % 1024)
            c = [counter, positions[row], keys[row, 2], keys[row, 3]]
            k = [keys[row, 0], keys[row, 1]]
            for _ in range(PHILOX_ROUNDS):
                first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
                shift = np.uint64(32)
                c = [second >> shift ^ c[1] ^ k[0], second & low, first >> shift ^ c[3] ^ k[1], first & low]
                k = [k[0] + np.uint64(0x9E3779B9) & low, k[1] + np.uint64(0xBB67AE85) & low]
            assert int(got[row, token]) == int(c[token % 4096 // 1024])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_tokens_equal_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    params = [
        SamplerParams(temperature=t, seed=s) for t, s in ((0, 1), (1, 2), (0.3, -5), (2, None), (1, 2**63))
    ]
    table = slots_table(params, device)
    logits = (torch.randn(5, VOCAB + 9, device=device) * 2).to(dtype)[:, :VOCAB]  # strided rows
    order = torch.tensor([3, 0, 4, 1, 2], device=device, dtype=torch.int32)
    values, keys = settings(table, 5)
    at = order.long()
    positions = torch.tensor([0, 5, 2, 9, 1, 0], device=device, dtype=torch.int32)
    bounds = torch.tensor([float("-inf"), 9.0, 1.0, 2.5, float("-inf")], device=device)
    for thresholds_ in (None, bounds):
        expected = sample_tokens_reference(logits, values[at, 0], keys[at], positions[at], thresholds_)
        before = positions.clone()
        got = sample_tokens(logits, order, table, positions, thresholds=thresholds_)
        assert got.tolist() == expected.tolist()
        assert (positions - before).tolist() == [1, 1, 1, 1, 1, 0]


def test_rows_of_one_slot_use_the_noise_of_their_positions(device: torch.device) -> None:
    torch.manual_seed(0)
    params = [SamplerParams(temperature=t, seed=s) for t, s in ((0, 1), (1, 2), (0.6, None))]
    table = slots_table(params, device)
    values, keys = settings(table, 3)
    slots = torch.tensor([1, 1, 1, 0, 2, 2], device=device, dtype=torch.int32)
    offsets = torch.tensor([0, 1, 2, 0, 0, 1], device=device, dtype=torch.int32)
    positions = torch.tensor([4, 7, 1, 0], device=device, dtype=torch.int32)
    logits, at = torch.randn(6, VOCAB, device=device), slots.long()
    last, before = torch.full_like(positions, -5), positions.clone()
    got = sample_tokens(logits, slots, table, positions, last=last, offsets=offsets)
    expected = sample_tokens_reference(logits, values[at, 0], keys[at], positions[at] + offsets)
    assert got.tolist() == expected.tolist()
    assert positions.tolist() == before.tolist() and last.tolist() == [-5] * 4, "nothing is recorded"


def test_the_accepted_proposals_of_each_sequence_equal_the_reference(device: torch.device) -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        counts = draw.integers(1, MAX_SEQUENCE_ROWS + 1, size=int(draw.integers(1, 9)))
        offsets = np.concatenate([np.arange(count) for count in counts]).astype(np.int32)
        firsts = (np.cumsum(counts) - counts).astype(np.int32)
        proposed = draw.integers(0, 3, len(offsets)).astype(np.int32)
        tokens = np.where(draw.random(len(offsets)) < 0.8, proposed, -1).astype(np.int32)
        proposed[np.append(offsets[1:] == 0, True)] = -1
        order = draw.permutation(len(counts)).astype(np.int32)
        given = [torch.from_numpy(each).to(device) for each in (tokens, proposed, offsets, firsts)]
        slots = torch.from_numpy(np.repeat(order, counts)).to(device)
        state = [torch.arange(9, dtype=torch.int32, device=device) for _ in range(4)]
        accept_proposals_reference(*given, slots, *state[:2])
        accept_proposals(given[0], given[1], given[3], slots, *state[2:])
        assert state[0].tolist() == state[2].tolist() and state[1].tolist() == state[3].tolist()
        plan = VerifyPlan(proposed, offsets, firsts)
        accepted = plan.num_accepted(tokens)
        assert (state[0].cpu().numpy()[order] - order - 1).tolist() == accepted.tolist()
        assert int(state[1].min()) >= 0


def test_equal_logits_give_the_first_token(device: torch.device) -> None:
    table = slots_table([SamplerParams(temperature=0)] * 2, device)
    logits = torch.zeros(2, VOCAB, device=device)
    logits[1, [700, 4500, 4999]] = 1.0
    slots = torch.arange(2, device=device, dtype=torch.int32)
    positions = torch.zeros(3, device=device, dtype=torch.int32)
    assert sample_tokens(logits, slots, table, positions).tolist() == [0, 700]


NON_FINITE = [float("nan"), float("inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("whole", [False, True])
def test_a_row_with_non_finite_logits_is_reported_and_changes_no_other_row(
    dtype: torch.dtype, value: float, whole: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    params = [SamplerParams(temperature=t, seed=s) for t, s in ((0, 1), (1, 2), (0, 3), (0.7, 4))]
    table, slots = slots_table(params, device), torch.arange(4, device=device, dtype=torch.int32)
    values, keys = settings(table, 4)
    logits = torch.randn(4, VOCAB, device=device).to(dtype)
    zeros = torch.zeros(5, device=device, dtype=torch.int32)
    bounds = torch.tensor([0.5, 0.5, float("nan"), float("nan")], device=device)
    for thresholds_ in (None, bounds):
        logits[2:] = torch.randn(2, VOCAB, device=device).to(dtype)
        before = sample_tokens(logits, slots, table, zeros.clone(), thresholds=thresholds_)
        logits[2:, slice(None) if whole else slice(4321, 4322)] = value
        last = zeros.clone()
        got = sample_tokens(logits, slots, table, zeros.clone(), thresholds=thresholds_, last=last)
        assert got.tolist() == [*before[:2].tolist(), NON_FINITE_LOGITS, NON_FINITE_LOGITS]
        assert (
            got.tolist()
            == sample_tokens_reference(logits, values[:, 0], keys, zeros[:4], thresholds_).tolist()
        )
        assert last[:2].tolist() == before[:2].tolist()
        assert int(last.min()) >= 0 and int(last.max()) < VOCAB


def test_a_row_whose_tokens_are_all_masked_is_reported(device: torch.device) -> None:
    table = slots_table([SamplerParams(temperature=0), SamplerParams(temperature=1)], device)
    logits = torch.full((2, VOCAB), float("-inf"), device=device)
    slots = torch.arange(2, device=device, dtype=torch.int32)
    positions, last = (torch.zeros(3, device=device, dtype=torch.int32) for _ in range(2))
    assert sample_tokens(logits, slots, table, positions, last=last).tolist() == [ALL_TOKENS_MASKED] * 2
    assert int(last.min()) >= 0 and int(last.max()) < VOCAB


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from NumPy, which the interpreter uses
def test_a_row_with_non_finite_logits_is_reported_whatever_it_asks_for(device: torch.device) -> None:
    """With kernels and without. Each kind of row has NaN in one step and inf in another."""
    slots = np.arange(len(EVERYTHING), dtype=np.int32)
    generator = torch.Generator().manual_seed(5)
    sound = (torch.randn(len(slots), VOCAB, generator=generator) * 3).to(device)
    found = []
    for kernels in (True, False):
        set_kernel_devices(*(("cuda", "cpu") if kernels else ()))
        for step in range(5):
            sampler = Sampler(VOCAB, len(slots), device, seed=1)
            for slot, params in enumerate(EVERYTHING):
                sampler.join(slot, params, ints([1, 2, 3]))
            logits = sound.clone()
            with_nan, with_inf = [step, step + 5], [(step + 2) % 5, (step + 2) % 5 + 5]
            logits[with_nan], logits[with_inf] = NON_FINITE
            got = sampler(logits, slots, torch.from_numpy(slots).to(device)).token_ids.tolist()
            spoilt = {*with_nan, *with_inf}
            assert {row for row, token in enumerate(got) if token == NON_FINITE_LOGITS} == spoilt
            assert int(sampler.last.min()) >= 0 and int(sampler.last.max()) < VOCAB
            found.append([token for row, token in enumerate(got) if row not in spoilt])
            assert min(found[-1]) >= 0
    assert found[: len(found) // 2] == found[len(found) // 2 :]


FILTERS = [
    SamplerParams(top_k=1),
    SamplerParams(top_k=20, temperature=0.7),
    SamplerParams(top_k=1500),  # more than the number of segments
    SamplerParams(top_k=4900),  # more than the room for candidates
    SamplerParams(top_p=0.4),
    SamplerParams(top_p=0.95, temperature=3.0),  # spans most of the row
    SamplerParams(top_p=0.9, temperature=0.2),
    SamplerParams(min_p=0.1),
    SamplerParams(top_k=50, top_p=0.8),
    SamplerParams(top_k=50, top_p=0.8, min_p=0.05, temperature=1.5),
    SamplerParams(top_p=0.7, min_p=1e-9, temperature=2.0),
    SamplerParams(top_p=0.0),
]


@pytest.mark.parametrize(
    ("dtype", "spread"),
    [(torch.float32, 0.5), (torch.bfloat16, 0.5), (torch.float16, 4.0)],
)
def test_thresholds_keep_what_sorting_keeps(
    dtype: torch.dtype, spread: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "_MAX_CANDIDATES", 1024)  # so that these rows can have too many candidates
    torch.manual_seed(1)
    rows = len(FILTERS)
    table = slots_table(FILTERS, device)
    logits = (torch.randn(rows + 1, VOCAB, device=device) * spread).to(dtype)
    logits[:, 100:200] = float("-inf")
    slots = torch.arange(rows + 1, device=device, dtype=torch.int32)  # the last row has no filter
    got = logit_thresholds(logits, slots, table)
    assert got[-1] == float("-inf")
    values, _ = settings(table, rows)
    x = logits[:rows].float()
    top_k = table[:rows, Column.TOP_K]
    expected = logit_thresholds_reference(x, values[:, 0], top_k, values[:, 1], values[:, 2])
    kept, wanted = x >= got[:rows, None], x >= expected[:, None]
    probability = (x / values[:, :1]).softmax(dim=1)
    for row in range(rows):
        differs = kept[row] ^ wanted[row]
        if FILTERS[row].top_p == 1:
            assert not differs.any(), FILTERS[row]
        # At the edge of the top-p set, rounding may add or remove one logit value.
        assert x[row][differs].unique().numel() <= 1, FILTERS[row]
        assert probability[row][kept[row]].sum() >= probability[row][wanted[row]].sum() * (
            1 - 1e-4 - differs.any().float() * 1e-2
        )
    assert kept[0].sum() == (x[0] == x[0].max()).sum()
    assert kept[-1].sum() == (x[-1] == x[-1].max()).sum(), "top_p 0 keeps the likeliest"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_ranks_equal_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(2)
    logits = (torch.randn(4, VOCAB, device=device) * 3).to(dtype)
    rows = torch.tensor([2, 0], device=device)
    chosen = torch.stack((logits[2].argmax(), torch.tensor(4999, device=device))).int()
    got, expected = (
        logsumexp_and_ranks(logits, rows, chosen),
        logsumexp_and_ranks_reference(logits, rows, chosen),
    )
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=1e-6)
    assert got[1].tolist() == expected[1].tolist()
    assert dtype != torch.float32 or got[1][0] == 1


EVERYTHING = [
    SamplerParams(temperature=0),
    SamplerParams(temperature=0.8, seed=4),
    SamplerParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=-0.2),
    SamplerParams(temperature=0, logit_bias={5: 30.0, 4990: 29.0, 7: -3.0}, frequency_penalty=1.0),
    SamplerParams(
        temperature=0, bad_token_ids=((9,), (1, 2), (3, 3, 3, 3)), logit_bias={1: 40, 2: 39, 9: 99}
    ),
    SamplerParams(temperature=1, seed=9, allowed_token_ids=tuple(range(3, 5000, 7)), top_k=12),
    SamplerParams(temperature=0, min_tokens=3, eos_token_ids=(11,), logit_bias={11: 50.0}, logprobs=2),
    SamplerParams(temperature=0, bad_token_ids=((3, 3, 3, 3),), logit_bias={3: 44.0, 8: 40.0}),
    SamplerParams(temperature=0.9, seed=1, top_p=0.6, min_p=0.01, repetition_penalty=1.2, logprobs=0),
    SamplerParams(temperature=0, min_tokens=2, stop_token_ids=(4000,), allowed_token_ids=(4000, 4001)),
]


def run(steps: int, device: torch.device, dtype: torch.dtype) -> tuple[list[list[int]], list[Tensor]]:
    sampler = Sampler(VOCAB, 16, device, seed=1)
    slots = ints([3, 1, 0, 9, 8, 7, 15, 2, 6, 11])
    prompt = np.arange(0, 3000, 3, dtype=np.int32)
    for slot, params in zip(slots.tolist(), EVERYTHING, strict=True):
        sampler.join(slot, params, prompt)
    sampler.mask(0, plan.packed_bits(range(2000), VOCAB))
    generator = torch.Generator().manual_seed(5)
    tokens, logprobs = [], []
    for _ in range(steps):
        logits = (torch.randn(len(slots), VOCAB, generator=generator) * 3).to(device, dtype)
        sampled = sampler(logits, slots, torch.from_numpy(slots).to(device))
        tokens.append(sampled.token_ids.tolist())
        assert sampled.logprob_rows is not None and sampled.logprob_rows.tolist() == [6, 8]
        assert sampled.logprobs is not None
        logprobs += [sampled.logprobs.values, sampled.logprobs.ranks.float()]
    return tokens, logprobs


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 5), (torch.bfloat16, 2)])
@pytest.mark.usefixtures("kernels")
def test_a_batch_with_every_option_gives_the_tokens_of_torch(
    dtype: torch.dtype, steps: int, device: torch.device
) -> None:
    got, scores = run(steps, device, dtype)
    set_kernel_devices()
    expected, wanted = run(steps, device, dtype)
    assert got == expected
    for one, other in zip(scores, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
    columns = np.array(got).T
    assert set(columns[4]) >= {1} and 9 not in columns[4]
    assert not any((a, b) == (1, 2) for a, b in zip(columns[4], columns[4][1:], strict=False))
    assert set(columns[6][3:]) <= {11} and 11 not in columns[6][:3]
    assert columns[7].tolist() == [3, 3, 3, 8, 3][:steps]
    assert columns[9].tolist()[:2] == [4001] * 2


def join_and_leave(seed: int) -> dict[int, list[int]]:
    rng, driver = np.random.default_rng(seed), Driver()
    for _ in range(12):
        waiting = [request for request in range(len(KINDS)) if request not in driver.slot_of]
        if waiting and len(driver.slot_of) < SLOTS:
            driver.join(int(rng.choice(waiting)))
        if len(driver.slot_of) > 3 and rng.random() < 0.5:
            driver.leave(int(rng.choice(sorted(driver.slot_of))))
        taking_part = rng.permutation(sorted(driver.slot_of))
        driver.step(taking_part[: rng.integers(1, len(taking_part) + 1)].tolist())
    return driver.history


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on CPU tensors, in the interpreter")
@pytest.mark.usefixtures("kernels")
def test_sequences_that_join_and_leave_get_the_tokens_of_torch(seed: int) -> None:
    got = join_and_leave(seed)
    set_kernel_devices()
    assert got == join_and_leave(seed)

"""The sampler does no work for rows that need none, and a row's tokens do not depend on its batch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import BadValue
from penstock.sampling.plan import Need, SlotPlan, packed_bits
from penstock.sampling.sampler import Sampler
from penstock.types import SamplerParams
from tests.helpers import ints
from tests.runner.trap import DeepTrap, Trap
from tests.sampling.driver import CPU, KINDS, SLOTS, VOCAB, Driver, logits_of
from tests.sampling.plain import edited
from tests.waiting import PATIENCE_S


def alone(request: int, steps: int) -> Driver:
    driver = Driver()
    driver.join(request)
    for _ in range(steps):
        driver.step([request])
    return driver


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_sequence_samples_the_same_tokens_whoever_else_joins_and_leaves(data: st.DataObject) -> None:
    driver = Driver()
    for _ in range(data.draw(st.integers(1, 14))):
        waiting = [request for request in range(len(KINDS)) if request not in driver.slot_of]
        if waiting and len(driver.slot_of) < SLOTS and data.draw(st.booleans()):
            driver.join(data.draw(st.sampled_from(waiting)))
        if driver.slot_of and data.draw(st.integers(0, 3)) == 0:  # it may rejoin and continue
            driver.leave(data.draw(st.sampled_from(sorted(driver.slot_of))))
        if driver.slot_of:
            batch = data.draw(st.lists(st.sampled_from(sorted(driver.slot_of)), unique=True, min_size=1))
            driver.step(batch)
    for request, history in driver.history.items():
        by_itself = alone(request, len(history))
        assert history == by_itself.history[request], KINDS[request]
        pairs = zip(driver.logprobs.get(request, []), by_itself.logprobs.get(request, []), strict=True)
        for (ids, values), (other_ids, others) in pairs:
            assert ids == other_ids and values == pytest.approx(others, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    request=st.sampled_from([n for n, params in enumerate(KINDS) if params.temperature == 0]),
    steps=st.integers(1, 8),
)
def test_greedy_rows_take_the_likeliest_token_of_the_processed_logits(request: int, steps: int) -> None:
    history = alone(request, steps).history[request]
    inside = tuple(token for token in KINDS[request].eos_token_ids if token < VOCAB)
    params = msgspec.structs.replace(KINDS[request], eos_token_ids=inside)  # the reference has no others
    for position, token in enumerate(history):
        x = logits_of(request, history[:position]).double().numpy()
        assert token == edited(x, params, [1, 2, request], history[:position]).argmax()


class Recorder(TorchDispatchMode):
    """Records the operations that ran, and the largest fp32 tensor that one of them created."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.largest = max(self.largest, out.numel())
        return out


def test_greedy_rows_without_processors_cost_one_maximum_of_the_logits() -> None:
    sampler = Sampler(VOCAB, SLOTS, CPU)
    for slot in range(SLOTS):
        sampler.join(slot, SamplerParams(temperature=0), ints([1]))
    slots = np.arange(SLOTS, dtype=np.int32)
    at, logits = torch.from_numpy(slots), torch.randn(SLOTS, VOCAB).bfloat16()
    sampler(logits, slots, at)
    with Recorder() as seen:
        for _ in range(3):
            sampler(logits, slots, at)
    assert seen.largest == 0, "no fp32 copy"
    assert seen.names.count("max") == 3
    of_rows = {"_to_copy", "index", "index_add_", "index_copy_", "ones_like", "clamp_min"}
    checks = {"isneginf", "masked_fill_", "lt", "bitwise_not"}  # on the maximum, not on the logits
    assert set(seen.names) <= {"max"} | of_rows | checks
    processors = sampler._processors
    for empty in (processors.work, processors.masks, processors.counts.table):
        assert empty.numel() == 0
    assert processors.entries is None


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_nothing_is_sent_while_no_sequence_joins_or_leaves(kind: int) -> None:
    sampler = Sampler(VOCAB, SLOTS, CPU)
    slots = ints([2, 0, 4])
    for slot in slots.tolist():
        sampler.join(slot, KINDS[kind], ints([1]))
    at = torch.from_numpy(slots)
    for _ in range(3):  # after the last of these, min tokens are reached
        sampler(torch.randn(3, VOCAB), slots, at)
    before = sampler.uploads
    for _ in range(5):
        sampler(torch.randn(3, VOCAB), slots, at)
    assert sampler.uploads == before
    sampler.leave(0)
    sampler.join(0, SamplerParams(temperature=0), ints([1]))
    sampler(torch.randn(3, VOCAB), slots, at)
    assert sampler.uploads > before


def test_only_rows_with_processors_are_copied_to_fp32() -> None:
    sampler = Sampler(VOCAB, SLOTS, CPU)
    for slot in range(SLOTS):
        sampler.join(slot, SamplerParams(temperature=0), ints([1]))
    sampler.leave(3)
    sampler.join(3, SamplerParams(temperature=0, logit_bias={2: 1.0}), ints([1]))
    slots, logits = np.arange(SLOTS, dtype=np.int32), torch.randn(SLOTS, VOCAB).bfloat16()
    with Recorder() as seen:
        sampler(logits, slots, torch.from_numpy(slots))
    assert seen.largest < 2 * VOCAB, "as wide as that one row"
    assert sampler._processors.counts.table.numel() == 0


def test_token_counts_are_held_only_for_slots_with_penalties_and_freed() -> None:
    sampler = Sampler(VOCAB, 64, CPU)
    penal = SamplerParams(temperature=0, presence_penalty=1.0)
    for turn in range(40):
        slot = turn % 64
        sampler.join(slot, penal, ints([turn % VOCAB]))
        sampler(torch.zeros(1, VOCAB), ints([slot]), torch.tensor([slot]))
        assert int((sampler._processors.counts.table[0] != 0).sum()) == (1 if turn % VOCAB == 0 else 2)
        sampler.leave(slot)
    assert len(sampler._processors.counts.table) == len(sampler._processors.work) == 1
    assert sampler.plan.counts.used == 0


def test_stop_tokens_are_no_longer_forbidden_once_min_tokens_are_reached() -> None:
    plan = SlotPlan(VOCAB, 4, seed=0)
    plan.join(1, SamplerParams(temperature=0, min_tokens=3, eos_token_ids=(4,)), 0)
    plan.join(2, SamplerParams(temperature=0, min_tokens=3, eos_token_ids=(4,)), 3)
    needs = [plan.step(ints([1, 2])) for _ in range(5)]
    assert needs == [Need.ENTRIES] * 3 + [Need.NOTHING] * 2


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_a_sequence_does_not_stop_before_its_min_tokens(temperature: float) -> None:
    sampler = Sampler(VOCAB, 4, CPU)
    params = SamplerParams(temperature=temperature, min_tokens=2, eos_token_ids=(4,), stop_token_ids=(6,))
    sampler.join(1, params, ints([1]))
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 6, 9]] = torch.tensor([9.0, 8.0, 7.0])
    got = [sampler(logits, ints([1]), torch.tensor([1])).token_ids.tolist() for _ in range(4)]
    assert got == [[9], [9], [4], [4]]


def test_a_mask_limits_the_next_token_together_with_allowed_ids() -> None:
    sampler = Sampler(VOCAB, 4, CPU)
    sampler.join(0, SamplerParams(temperature=0), ints([1]))
    sampler.join(1, SamplerParams(temperature=0, allowed_token_ids=(3, 4)), ints([1]))
    slots, at = ints([0, 1]), torch.tensor([0, 1])
    logits = torch.arange(VOCAB).float().expand(2, -1)
    assert sampler(logits, slots, at).token_ids.tolist() == [36, 4]
    for slot in (0, 1):
        sampler.mask(slot, packed_bits([0, 3, 35], VOCAB))
    assert sampler(logits, slots, at).token_ids.tolist() == [35, 3]
    assert sampler.positions.tolist() == [2, 2, 0, 0, 0], "a mask does not set a row back"
    sampler.mask(0, None)
    sampler.mask(1, None)
    assert sampler(logits, slots, at).token_ids.tolist() == [36, 4]
    with pytest.raises(ValueError, match=r"\(3,\) words; this vocabulary needs \(2,\)"):
        sampler.mask(0, np.zeros(3, np.int32))


def test_a_longer_bad_word_keeps_the_recorded_tokens_of_other_slots() -> None:
    sampler = Sampler(VOCAB, 4, CPU)
    bias = {5: 9.0, 6: 8.0}
    sampler.join(0, SamplerParams(temperature=0, bad_token_ids=((5, 5, 5),), logit_bias=bias), ints([5, 5]))
    zeros, tokens = torch.zeros(1, VOCAB), []
    for step in range(8):
        if step == 5:
            word = (7,) * 20
            sampler.join(1, SamplerParams(temperature=0, bad_token_ids=(word,)), ints([1]))
        tokens += sampler(zeros, ints([0]), torch.tensor([0])).token_ids.tolist()
    assert tokens == [5, 5, 6, 5, 5, 6, 5, 5], "prompts do not count"


def test_edits_of_many_tokens_give_what_one_edit_after_another_gives() -> None:
    """Bias, stop tokens and bad words applied as tables, against loops."""
    params = SamplerParams(
        temperature=0.0,
        max_tokens=64,
        min_tokens=3,
        logit_bias={token: (token % 7) - 3.0 for token in range(0, VOCAB, 2)},
        stop_token_ids=tuple(range(5, 15)),
        bad_token_ids=((1,), (2, 3), (2, 4, 3), (9, 9, 9, 6), (6,)),
    )
    sampler = Sampler(VOCAB, 4, CPU)
    sampler.join(2, params, ints([1]))
    slots, output = ints([2]), []
    for step in range(12):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(step))
        wanted = logits[0].clone()
        for word in params.bad_token_ids:
            if tuple(output[len(output) - len(word) + 1 :]) == word[:-1] and len(output) >= len(word) - 1:
                wanted[word[-1]] = -torch.inf
        if step < params.min_tokens:
            wanted[list(params.stop_token_ids)] = -torch.inf
        for token, bias in params.logit_bias.items():
            wanted[token] += bias
        token = int(sampler(logits, slots, torch.from_numpy(slots)).token_ids[0])
        assert token == int(wanted.argmax()), f"step {step}"
        output.append(token)
    assert sampler.plan.entries().num_entries == len(params.logit_bias) + 10 + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_model_s_own_distribution(dtype: torch.dtype) -> None:
    sampler = Sampler(VOCAB, 4, CPU)
    sampler.join(0, SamplerParams(temperature=0), ints([1]))
    sampler.join(2, SamplerParams(temperature=0.1, seed=1, logprobs=4, logit_bias={9: 50.0}), ints([1]))
    sampler.join(3, SamplerParams(temperature=0, logprobs=-1), ints([1]))
    logits = (torch.randn(3, VOCAB) * 3).to(dtype)
    slots = ints([2, 0, 3])
    got = sampler(logits, slots, torch.from_numpy(slots))
    assert got.logprob_rows is not None and got.logprob_rows.tolist() == [0, 2]
    assert got.logprobs is not None
    expected = logits.float().log_softmax(dim=1)
    assert got.logprobs.ids[:, 0].tolist() == [9, int(logits[2].argmax())]
    for place, row in enumerate((0, 2)):
        wanted = expected[row][got.logprobs.ids[place].long()]
        torch.testing.assert_close(got.logprobs.values[place], wanted, atol=1e-4, rtol=0)
        assert (got.logprobs.values[place, 1:].diff() <= 0).all()
    assert got.logprobs.values.shape == (2, 1 + VOCAB)
    assert got.logprobs.ranks.tolist() == [int((logits[0] >= logits[0, 9]).sum()), 1]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplerParams(logit_bias={VOCAB: 1.0}), "logit_bias has token id 37"),
        (SamplerParams(allowed_token_ids=(-1,)), "allowed_token_ids has token id -1"),
        (SamplerParams(allowed_token_ids=()), "allowed_token_ids is empty"),
        (SamplerParams(bad_token_ids=((1, 99),)), "bad_words has token id 99"),
        (SamplerParams(bad_token_ids=((1,) * 65,)), "65 tokens in one text; use at most 64"),
        (SamplerParams(bad_token_ids=tuple((1, i % VOCAB, i // VOCAB) for i in range(2049))), "2049 token"),
        (SamplerParams(stop_token_ids=tuple(range(1025))), "1025 token ids; use at most 1024"),
        (SamplerParams(stop_token_ids=(2**31,)), "stop_token_ids has token id"),
        (SamplerParams(eos_token_ids=(-(10**5000),)), "eos_token_ids has token id a number of"),
        (SamplerParams(logit_bias=dict.fromkeys(range(1025), 1.0)), "use at most 1024"),
        (SamplerParams(logit_bias={1: float("nan")}), "not finite"),
        (SamplerParams(repetition_penalty=1e308), "repetition_penalty is 1e\\+308"),
        (SamplerParams(repetition_penalty=1e-308), "repetition_penalty is 1e-308"),
        (SamplerParams(temperature=1e300), "temperature is 1e\\+300; use 0 to 1000"),
        (SamplerParams(presence_penalty=float("nan")), "presence_penalty is nan"),
        (SamplerParams(top_k=2**63), "top_k is"),
        (SamplerParams(min_tokens=2**31), "min_tokens is"),
        (SamplerParams(max_tokens=0), "max_tokens is 0; use 1 to"),
        (SamplerParams(seed=10**5000), "seed is a number of"),
    ],
)
def test_values_that_cannot_be_sampled_with_are_refused(params: SamplerParams, words: str) -> None:
    sampler = Sampler(VOCAB, 4, CPU)
    with pytest.raises(BadValue, match=words):
        sampler.join(0, params, ints([1]))
    sampler.plan.check_integrity()


def test_a_slot_belongs_to_one_sequence() -> None:
    sampler = Sampler(VOCAB, 4, CPU)
    sampler.join(0, SamplerParams(), ints([1]))
    with pytest.raises(ValueError, match="slot 0 is taken by another sequence"):
        sampler.join(0, SamplerParams(), ints([1]))
    with pytest.raises(ValueError, match=r"slot 4 is not in 0 … 3"):
        sampler.join(4, SamplerParams(), ints([1]))
    with pytest.raises(ValueError, match="slot 1 is free"):
        sampler.leave(1)
    with pytest.raises(ValueError, match=r"logits have shape \(1, 5\), not \(1, 37\)"):
        sampler(torch.zeros(1, 5), ints([0]), torch.tensor([0]))


def test_the_slot_plan_does_not_import_torch() -> None:
    code = "import sys, penstock.sampling.plan\nprint('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert ran.stdout.strip() == "False"


def test_a_sampling_step_reads_nothing_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(VOCAB, len(KINDS), CPU, seed=1)
    slots, logits = np.arange(len(KINDS), dtype=np.int32), torch.randn(len(KINDS), VOCAB)
    at = torch.from_numpy(slots)
    trap = Trap()
    send = Sampler._send

    def opened(self: Sampler, array: Any) -> torch.Tensor:
        trap.open = True
        try:
            return send(self, array)
        finally:
            trap.open = False

    monkeypatch.setattr(Sampler, "_send", opened)
    with trap, DeepTrap(trap):
        for slot, params in enumerate(KINDS):
            sampler.join(slot, params, ints([1, 2]), ints([7] * slot))
        sampler.mask(0, packed_bits([3, 4], VOCAB))
        for _ in range(3):
            sampler(logits, slots, at)
    assert trap.calls > 50

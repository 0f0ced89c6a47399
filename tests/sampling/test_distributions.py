"""Sampled tokens follow the distribution of a plain reference."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from penstock.kernels.sampling import gumbel_reference
from penstock.sampling.sampler import Sampler
from penstock.types import SamplerParams
from tests.helpers import ints
from tests.sampling.plain import distribution
from tests.sampling.statistics import chi_square
from tests.thinning import num_examples

VOCAB, ROWS, STEPS = 40, 256, num_examples(36) // 2
PROMPT = [3, 3, 5, 20]
CASES = {
    "temperature": SamplerParams(temperature=0.7),
    "hot": SamplerParams(temperature=1.8),
    "top-k": SamplerParams(top_k=7),
    "top-k, cold": SamplerParams(top_k=5, temperature=0.5),
    "top-k off": SamplerParams(top_k=-1),
    "top-p": SamplerParams(top_p=0.6),
    "min-p": SamplerParams(min_p=0.15, temperature=1.3),
    "all filters": SamplerParams(top_k=9, top_p=0.8, min_p=0.02, temperature=1.2),
    "repetition": SamplerParams(repetition_penalty=1.7),
    "presence and frequency": SamplerParams(presence_penalty=0.6, frequency_penalty=-0.4),
    "penalties and filters": SamplerParams(repetition_penalty=0.8, frequency_penalty=0.5, top_p=0.85),
    "bias and allowed": SamplerParams(logit_bias={2: 2.0, 9: -1.0}, allowed_token_ids=tuple(range(1, 30))),
    "bad words": SamplerParams(bad_token_ids=((4,), (7, 6), (6, 1))),
    "min tokens": SamplerParams(min_tokens=9, eos_token_ids=(0,), stop_token_ids=(8,)),
}
OUTPUT = [7, 7, 6]  # every row's earlier tokens


def draw(params: SamplerParams, logits: torch.Tensor, seeded: bool) -> np.ndarray:
    """Counts of the next token after OUTPUT, [vocab]. Each row and step is an independent draw."""
    sampler = Sampler(VOCAB, ROWS, torch.device("cpu"), seed=11)
    slots = np.arange(ROWS, dtype=np.int32)
    counts = np.zeros(VOCAB)
    for step in range(STEPS):
        for slot in slots.tolist():
            if step:
                sampler.leave(slot)
            seed = step * ROWS + slot if seeded else None
            given = msgspec.structs.replace(params, seed=seed)
            sampler.join(slot, given, ints(PROMPT), ints(OUTPUT))
        sampled = sampler(logits.expand(ROWS, -1), slots, torch.from_numpy(slots))
        counts += np.bincount(sampled.token_ids.numpy(), minlength=VOCAB)
    return counts


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_distributed_as_the_reference_says(case: str, seeded: bool) -> None:
    logits = torch.from_numpy(np.random.default_rng(4).normal(size=VOCAB) * 1.5).float()
    expected = distribution(logits.double().numpy(), CASES[case], PROMPT, OUTPUT)
    counts = draw(CASES[case], logits, seeded)
    assert counts[expected == 0].sum() == 0, "a token came that cannot"
    assert chi_square(counts, expected) < 4.5, "standard deviations from what chance explains"


def test_a_wrong_distribution_is_noticed() -> None:
    logits = torch.from_numpy(np.random.default_rng(4).normal(size=VOCAB) * 1.5).float()
    expected = distribution(logits.double().numpy(), SamplerParams(temperature=0.85), PROMPT, OUTPUT)
    assert chi_square(draw(CASES["temperature"], logits, False), expected) > 6


def test_noise_has_the_moments_of_a_gumbel_variable_and_is_finite() -> None:
    keys = torch.tensor([[1, 2, 0, 0], [1, 2, 1, 0]], dtype=torch.int32)
    noise = gumbel_reference(keys, torch.tensor([0, 0]), 1 << 20).double()
    assert noise.isfinite().all()
    assert noise.mean(dim=1).numpy() == pytest.approx([0.5772] * 2, abs=0.006)
    assert noise.var(dim=1).numpy() == pytest.approx([np.pi**2 / 6] * 2, abs=0.02)
    assert torch.corrcoef(noise)[0, 1].abs() < 0.005
    assert 11 < float(noise.max()) < 23


def test_rows_without_a_seed_never_share_noise() -> None:
    sampler = Sampler(5000, 8, torch.device("cpu"), seed=0)
    seen = []
    for _ in range(3):
        for slot in range(8):
            sampler.join(slot, SamplerParams(), ints([1]))
        slots = np.arange(8, dtype=np.int32)
        for _ in range(2):
            seen += sampler(torch.zeros(8, 5000), slots, torch.from_numpy(slots)).token_ids.tolist()
        for slot in range(8):
            sampler.leave(slot)
    assert len(set(seen)) > 40  # of 48 draws of 5,000

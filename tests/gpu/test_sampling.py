"""The sampler on CUDA: no waits for the device, graphs, and a vocabulary of real size.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from penstock.kernels.language import set_kernel_devices
from penstock.kernels.logit_thresholds import logit_thresholds, logit_thresholds_reference
from penstock.sampling.plan import Column, packed_bits
from penstock.sampling.sampler import Sampler
from penstock.types import SamplerParams
from tests.helpers import ints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCAB, CUDA = 151_936, torch.device("cuda")
KINDS = [
    SamplerParams(temperature=0),
    SamplerParams(temperature=0.8, seed=3),
    SamplerParams(temperature=0.8, seed=3, top_k=20, top_p=0.95),
    SamplerParams(temperature=1.0, seed=4, top_p=0.9),  # keeps tens of thousands of near-Gaussian logits
    SamplerParams(temperature=1.0, seed=5, min_p=0.05, logprobs=5),
    SamplerParams(temperature=0.7, seed=6, repetition_penalty=1.2, frequency_penalty=0.5, top_p=0.8),
    SamplerParams(temperature=0, bad_token_ids=((1, 2), (3,)), logit_bias={1: 40.0, 2: 39.0}),
    SamplerParams(temperature=0, min_tokens=2, eos_token_ids=(9,), logit_bias={9: 50.0}),
    SamplerParams(temperature=1.0, seed=7, allowed_token_ids=tuple(range(0, VOCAB, 1000))),
]


@pytest.fixture(autouse=True)
def no_synchronization() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")
    set_kernel_devices("cuda")


def made() -> tuple[Sampler, np.ndarray, torch.Tensor]:
    sampler = Sampler(VOCAB, 32, CUDA, seed=1)
    slots = ints([4, 7, 1, 0, 30, 31, 12, 9, 2])
    for slot, params in zip(slots.tolist(), KINDS, strict=True):
        sampler.join(slot, params, np.arange(50, dtype=np.int32))
    return sampler, slots, torch.from_numpy(slots).to(CUDA)


def steps(
    sampler: Sampler, slots: np.ndarray, at: torch.Tensor, batches: list[torch.Tensor]
) -> list[torch.Tensor]:
    return [sampler(logits, slots, at).token_ids for logits in batches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_give_the_tokens_of_plain_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(len(KINDS), VOCAB, device=CUDA) * 2).to(dtype) for _ in range(4)]
    got = torch.stack(steps(*made(), batches))
    set_kernel_devices()
    expected = torch.stack(steps(*made(), batches))
    # Sums of exponentials differ in their last bits, so a top-p set may end one logit earlier.
    assert (got == expected).float().mean() > 0.94


def test_a_step_never_waits_for_the_device() -> None:
    sampler, slots, at = made()
    logits = torch.randn(len(KINDS), VOCAB, device=CUDA, dtype=torch.bfloat16)
    steps(sampler, slots, at, [logits] * 3)  # compiles the kernels
    torch.cuda.synchronize()
    sampler.leave(4)
    torch.cuda.set_sync_debug_mode("error")
    sampler.join(4, KINDS[5], np.arange(9, dtype=np.int32))
    sampler.mask(7, packed_bits(range(99), VOCAB))
    sampler(logits, slots, at)
    before = sampler.uploads
    for _ in range(3):
        sampler(logits, slots, at)
    assert sampler.uploads == before


@pytest.mark.parametrize("filtered", [False, True])
def test_a_sampling_graph_serves_sequences_that_join_later(filtered: bool) -> None:
    logits = torch.randn(4, VOCAB, device=CUDA, dtype=torch.bfloat16)
    slots = torch.tensor([0, 1, 2, 8], device=CUDA, dtype=torch.int32)  # the last is a padding row

    def fresh() -> Sampler:
        sampler = Sampler(VOCAB, 8, CUDA, seed=1)
        for slot in range(3):
            sampler.join(slot, KINDS[slot % (3 if filtered else 2)], ints([1]))
        sampler.flush()
        return sampler

    eager, captured = fresh(), fresh()
    expected = [eager.plain(logits, slots, filtered).tolist() for _ in range(3)]
    fresh().plain(logits, slots, filtered)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.plain(logits, slots, filtered)
    got = []
    for _ in range(3):
        graph.replay()
        got.append(out.tolist())
    assert got == expected
    captured.leave(1)
    captured.join(1, SamplerParams(temperature=0), ints([1]))
    captured.flush()
    graph.replay()
    assert out[1] == logits[1].argmax()


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thresholds_match_the_reference_on_a_real_vocabulary_size(dtype: torch.dtype, spread: float) -> None:
    torch.manual_seed(1)
    sampler = Sampler(VOCAB, 64, CUDA)
    for slot in range(64):
        params = SamplerParams(
            temperature=0.5 + slot % 4 / 2,
            top_k=(0, 1, 20, 400, 5000)[slot % 5],
            top_p=(0.95, 0.5, 1.0)[slot % 3],
            min_p=(0.0, 0.01)[slot % 2],
        )
        sampler.join(slot, params, ints([1]))
    sampler.flush()
    logits = (torch.randn(64, VOCAB, device=CUDA) * spread).to(dtype)
    got = logit_thresholds(logits, torch.arange(64, device=CUDA, dtype=torch.int32), sampler.table)
    table = sampler.table[:64]
    values = table[:, :6].contiguous().view(torch.float32)
    expected = logit_thresholds_reference(
        logits, values[:, 0], table[:, Column.TOP_K], values[:, 1], values[:, 2]
    )
    x = logits.float()
    kept, wanted = (x >= got[:, None]).sum(dim=1).double(), (x >= expected[:, None]).sum(dim=1).double()
    assert ((kept - wanted).abs() <= 2 + wanted * 2e-2).all()
    exact = values[:, 1] >= 1
    assert ((kept == wanted) | ~exact).all()

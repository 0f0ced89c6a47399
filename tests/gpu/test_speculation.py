"""Speculation on CUDA: proposed tokens are verified with and without decode graphs, and change no output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Engine, SamplingParams
from penstock.kernels.sampling import MAX_SEQUENCE_ROWS, accept_proposals, accept_proposals_reference
from tests.generation.families import check_nothing_is_held, logits_after, prompts, write
from tests.generation.speculative import ALWAYS, NGRAM, REPETITIVE, speculation_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GREEDY = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)
ROWS = prompts() + REPETITIVE


def likely(name: str, folder: Path, made: list[list[int]]) -> None:
    """Check that tokens equal the reference model's, except for near-ties that bf16 decides differently."""
    near = []
    for row, new in zip(ROWS, made, strict=True):
        logits = logits_after(name, folder, row, new)
        chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
        near.append((logits.max(dim=-1).values - chosen) / logits.std(dim=-1))
    assert torch.cat(near).median() < 1e-3
    assert (torch.cat(near) < 0.25).float().mean() > 0.97


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 24}], ids=str)
@pytest.mark.parametrize("config", [ALWAYS, NGRAM], ids=["always", "adaptive"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_verified_tokens_are_likely_under_the_reference_model(
    name: str, config: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(name, tmp_path / name)
    with Engine(str(folder), device="cuda", dtype="bfloat16", speculative_config=config, **options) as used:
        for _ in range(2):
            made = [each.token_ids for each in used.generate(ROWS, GREEDY)]
            check_nothing_is_held(used)
        if config is ALWAYS:
            assert speculation_of(used).counts.num_accepted_tokens > 0
    likely(name, folder, made)


def test_in_fp32_output_is_the_same_with_and_without(tmp_path: Path) -> None:
    folder = write("llama", tmp_path)
    sampled = SamplingParams(max_tokens=60, temperature=0.5, seed=5, top_p=0.9, ignore_eos=True)
    made = []
    for config in ({}, ALWAYS):
        with Engine(str(folder), device="cuda", dtype="float32", speculative_config=config) as used:
            made.append(
                [each.token_ids for params in (GREEDY, sampled) for each in used.generate(ROWS, params)]
            )
    same = sum(one == other for one, other in zip(*made, strict=True))
    assert same >= len(made[0]) - 1, "a tie of two tokens may be broken otherwise"


def test_graphs_replay_steps_with_proposals(tmp_path: Path) -> None:
    folder = write("llama", tmp_path)
    with Engine(str(folder), device="cuda", dtype="bfloat16", speculative_config=ALWAYS) as used:
        used.generate(ROWS, GREEDY)
        decode = used.local.engine.core.runner.decode  # type: ignore[attr-defined]
        assert decode is not None and any(not key.samples for key in decode.captured)
        before = decode.replays
        used.generate(ROWS, GREEDY)
        assert decode.replays > before


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_a_draft_of_the_same_weights_is_accepted_and_its_steps_are_replayed(
    options: dict[str, Any], tmp_path: Path
) -> None:
    folder = write("llama", tmp_path / "llama")
    config = {"model": str(folder), "num_speculative_tokens": 4, "adaptive": False}
    with Engine(str(folder), device="cuda", dtype="bfloat16", speculative_config=config, **options) as used:
        for _ in range(2):
            made = [each.token_ids for each in used.generate(ROWS, GREEDY)]
            check_nothing_is_held(used)
        counts = speculation_of(used).counts
        assert counts.num_accepted_tokens > 0.9 * counts.num_draft_tokens > 0
        runner = speculation_of(used).proposer._draft.runner  # type: ignore[attr-defined]
        assert options or runner.decode.replays > 0
    likely("llama", folder, made)


def test_the_kernel_accepts_what_the_reference_accepts() -> None:
    draw, device = np.random.default_rng(0), torch.device("cuda")
    for _ in range(50):
        counts = draw.integers(1, MAX_SEQUENCE_ROWS + 1, size=int(draw.integers(1, 200)))
        offsets = np.concatenate([np.arange(count) for count in counts]).astype(np.int32)
        proposed = draw.integers(0, 3, len(offsets)).astype(np.int32)
        tokens = np.where(draw.random(len(offsets)) < 0.8, proposed, -1).astype(np.int32)
        proposed[np.append(offsets[1:] == 0, True)] = -1
        firsts = (np.cumsum(counts) - counts).astype(np.int32)
        given = [torch.from_numpy(each).to(device) for each in (tokens, proposed, offsets, firsts)]
        slots = torch.from_numpy(np.repeat(draw.permutation(len(counts)), counts).astype(np.int32)).to(device)
        state = [torch.arange(200, dtype=torch.int32, device=device) for _ in range(4)]
        accept_proposals_reference(*given, slots, *state[:2])
        accept_proposals(given[0], given[1], given[3], slots, *state[2:])
        assert torch.equal(state[0], state[2]) and torch.equal(state[1], state[3])

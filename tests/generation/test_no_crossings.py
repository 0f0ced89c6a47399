"""Generation steps read nothing back from the device: sampled tokens are fed on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import SamplingParams
from tests.generation.families import GREEDY, check_nothing_is_held, engine, prompts, write
from tests.runner.trap import trapped


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
def test_no_value_is_read_from_the_device_between_launch_and_collect(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = SamplingParams(max_tokens=9, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    with engine(write(name, tmp_path / name), pipeline_depth=2, max_num_batched_tokens=40) as used:
        each = [scored if i % 2 else GREEDY for i in range(len(prompts()))]
        with trapped(monkeypatch) as trap:
            got = used.generate(prompts(), each)
        assert trap.calls > 1000
        assert all(row.token_ids for row in got)
        check_nothing_is_held(used)


def test_proposed_tokens_are_accepted_without_reading_from_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ngram = {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    params = SamplingParams(max_tokens=20, temperature=0.3, seed=2, top_p=0.9, logprobs=1, ignore_eos=True)
    rows = [[5, 6, 7, 8] * 5, [9] * 12, [3, 4, 5]]
    with engine(write("qwen3", tmp_path), pipeline_depth=2, speculative_config=ngram) as used:
        with trapped(monkeypatch) as trap:
            used.generate(rows, [GREEDY, params, GREEDY])
        assert trap.calls > 1000
        generation = used.local.engine.core.generation
        assert generation is not None and generation.speculation is not None
        assert generation.speculation.counts.num_drafts > 0
        check_nothing_is_held(used)

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

"""Sequences with different adapters, or none, generate together what PEFT generates for each alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generation.adapters import CHOSEN, PROMPTS, TARGETS, generate, greedy, write_base
from tests.parity.lora import opened_with, write_adapter


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("max_loras", "step_tokens"), [(1, 256), (4, 256), (4, 16)])
def test_greedy_tokens_are_those_of_peft(name: str, max_loras: int, step_tokens: int, tmp_path: Path) -> None:
    """Slots for all adapters, or for one at a time; prompts in one step, or in chunks."""
    base = write_base(tmp_path / "base", name)
    folders = [tmp_path / "0", tmp_path / "1"]
    adapted = [
        write_adapter(base, folder, number, r=3 + number, target_modules=TARGETS[name])
        for number, folder in enumerate(folders)
    ]
    count = 6
    expected = [
        greedy(base if each < 0 else adapted[each], prompt, count)
        for prompt, each in zip(PROMPTS, CHOSEN, strict=True)
    ]
    options = {"enable_generation": True, "max_loras": max_loras, "max_num_seqs": 8, "kv_cache_gb": 0.001}
    options["max_num_batched_tokens"] = step_tokens
    with opened_with(tmp_path / "base", folders, **options) as engine:
        assert generate(engine, count) == expected
        # The same prompts again, from the cache: prefixes of one adapter are never used for another.
        assert generate(engine, count) == expected
    assert expected[0] != expected[3] != expected[5]

"""Speculation with small models: the same tokens as without it, for all kinds of requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import SamplingParams
from tests.generation import direct
from tests.generation.families import check_nothing_is_held, engine, prompts, write
from tests.generation.speculative import ALWAYS, KINDS, NGRAM, REPETITIVE, speculation_of

FAMILIES = ["llama", "mistral", "gemma2", "gpt-oss", "qwen3-moe"]
SMOLLM2 = Path(os.environ.get("PENSTOCK_SMOLLM2", "models/smollm2"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_output_is_the_same_with_and_without(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path)
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    rows = prompts() + REPETITIVE
    with engine(folder, pipeline_depth=2) as plain:
        expected = [each.token_ids for each in plain.generate(rows, params)]
    with engine(folder, pipeline_depth=2, speculative_config=ALWAYS) as used:
        assert [each.token_ids for each in used.generate(rows, params)] == expected
        counts = speculation_of(used).counts
        assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
        assert speculation_of(used).accepted_at.sum() == counts.num_accepted_tokens
        check_nothing_is_held(used)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24},
        {"kv_cache_gb": 1e-9, "max_model_len": 160},
        {"enable_prefix_caching": False},
    ],
    ids=["plain", "small steps", "few blocks", "no prefixes"],
)
def test_every_kind_of_request_gives_the_same_output_in_a_mixed_batch(
    llama: Path, options: dict[str, Any]
) -> None:
    rows = [row for row in REPETITIVE[:3] for _ in KINDS]
    params = [msgspec.structs.replace(each, max_tokens=24) for _ in REPETITIVE[:3] for each in KINDS.values()]
    with engine(llama, pipeline_depth=2, **options) as plain:
        expected = direct.generate(plain, rows, params)
    with engine(llama, pipeline_depth=2, speculative_config=ALWAYS, **options) as used:
        got = direct.generate(used, rows, params)
        assert speculation_of(used).counts.num_accepted_tokens > 0
        check_nothing_is_held(used)
    for kind, one, other in zip([*KINDS] * 3, got, expected, strict=True):
        assert one.token_ids == other.token_ids, kind
        assert one.finish == other.finish, kind
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-4)


def test_adaptive_speculation_changes_no_output_either(llama: Path) -> None:
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    with engine(llama, pipeline_depth=2) as plain:
        expected = [each.token_ids for each in plain.generate(REPETITIVE, params)]
    with engine(llama, pipeline_depth=2, speculative_config=NGRAM) as used:
        for _ in range(3):
            assert [each.token_ids for each in used.generate(REPETITIVE, params)] == expected
        check_nothing_is_held(used)


PASSAGES = [
    "Record 1. On 4 March, Marit Olsen inspected the north wharf and found a ledger of tides behind panel "
    "4471. The water stood at 83 centimetres and the inlet was cleared by hand.",
    "Record 2. On 9 March, Jonas Eide inspected the east mill and found two cast-iron valves behind panel "
    "9025. The water stood at 41 centimetres and the seal was replaced at noon.",
    "Record 3. On 17 March, Priya Raman inspected the river station and found a brass pressure gauge behind "
    "panel 1318. The water stood at 67 centimetres and the crew was told to return.",
]


@pytest.mark.skipif(
    not (SMOLLM2 / "model.safetensors").is_file(),
    reason="no weights: set PENSTOCK_SMOLLM2 to a folder of SmolLM2-135M-Instruct",
)
def test_answers_that_quote_retrieved_passages_are_the_same_and_take_fewer_steps() -> None:
    context = "\n\n".join(PASSAGES)
    texts = [
        f"<|im_start|>user\n{context}\n\nRepeat record {number} word for word.<|im_end|>\n"
        f"<|im_start|>assistant\nRecord {number}."
        for number in (1, 2, 3)
    ]
    params = SamplingParams(max_tokens=48, temperature=0)
    with engine(SMOLLM2, max_model_len=512) as plain:
        expected = [each.token_ids for each in plain.generate(texts, params, add_special_tokens=False)]
    with engine(SMOLLM2, max_model_len=512, speculative_config=ALWAYS) as used:
        got = used.generate(texts, params, add_special_tokens=False)
        assert [each.token_ids for each in got] == expected
        counts = speculation_of(used).counts
        assert counts.num_accepted_tokens > counts.num_drafts, "more than one token more for each step"

"""Sampling parameters are obeyed by the engine: in a batch, with steps in flight, and after preemption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock import Engine, SamplingParams
from penstock.errors import BadValue
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import SamplerParams
from tests.generation.direct import generate
from tests.generation.families import check_nothing_is_held, engine, prompts, write
from tests.text_models import write_text_model

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"temperature": 1.1, "top_p": 0.8, "top_k": 20},
    {"temperature": 0.7, "repetition_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.02, "frequency_penalty": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(10, 30))},
    {"temperature": 1.0, "bad_token_ids": ((11,), (12, 13)), "logit_bias": {14: 2.0}},
    {"temperature": 0.0, "logprobs": 3},
]


def params(number: int) -> SamplerParams:
    return SamplerParams(max_tokens=50, seed=100 + number, ignore_eos=True, **ASKED[number])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    with engine(folder, pipeline_depth=1) as used:
        return [generate(used, [row], params(i))[0].token_ids for i, row in enumerate(prompts())]


@pytest.mark.parametrize(
    "options",
    [{}, {"pipeline_depth": 3}, {"kv_cache_gb": 1e-9, "pipeline_depth": 2, "max_num_batched_tokens": 40}],
)
def test_seeded_sequences_get_the_tokens_that_they_get_alone(
    folder: Path, alone: list[list[int]], options: dict[str, Any]
) -> None:
    rows = prompts()
    with engine(folder, **options) as used:
        together = generate(used, rows, [params(i) for i in range(len(rows))])
        check_nothing_is_held(used)
        used.local.engine.core.runner.generator.sampler.plan.check_integrity()  # type: ignore[attr-defined]
    assert [row.token_ids for row in together] == alone
    assert set(alone[5]) <= set(range(10, 30))
    assert 11 not in alone[6] and (12, 13) not in set(zip(alone[6], alone[6][1:], strict=False))
    assert together[7].logprobs is not None and together[7].logprobs.shape == (50, 4)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_text_model(tmp_path_factory.mktemp("llama"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=Tokenizer(folder).max_token_id + 4,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        eos_token_id=Tokenizer(folder).token_id("<|im_end|>"),
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_offline_sequences_follow_their_grammars_and_an_invalid_grammar_fails_alone(texts: Path) -> None:
    pytest.importorskip("llguidance")
    listed = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}
    with Engine(str(texts), device="cpu", pipeline_depth=2) as used:
        wanted = [
            SamplingParams(max_tokens=60, seed=0, guided_regex="[0-9]{3}-[a-c]{2}"),
            SamplingParams(max_tokens=60, seed=1, guided_json=listed),
            SamplingParams(max_tokens=60, seed=2),
        ]
        first, second, free = used.generate(["a", "b", "c"], wanted)
        assert first.text[3] == "-" and first.text[:3].isdigit() and set(first.text[4:]) <= set("abc")
        assert set(json.loads(second.text)) <= {1, 2} and len(free.token_ids) > 0
        assert first.finish_reason == second.finish_reason == "stop"
        for bad in ({"guided_regex": "(["}, {"guided_json": "{"}, {"guided_grammar": "start: nowhere"}):
            with pytest.raises(BadValue):
                used.generate(["a"], SamplingParams(**bad))
        again = used.generate(["c"], wanted[2])[0]
        assert again.token_ids == free.token_ids
        check_nothing_is_held(used)

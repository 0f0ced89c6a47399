"""Greedy tokens equal those of transformers, with all engine options."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock import SamplingParams
from penstock.engine.grammars import Compiled, Grammars
from penstock.errors import ModelLoadError
from penstock.types import Grammar, SamplerParams
from tests.generation.direct import generate
from tests.generation.families import (
    GREEDY,
    TESTED,
    TOKENS,
    check_greedy,
    check_nothing_is_held,
    engine,
    logits_after,
    prompts,
    reference,
    write,
)
from tests.parity.decoders import VOCABULARY, Family
from tests.thinning import ALL_CASES

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"pipeline_depth": 2},  # a step is planned before the tokens of the last one are read
    "chunked": {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 13, "pipeline_depth": 2},
    "preempted": {"kv_cache_gb": 1e-9, "pipeline_depth": 2, "enable_prefix_caching": False},
    "preempted-cached": {"kv_cache_gb": 1e-9, "max_num_batched_tokens": 40},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: write(name, root / name) for name in TESTED}


@cache
def generated(name: str, folder: Path) -> list[list[int]]:
    with engine(folder, pipeline_depth=2) as used:
        got = used.generate(prompts(), GREEDY)
        assert {row.finish_reason for row in got} == {"length"}
        check_nothing_is_held(used)
        return [row.token_ids for row in got]


@pytest.mark.parametrize("name", TESTED)
def test_greedy_tokens_equal_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    made = generated(name, folders[name])
    assert {len(row) for row in made} == {TOKENS}
    assert len({token for row in made for token in row}) > 1
    check_greedy(name, folders[name], prompts(), made)


@pytest.mark.parametrize("name", TESTED)
def test_drawn_tokens_have_the_log_probabilities_of_transformers(name: str, folders: dict[str, Path]) -> None:
    """Small models repeat themselves with greedy decoding; drawn tokens cover more of the vocabulary."""
    params = SamplingParams(max_tokens=TOKENS, temperature=1.5, seed=5, ignore_eos=True, logprobs=0)
    with engine(folders[name], pipeline_depth=2, max_num_batched_tokens=48) as used:
        for row, got in zip(prompts(), used.generate(prompts(), params), strict=True):
            assert got.logprobs is not None and len(set(got.token_ids)) > TOKENS // 5
            values = logits_after(name, folders[name], row, got.token_ids).log_softmax(-1)
            own = values.gather(1, torch.tensor(got.token_ids)[:, None]).numpy()
            np.testing.assert_allclose(got.logprobs.values, own, atol=1e-4)
        check_nothing_is_held(used)


def test_our_reference_loop_equals_generate_of_transformers(folders: dict[str, Path]) -> None:
    row = prompts()[4]
    model = reference("qwen3", folders["qwen3"])
    made = model.generate(
        torch.tensor([row]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=1
    )
    assert made[0, len(row) :].tolist() == generated("qwen3", folders["qwen3"])[4]


@pytest.mark.parametrize("way", WAYS if ALL_CASES else ("chunked", "preempted-cached"))
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2"])
def test_engine_options_change_no_token(name: str, way: str, folders: dict[str, Path]) -> None:
    with engine(folders[name], **WAYS[way]) as used:
        generation = used.local.engine.core.generation
        assert generation is not None
        for _ in range(2):  # the second time with cached prefixes, if the option enables them
            got = used.generate(prompts(), GREEDY)
            assert [row.token_ids for row in got] == generated(name, folders[name])
            check_nothing_is_held(used)
        assert bool(generation.num_preemptions) == way.startswith("preempted")
        assert bool(generation.pool.hit_tokens) == (used.settings.generate_prefixes)


def test_log_probabilities_and_ranks_are_those_of_transformers(folders: dict[str, Path]) -> None:
    name, rows = "llama", prompts()
    asked = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=3)
    fewer = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=0)
    with engine(folders[name], pipeline_depth=2) as used:
        each = [(asked, GREEDY, fewer)[i % 3] for i in range(len(rows))]
        for row, params, got in zip(rows, each, used.generate(rows, each), strict=True):
            if params.logprobs is None:
                assert got.logprobs is None
                continue
            assert got.logprobs is not None and got.logprobs.ranks is not None
            scores = got.logprobs
            assert scores.values.shape == (20, 1 + params.logprobs)
            values = logits_after(name, folders[name], row, got.token_ids).log_softmax(-1)
            own = values.gather(1, torch.from_numpy(scores.ids).long()).numpy()
            np.testing.assert_allclose(scores.values, own, atol=1e-4)
            assert scores.ids[:, 0].tolist() == got.token_ids
            assert (got.logprobs.ranks == 1).all()
            if params.logprobs:
                top = values.topk(params.logprobs).values.numpy()
                np.testing.assert_allclose(scores.values[:, 1:], top, atol=1e-4)
        check_nothing_is_held(used)


def test_one_engine_embeds_and_generates_at_once(folders: dict[str, Path]) -> None:
    """GritLM attends in both directions when it embeds, and causally when it generates."""
    for name in ("gritlm", "qwen3"):
        with engine(folders[name], pipeline_depth=2) as used, ThreadPoolExecutor(4) as pool:
            alone = used.embed(prompts())
            continued = [pool.submit(used.generate, prompts(), GREEDY) for _ in range(2)]
            embedded = [pool.submit(used.embed, prompts()) for _ in range(20)]
            for vectors in embedded:
                np.testing.assert_allclose(vectors.result(), alone, atol=1e-5)
            for rows in continued:
                assert [row.token_ids for row in rows.result()] == generated(name, folders[name])
            check_nothing_is_held(used)


@pytest.mark.parametrize("way", ["plain", "chunked", "preempted-cached"])
def test_log_probabilities_of_prompts_are_those_of_transformers(way: str, folders: dict[str, Path]) -> None:
    name, rows = "llama", prompts()
    asked = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    with engine(folders[name], **WAYS[way]) as used, ThreadPoolExecutor(1) as pool:
        used.generate(rows, GREEDY)  # caches prefixes, which must not be used below
        scored = pool.submit(used.generate, rows, asked)
        used.generate(rows, GREEDY)
        for number, (row, got) in enumerate(zip(rows, scored.result(), strict=True)):
            assert got.token_ids == generated(name, folders[name])[number][:30]
            if len(row) == 1:  # nothing predicts the first token
                assert got.prompt_logprobs is None
                continue
            assert got.prompt_logprobs is not None and got.prompt_logprobs.ranks is not None
            ids, scores, found = (getattr(got.prompt_logprobs, each) for each in ("ids", "values", "ranks"))
            values = logits_after(name, folders[name], row[:1], row[1:]).log_softmax(-1)
            assert ids.shape == scores.shape == (len(row) - 1, 3)
            assert ids[:, 0].tolist() == row[1:]
            own = values.gather(1, torch.from_numpy(ids).long()).numpy()
            np.testing.assert_allclose(scores, own, atol=1e-4)
            ranks = (values > values.gather(1, torch.tensor(row[1:]).long()[:, None])).sum(-1) + 1
            assert np.abs(found - ranks.numpy()).max(initial=0) <= 1
        check_nothing_is_held(used)


class Alternating:
    """A constraint of six tokens, alternately even and odd."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    @property
    def done(self) -> bool:
        return len(self.taken) == 6

    def mask(self) -> Any:
        bits = np.zeros(-(-VOCABULARY // 32) * 32, dtype=np.uint8)
        bits[len(self.taken) % 2 : VOCABULARY : 2] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        self.taken.append(token)


def test_a_constrained_sequence_follows_its_grammar_and_others_do_not_wait(folders: dict[str, Path]) -> None:
    with engine(folders["llama"], pipeline_depth=2) as used:
        used.local.engine.core.grammars = Grammars(lambda grammar, max_s: Compiled(Alternating))
        free = SamplerParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        bound = msgspec.structs.replace(free, grammar=Grammar("regex", ""))
        rows = prompts()
        got = generate(used, [*rows, *rows], [free] * len(rows) + [bound] * len(rows))
        assert [row.token_ids for row in got[: len(rows)]] == generated("llama", folders["llama"])
        for row in got[len(rows) :]:
            assert [token % 2 for token in row.token_ids] == [0, 1] * 3
            assert row.finish == "stop"
        check_nothing_is_held(used)


def test_a_checkpoint_without_a_language_model_head_embeds_and_does_not_generate(tmp_path: Path) -> None:
    folder = Family("MistralModel").write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with engine(folder) as used:
        assert not used.spec.generates and used.embed([[5, 6, 7]]).shape[0] == 1
    with pytest.raises(ModelLoadError, match="no lm_head"):
        engine(folder, enable_generation=True)

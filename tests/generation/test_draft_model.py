"""Speculation with a draft model: the same tokens as without it, whatever the draft model is."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock import Engine, SamplingParams
from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig
from penstock.engine.draft import MAX_FAILURES, DraftProposer
from penstock.errors import ConfigError, ModelLoadError
from penstock.runner.base import BLOCK_SIZE, DraftRunner
from penstock.types import StepPlan
from tests.checkpoints import write_bert
from tests.generation import adapters, direct, fakes
from tests.generation.fakes import Answers, MemoryRunner, continued, generation_request, make_core
from tests.generation.families import FAMILIES, check_nothing_is_held, engine, prompts, write
from tests.generation.speculative import KINDS, REPETITIVE, speculation_of
from tests.parity.decoders import VOCABULARY
from tests.parity.lora import opened_with, write_adapter
from tests.thinning import num_examples

ROWS = prompts() + REPETITIVE


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3", tmp_path_factory.mktemp("qwen3"))


def always(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"model": str(folder), "num_speculative_tokens": 4, "adaptive": False} | keys


def proposer_of(used: Engine) -> DraftProposer:
    proposer = speculation_of(used).proposer
    assert isinstance(proposer, DraftProposer)
    return proposer


SAMPLED = SamplingParams(max_tokens=40, temperature=0.9, seed=3, top_p=0.9, ignore_eos=True)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), SAMPLED],
    ids=["greedy", "seeded"],
)
def test_a_draft_of_the_same_weights_is_always_right_and_another_rarely(
    llama: Path, qwen3: Path, params: SamplingParams
) -> None:
    with engine(llama, pipeline_depth=2) as plain:
        expected = [each.token_ids for each in plain.generate(ROWS, params)]
    for folder in (llama, qwen3):
        with engine(llama, pipeline_depth=2, speculative_config=always(folder)) as used:
            assert [each.token_ids for each in used.generate(ROWS, params)] == expected
            counts = speculation_of(used).counts
            check_nothing_is_held(used)
        if folder is llama:
            assert counts.num_accepted_tokens == counts.num_draft_tokens > 300
        else:
            assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens / 2
        assert counts.draft_s > 0


def test_without_a_seed_the_draft_samples_with_the_target_models_noise(llama: Path) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
    with engine(llama, speculative_config=always(llama)) as used:
        used.generate(ROWS, params)
        counts = speculation_of(used).counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 300


def test_without_a_seed_tokens_keep_their_distribution(llama: Path, qwen3: Path) -> None:
    params, count = SamplingParams(max_tokens=3, temperature=0.4, top_k=4, ignore_eos=True), 400
    found = []
    for config in ({}, always(qwen3)):
        with engine(llama, speculative_config=config, share_identical=False) as used:
            made = used.generate([REPETITIVE[0]] * count, params)
            found.append(Counter(tuple(each.token_ids) for each in made))
    kinds = [kind for kind in found[0] | found[1] if found[0][kind] + found[1][kind] >= 10]
    chi2 = sum((found[0][k] - found[1][k]) ** 2 / (found[0][k] + found[1][k]) for k in kinds)
    assert chi2 < len(kinds) + 5 * np.sqrt(2 * len(kinds)) + 5


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
    llama: Path, qwen3: Path, options: dict[str, Any]
) -> None:
    rows = [row for row in REPETITIVE[:3] for _ in KINDS]
    params = [msgspec.structs.replace(each, max_tokens=24) for _ in REPETITIVE[:3] for each in KINDS.values()]
    with engine(llama, pipeline_depth=2, **options) as plain:
        expected = direct.generate(plain, rows, params)
    for folder in (llama, qwen3):
        with engine(llama, pipeline_depth=2, speculative_config=always(folder), **options) as used:
            got = direct.generate(used, rows, params)
            counts = speculation_of(used).counts
            assert counts.num_draft_tokens > 0
            assert folder is qwen3 or counts.num_accepted_tokens == counts.num_draft_tokens
            check_nothing_is_held(used)
        for kind, one, other in zip([*KINDS] * 3, got, expected, strict=True):
            assert (one.token_ids, one.finish) == (other.token_ids, other.finish), kind


def test_an_adaptive_draft_changes_no_output_either(llama: Path, qwen3: Path) -> None:
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    with engine(llama) as plain:
        expected = [each.token_ids for each in plain.generate(REPETITIVE, params)]
    with engine(llama, speculative_config={"model": str(qwen3)}) as used:
        for _ in range(3):
            assert [each.token_ids for each in used.generate(REPETITIVE, params)] == expected
        check_nothing_is_held(used)


def test_rows_with_adapters_generate_the_same_with_a_draft_model(llama: Path, tmp_path: Path) -> None:
    base = adapters.write_base(tmp_path / "base", "qwen3")
    folders = [tmp_path / "0", tmp_path / "1"]
    for number, folder in enumerate(folders):
        targets = adapters.TARGETS["qwen3"]
        write_adapter(base, folder, number, r=3 + number, target_modules=targets)
    options = {"enable_generation": True, "max_num_seqs": 8, "kv_cache_gb": 0.001}
    with opened_with(tmp_path / "base", folders, **options) as plain:
        expected = adapters.generate(plain, 20)
    assert expected[0] != expected[3] != expected[5], "the same prompt with each adapter and without one"
    for draft in (tmp_path / "base", llama):
        config = always(draft)
        with opened_with(tmp_path / "base", folders, speculative_config=config, **options) as used:
            assert adapters.generate(used, 20) == expected
            assert adapters.generate(used, 20) == expected
            generation = used.engine.core.generation
            assert generation is not None and generation.speculation is not None
            counts = generation.speculation.counts
            assert counts.num_draft_tokens > 0
            assert draft == llama or counts.num_accepted_tokens > 0


@pytest.mark.parametrize("vocab_size", [VOCABULARY - 100, VOCABULARY + 100])
def test_a_draft_may_have_fewer_or_more_tokens(llama: Path, tmp_path: Path, vocab_size: int) -> None:
    """The first row has only tokens of both vocabularies. The second has one that the smaller draft lacks."""
    draft = FAMILIES["qwen3"].write(tmp_path / "draft", vocab_size=vocab_size)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    rows = [[*range(5, 35)], [*range(5, 35), VOCABULARY - 1, 6]]
    with engine(llama) as plain:
        expected = [each.token_ids for each in plain.generate(rows, params)]
    with engine(llama, speculative_config=always(draft)) as used:
        assert [each.token_ids for each in used.generate(rows, params)] == expected
        assert not proposer_of(used)._num_failures
        before = speculation_of(used).counts.num_draft_tokens
        assert before > 0
        assert [each.token_ids for each in used.generate(rows[1:], params)] == expected[1:]
        is_drafted = speculation_of(used).counts.num_draft_tokens > before
        assert is_drafted == (vocab_size > VOCABULARY)
        check_nothing_is_held(used)


def test_tokens_that_the_model_lacks_are_not_run(llama: Path, tmp_path: Path) -> None:
    """The draft only proposes tokens that the model lacks: the logits of all others are close to 0."""
    draft = FAMILIES["gpt2"].write(tmp_path / "draft", vocab_size=VOCABULARY + 100)
    file = draft / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.wte.weight"][:VOCABULARY] *= 1e-4
    save_file(tensors, file, metadata={"format": "pt"})
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with engine(llama) as plain:
        expected = [each.token_ids for each in plain.generate(ROWS, params)]
    with engine(llama, speculative_config=always(draft)) as used:
        assert [each.token_ids for each in used.generate(ROWS, params)] == expected
        counts = speculation_of(used).counts
        assert counts.draft_s > 0 and counts.num_draft_tokens == 0
        assert not proposer_of(used)._num_failures
        check_nothing_is_held(used)


def test_the_caches_of_model_and_draft_share_the_memory(llama: Path, qwen3: Path) -> None:
    options: dict[str, Any] = {"kv_cache_gb": 0.002, "max_model_len": 64, "max_num_seqs": 64}
    with engine(llama, **options) as plain, engine(qwen3, **options) as alone:
        num_plain, num_alone = blocks_of(plain), blocks_of(alone)
    with engine(llama, speculative_config=always(qwen3), **options) as used:
        both = blocks_of(used)
    granted = int(0.002 * 2**30)
    assert 4 < both < num_plain < 64 * 4, "the memory decides, not the number of sequences"
    # The bytes per block of both models add up, so the inverse numbers of blocks add up.
    assert both == pytest.approx(1 / (1 / num_plain + 1 / num_alone), abs=1)
    shapes = [(3, 2, 16), (3, 2, 12)]  # layers, heads, numbers of a key
    block_bytes = sum(BLOCK_SIZE * layers * heads * dim * 2 * 4 for layers, heads, dim in shapes)
    assert both == granted // block_bytes


def blocks_of(used: Engine) -> int:
    generation = used.local.engine.core.generation
    assert generation is not None
    return generation.pool.num_blocks


def test_no_proposals_beyond_the_draft_models_maximum_length(llama: Path) -> None:
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    rows = [list(range(5, 35))]
    with engine(llama) as plain:
        expected = [each.token_ids for each in plain.generate(rows, params)]
    with engine(llama, speculative_config=always(llama, max_model_len=50)) as used:
        assert [each.token_ids for each in used.generate(rows, params)] == expected
        counts = speculation_of(used).counts
    assert 10 <= counts.num_draft_tokens <= 20


def test_a_failed_draft_step_is_retried_and_repeated_failures_turn_the_draft_off(llama: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with engine(llama, speculative_config=always(llama)) as used:
        proposer = proposer_of(used)
        runner: Any = proposer._draft.runner
        expected = [each.token_ids for each in used.generate(ROWS, params)]
        step, left = runner._step, [1]

        def failing(plan: StepPlan, *others: Any) -> Any:
            if left[0] > 0:
                left[0] -= 1
                raise RuntimeError("the draft failed")
            return step(plan, *others)

        runner._step = failing
        before = speculation_of(used).counts.num_accepted_tokens
        for _ in range(2):
            assert [each.token_ids for each in used.generate(ROWS, params)] == expected
            check_nothing_is_held(used)
        assert speculation_of(used).counts.num_accepted_tokens > before and not proposer.is_given_up
        left[0] = 1000
        for _ in range(MAX_FAILURES):
            assert [each.token_ids for each in used.generate(ROWS, params)] == expected
        assert proposer.is_given_up and left[0] > 900
        check_nothing_is_held(used)


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_that_has_slept_drafts_again(llama: Path, level: int) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True)
    with engine(llama, speculative_config=always(llama)) as used:
        expected = [each.token_ids for each in used.generate(ROWS, params)]
        core = used.local.engine.core
        assert core.sleeper is not None
        core.sleeper.sleep(level)
        core.forget_cached()
        core.sleeper.wake(lambda num_bytes: None)
        assert [each.token_ids for each in used.generate(ROWS, params)] == expected
        counts = speculation_of(used).counts
        assert counts.num_accepted_tokens == counts.num_draft_tokens


def test_the_description_of_a_model_names_its_draft(llama: Path, qwen3: Path) -> None:
    spec = describe(EngineConfig(model=str(llama), speculative_config={"model": str(qwen3)}))
    assert spec.draft is not None and spec.draft.name == qwen3.name and spec.draft.generates


def test_drafts_that_cannot_work_are_refused(llama: Path, qwen3: Path, tmp_path: Path) -> None:
    bert = write_bert(tmp_path / "bert")
    with pytest.raises(ConfigError, match="the draft model bert does not generate text"):
        engine(llama, speculative_config={"model": str(bert)})
    with pytest.raises(ModelLoadError, match=r"speculative_config: .*neither a folder nor a hub id"):
        engine(llama, speculative_config={"model": "/no such folder"})
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; use 1"):
        engine(llama, speculative_config={"model": str(qwen3)}, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="max_model_len is 100000000, but the draft model has"):
        engine(llama, speculative_config={"model": str(qwen3), "max_model_len": 100_000_000})
    with pytest.raises(ConfigError, match="speculative_config: quantization fp8 is for CUDA"):
        engine(llama, speculative_config={"model": str(qwen3), "quantization": "fp8"})
    with pytest.raises(ConfigError, match="device null computes nothing"):
        Engine(str(llama), device="null", speculative_config={"model": str(qwen3)})


def test_a_draft_with_another_vocabulary_is_refused(llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    file = other / "tokenizer.json"
    words = msgspec.json.decode(file.read_bytes())
    vocabulary = words["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_bytes(msgspec.json.encode(words))
    with pytest.raises(ConfigError, match="2 tokens differ in all"):
        engine(llama, speculative_config={"model": str(other)})


# Bookkeeping, on a fake device that stores token ids instead of keys.


class DraftMemory(MemoryRunner):
    """Runs draft steps. What the padding slot samples is discarded."""

    def __init__(self, blocks: int, slots: int, fails: Callable[[StepPlan], bool]) -> None:
        super().__init__(blocks, slots + 1, fails)
        self.joined.add(slots)


@settings(max_examples=num_examples(60), deadline=None)
@given(data=st.data())
def test_the_drafts_kv_cache_stays_correct_while_sequences_start_and_end(data: st.DataObject) -> None:
    blocks, rows = data.draw(st.integers(16, 40)), 4
    core = make_core(blocks=blocks, rows=rows, prefixes=data.draw(st.booleans()))
    draft = DraftMemory(blocks, rows, lambda plan: False)
    generation = core.generation
    assert generation is not None
    generation.enable_speculation(
        lambda slots: DraftProposer(
            slots,
            DraftRunner(draft, "draft", fakes.VOCABULARY, fakes.LENGTH, rows),
            num_tokens=3,
            vocab_size=fakes.VOCABULARY,
            block_size=fakes.BLOCK,
            max_tokens=data.draw(st.sampled_from([2, 7, 64])),
        ),
        is_adaptive=False,
    )
    answers, wanted, cancelled = Answers(), {}, set()
    for number in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=30))
        count = data.draw(st.integers(1, 20))
        wanted[f"{number}"] = continued(prompt, count)
        core.add(generation_request(f"{number}", [prompt], count))
        for _ in range(data.draw(st.integers(0, 6))):
            answers.take(list(core.step()))
        if data.draw(st.integers(0, 4)) == 0:
            cancelled.add(f"{number}")
            core.cancel(f"{number}")
    fakes.run(core, answers)
    for name, expected in wanted.items():
        made = answers.tokens.get((name, 0), [])
        assert made == expected[: len(made)] and (name in cancelled or len(made) == len(expected))
    assert generation.speculation is not None
    counts = generation.speculation.counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens, "the draft is the model itself"

"""A request whose logits are not finite fails alone, at once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock import AsyncEngine, SamplingParams
from penstock.errors import NotPossible, RowFailed
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import GeneratePlan, SampledResult, SamplerParams
from tests.e2e.llama import write_llama
from tests.e2e.server import Server, serving
from tests.generation.direct import generate, request_of
from tests.generation.fakes import Answers, continued, generation_request, make_core, run
from tests.generation.families import check_nothing_is_held, engine, prompts, write
from tests.generation.streams import read_stream
from tests.waiting import PATIENCE_S

POISON = 399
TOKENS = 30
GREEDY = SamplerParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, bad_token_ids=((POISON,),))
DRAWN = SamplerParams(
    max_tokens=TOKENS, seed=3, top_k=20, ignore_eos=True, logprobs=2, bad_token_ids=((POISON,),)
)
SAID = "not finite"


def poison(folder: Path, token: int, value: float = float("nan")) -> Path:
    """Make the hidden states of this token and of all tokens after it NaN. The head stays finite."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][token] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poison(write("llama", tmp_path_factory.mktemp("unsound") / "llama"), POISON)


def healthy() -> list[list[int]]:
    return [[min(token, POISON - 1) for token in row] for row in prompts()]


@pytest.mark.parametrize(
    "options", [{}, {"pipeline_depth": 2}, {"max_num_batched_tokens": 24, "pipeline_depth": 2}]
)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_other_sequences_of_the_batch_get_the_tokens_they_get_without_it(
    folder: Path, options: dict[str, Any], params: SamplerParams
) -> None:
    rows = healthy()
    with engine(folder, **options) as used:
        alone = [row.token_ids for row in generate(used, rows, params)]
        check_nothing_is_held(used)

        async def all_at_once() -> list[Any]:
            bad = [[*rows[4][:9], POISON], [POISON], rows[7] + [POISON, 7, 8]]
            asked = [*rows, *bad]
            made = [request_of(row, params) for row in asked]
            return await asyncio.gather(*(_read(used, one) for one in made), return_exceptions=True)

        got = asyncio.run(all_at_once())
        assert got[: len(rows)] == alone
        assert len(got) == len(rows) + 3
        for error in got[len(rows) :]:
            assert isinstance(error, RowFailed) and SAID in str(error)
        check_nothing_is_held(used)
        assert [
            row.token_ids for row in generate(used, rows, params)
        ] == alone  # also in the blocks of the failed request
        check_nothing_is_held(used)


async def _read(used: Any, request: Any) -> list[int]:
    return [t async for part in read_stream(used.local.engine, request) for t in part.token_ids.tolist()]


def test_prompt_log_probabilities_that_are_not_finite_are_an_error(folder: Path) -> None:
    asked = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    with engine(folder) as used:
        with pytest.raises(RowFailed, match=SAID):
            used.generate([[5, 6, POISON, 7]], asked)
        check_nothing_is_held(used)


def test_a_stream_ends_with_the_error(folder: Path) -> None:
    """The error comes after good tokens: the model samples the token that makes its hidden states NaN."""
    forced = SamplingParams(
        max_tokens=TOKENS, temperature=0, ignore_eos=True, logit_bias={str(POISON): 100.0}
    )

    async def scene() -> None:
        async with AsyncEngine(str(folder), device="cpu", pipeline_depth=2) as used:
            made: list[int] = []
            with pytest.raises(RowFailed, match=SAID):
                async for delta in used.generate_stream([5, 6], forced):
                    made += delta.token_ids
            assert made == [POISON]
            check_nothing_is_held(used)

    asyncio.run(scene())


def test_forbidding_every_token_is_an_error(folder: Path) -> None:
    none = SamplerParams(max_tokens=3, allowed_token_ids=(7,), bad_token_ids=((7,),))
    with engine(folder) as used:
        with pytest.raises(NotPossible, match="no token may follow"):
            generate(used, [[5]], none)
        check_nothing_is_held(used)


def test_blocks_that_it_wrote_are_not_reused(folder: Path) -> None:
    row = [5] * 40 + [POISON] + [6] * 40
    with engine(folder) as used:
        generation = used.local.engine.core.generation
        assert generation is not None
        with pytest.raises(RowFailed):
            generate(used, [row], GREEDY)
        before = generation.pool.hit_tokens
        with pytest.raises(RowFailed):
            generate(used, [row], GREEDY)
        assert generation.pool.hit_tokens == before
        check_nothing_is_held(used)


@pytest.mark.parametrize("depth", [1, 2])
def test_any_request_may_fail_in_any_step(depth: int) -> None:
    """A request with several rows fails as soon as one of its rows does."""
    draw = np.random.default_rng(7)
    for _ in range(20):
        core, answers = make_core(blocks=60, depth=depth), Answers()
        requests = {f"r{i}": [[i + 1, 9, 9], [i + 1, 8]][: 1 + i % 2] for i in range(5)}
        spoilt, after = f"r{draw.integers(5)}", int(draw.integers(12))
        _spoil(core, requests[spoilt][-1], after)
        for name, rows in requests.items():
            core.add(generation_request(name, rows, 10))
        run(core, answers)
        assert answers.failed.keys() == ({spoilt} if after < 10 else set())
        for failure in answers.failed.values():
            assert isinstance(failure.error, RowFailed) and SAID in str(failure.error)
        for name, rows in requests.items():
            for index, row in enumerate(rows):
                made, wanted = answers.tokens.get((name, index), []), continued(row, 10)
                assert made == wanted if name not in answers.failed else made == wanted[: len(made)]
        assert core.generation is not None
        core.generation.pool.check_integrity()


def _spoil(core: Any, prompt: list[int], after: int) -> None:
    """Make the sequence with this prompt fail after some tokens."""
    launch, generation, given = core.runner.launch, core.generation, [0]

    def spoiling(plan: GeneratePlan) -> Any:
        future = launch(plan)
        sample = plan.sample
        ids = future.result().token_ids.copy()
        for at, slot in enumerate(sample.sampled_slots.tolist()):
            row = generation._slots.find(slot)
            if row is not None and row.prompt.tolist() == prompt:
                given[0] += 1
                if given[0] > after:
                    ids[at] = -1
        future._result = SampledResult(ids, device_s=0.001)
        return future

    core.runner.launch = spoiling


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_llama(tmp_path_factory.mktemp("served"))
    token = int(Tokenizer(folder).encode(["日"], add_special_tokens=False)[0][0])
    with serving(str(poison(folder, token)), "--device", "cpu", "--threads", "1") as running:
        yield running


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"n": 3, "seed": 5}, {"logprobs": 2}, {"echo": True}])
@pytest.mark.parametrize("stream", [False, True])
def test_the_server_answers_500_in_the_shape_of_openai(
    server: Server, more: dict[str, Any], stream: bool
) -> None:
    asked = {"prompt": "日", "max_tokens": 9, "stream": stream} | more
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S)
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    assert SAID in error["message"] and error["code"] and error["type"]
    sound = {"prompt": "the water was", "max_tokens": 9, "temperature": 0}
    assert httpx.post(f"{server.url}/v1/completions", json=sound, timeout=PATIENCE_S).status_code == 200
    server.wait_for(lambda: server.metric("penstock_kv_blocks") == 0)
    assert server.metric("penstock_requests_in_flight") == 0

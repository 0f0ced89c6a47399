"""Steps that continue rows as graphs would run them, in Triton's interpreter: padded to a bucket's rows and
read from one buffer, they give the tokens of the plain way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.checkpoint.spec import PoolingSpec
from penstock.kernels import language
from penstock.kernels.feed import feed_tokens
from penstock.kvcache.blocks import BlockPool
from penstock.kvcache.store import KVCache, KVStore
from penstock.layers.build import LayerBuilder
from penstock.models.registry import build_model
from penstock.pooling.build import Pooler
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.capture import Work
from penstock.runner.decode import USES_BEFORE_CAPTURE, DecodeGraphs, Key, warm_up_keys
from penstock.runner.generator import Generator
from penstock.runner.graphs import Graphs
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.types import GeneratedTokens, PoolingParams, Request, SamplingParams, Task
from penstock.weights.stream import open_weights
from tests.generation.fakes import told_apart
from tests.helpers import make_spec

CPU = torch.device("cpu")
CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
SLOTS, LENGTH, BLOCKS = 6, 64, 24
PROMPTS = [[5], [7, 8], [9] * 17, [11, 12, 13], [14] * 5]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are captured when they first come."""
    monkeypatch.setattr("penstock.runner.decode.USES_BEFORE_CAPTURE", 0)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    if not language.INTERPRETED:
        pytest.skip("on a CUDA device tests/gpu/test_generation.py replays real graphs")
    before = language._devices
    language.switch("cpu", "cuda")
    yield
    language.switch(*before)


def fake(work: Work) -> tuple[Callable[[], None], list[Tensor]]:
    """Replays by doing the work again and writing the results where the first ones were."""
    kept = [tensor.clone() for tensor in work()]

    def replay() -> None:
        for old, new in zip(kept, work(), strict=True):
            old.copy_(new)

    return replay, kept


def make_runner(
    path: Path, graphs: bool, capture: object = fake, dtype: torch.dtype = torch.float32
) -> ModelRunner:
    weights = open_weights(path, "dummy", 0, dtype, CPU)
    model = build_model("Qwen3ForCausalLM", CONFIG, LayerBuilder(weights), generates=True)
    store = KVStore(2, BLOCKS * BLOCK_SIZE, 1, 16, dtype, CPU)
    generator = Generator(model.heads[Task.GENERATE], SLOTS, CPU, seed=1)
    pooler = Pooler(make_spec(pooling=PoolingSpec(("last",))), {}, [])
    runner = ModelRunner(model, pooler, CPU, 2, KVCache(store, torch.zeros(0, 32)), generator)
    if graphs:
        # In fp32 attention is the reference, which reads tables to their end, not to that of each row.
        slot = runner.staging.pinned_ints
        runner.staging.pinned_ints = lambda size: slot(size).zero_()  # type: ignore[method-assign]
        runner.decode = DecodeGraphs(model, generator, runner.staging, store, capture)  # type: ignore[arg-type]
    return runner


def run(
    runner: ModelRunner, params: list[SamplingParams], apart: bool = False
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log probabilities of each prompt; a third of the rows joins later."""
    limits = GenerationLimits(SLOTS, 32, 12, LENGTH, 1000, prefixes=False, apart=apart)
    lane = GenerationScheduler(BlockPool(BLOCKS, BLOCK_SIZE), limits)
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in PROMPTS]

    def add(number: int) -> None:
        ids = np.array(PROMPTS[number], dtype=np.int32)
        lengths = np.array([len(ids)], dtype=np.int32)
        lane.add(Request(str(number), ids, lengths, PoolingParams(Task.GENERATE), sampling=params[number]))

    for number in range(len(PROMPTS) - 2):
        add(number)
    for step in range(200):
        if step == 4:
            add(len(PROMPTS) - 2)
            add(len(PROMPTS) - 1)
        plan = lane.schedule(0.0)
        if plan is None:
            break
        for part in told_apart(lane.collect(plan, runner.launch(plan).result())):
            assert isinstance(part, GeneratedTokens)
            tokens, logprobs = found[int(part.id)]
            tokens.extend(part.token_ids.tolist())
            if part.logprobs is not None:
                logprobs.extend(part.logprobs.ravel().tolist())
        lane.check_integrity()
    assert not lane.busy
    return found


def sampling(**options: object) -> SamplingParams:
    return SamplingParams(max_tokens=12, ignore_eos=True, **options)  # type: ignore[arg-type]


GREEDY = sampling(temperature=0.0)
KINDS = {
    "greedy": [GREEDY] * 5,
    "noise": [GREEDY, sampling(seed=3), GREEDY, sampling(seed=4, temperature=0.5), GREEDY],
    "filtered": [sampling(seed=3, top_k=5), GREEDY, sampling(seed=5, top_p=0.8), GREEDY, sampling(seed=6)],
    "edited": [sampling(temperature=0.0, presence_penalty=1.0), GREEDY, sampling(seed=2), GREEDY, GREEDY],
    "logprobs": [sampling(temperature=0.0, logprobs=2), GREEDY, GREEDY, sampling(seed=1, logprobs=0), GREEDY],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_gives_the_tokens_of_the_plain_way(kind: str, tmp_path: Path, soon: None) -> None:
    wanted = run(make_runner(tmp_path, graphs=False), KINDS[kind])
    runner = make_runner(tmp_path, graphs=True)
    got = run(runner, KINDS[kind])
    assert runner.decode is not None and runner.decode.replays > 10
    choose = {key.samples for key in runner.decode.captured}
    assert (False in choose) == (kind in ("edited", "logprobs"))
    assert any(key.filters for key in runner.decode.captured) == (kind == "filtered")
    for (tokens, logprobs), (same, close) in zip(got, wanted, strict=True):
        assert tokens == same and len(tokens) == 12
        np.testing.assert_allclose(logprobs, close, rtol=1e-5, atol=1e-5)


def test_prompts_are_replayed_too_piece_after_piece(tmp_path: Path, soon: None) -> None:
    wanted = run(make_runner(tmp_path, graphs=False, dtype=torch.float16), KINDS["greedy"])
    runner = make_runner(tmp_path, graphs=True, dtype=torch.float16)
    runner.graphs = Graphs(runner.model, runner.pooler, runner.staging, fake, cache=runner.cache)
    with runner.graphs.capture_on_first_use():
        got = run(runner, KINDS["greedy"], apart=True)
    # One of 17 tokens runs in two pieces of at most 12; only the one of a single token needs no such step.
    assert runner.graphs.replays >= 3 and all(key.is_prompt for key in runner.graphs.captured)
    assert runner.decode is not None and runner.decode.replays > 10
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]


def test_without_a_graph_steps_run_as_ever(tmp_path: Path) -> None:
    def broken(work: Work) -> tuple[Callable[[], None], list[Tensor]]:
        raise RuntimeError("no")

    runner = make_runner(tmp_path, graphs=True, capture=broken)
    assert run(runner, KINDS["noise"]) == run(make_runner(tmp_path, graphs=False), KINDS["noise"])
    assert runner.decode is not None and not runner.decode.captured and runner.decode.replays == 0


def test_without_memory_for_a_graph_no_more_are_tried_for_a_while(tmp_path: Path) -> None:
    tries = []

    def full(work: Work) -> tuple[Callable[[], None], list[Tensor]]:
        tries.append(work())
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner = make_runner(tmp_path, graphs=True, capture=full)
    assert run(runner, KINDS["greedy"]) == run(make_runner(tmp_path, graphs=False), KINDS["greedy"])
    assert len(tries) == 1  # a shape that came often, and then none
    assert runner.decode is not None
    runner.decode.drop()
    assert not runner.decode.captured


def test_a_capture_continues_no_row(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, graphs=True)
    assert runner.decode is not None and runner.generator is not None and runner.cache is not None
    generator, keys = runner.generator, runner.cache.store.keys
    last, positions, kept = generator.last.clone(), generator.sampler.positions.clone(), keys.clone()
    with torch.inference_mode():
        for key in warm_up_keys(SLOTS):
            assert runner.decode.ensure(key) is not None
    assert torch.equal(generator.last[:-1], last[:-1]) and torch.equal(keys, kept)
    assert torch.equal(generator.sampler.positions[:-1], positions[:-1])


def test_first_graphs_reach_as_many_rows_as_may_run() -> None:
    assert max(key.rows for key in warm_up_keys(100)) == 128
    assert warm_up_keys(1) == [Key(1, 16, True, True), Key(1, 16, True, False)]
    assert [key.rows for key in warm_up_keys(100) if key.filters] == [1, 32, 128]


def test_a_roomier_graph_stands_in_until_a_shape_has_come_often(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, graphs=True)
    assert runner.decode is not None
    with torch.inference_mode():
        runner.decode.ensure(Key(8, 16, True, True))
    got = run(runner, KINDS["noise"])
    assert got == run(make_runner(tmp_path, graphs=False), KINDS["noise"])
    # Rows come and go: shapes of more than a few steps have a graph of their own now.
    assert Key(8, 16, True, True) in runner.decode.captured and len(runner.decode.captured) > 1
    assert runner.decode.replays > sum(1 for _ in runner.decode.captured) * USES_BEFORE_CAPTURE


def test_a_graph_stands_in_only_for_what_it_holds() -> None:
    roomy = Key(8, 64, True, True)
    assert roomy.serves(Key(4, 16, True, False)) and roomy.serves(roomy)
    assert not roomy.serves(Key(16, 16, True, False)) and not roomy.serves(Key(4, 256, True, False))
    assert not roomy.serves(Key(4, 16, False, False))
    assert not Key(8, 64, True, False).serves(Key(4, 16, True, True))


@pytest.mark.parametrize("count", [1, 3, 130])
def test_tokens_are_fed_where_a_slot_is_named(count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, 50, (count,), generator=draw, dtype=torch.int32)
    slots = torch.randint(-1, 9, (count,), generator=draw, dtype=torch.int32)
    last = torch.randint(100, 200, (9,), generator=draw, dtype=torch.int32)
    wanted = [int(last[s]) if s >= 0 else int(t) for s, t in zip(slots, tokens, strict=True)]
    by_torch = tokens.clone()
    feed_tokens(tokens, slots, last)
    assert tokens.tolist() == wanted
    language.switch()
    feed_tokens(by_torch, slots, last)
    assert by_torch.tolist() == wanted

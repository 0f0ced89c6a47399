"""Graphs compared with eager steps on a device: the same values at every edge of a bucket, no waits, and no
growth of memory.

pytest -m gpu tests/gpu/test_graphs.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Engine
from penstock.errors import DeviceOutOfMemory
from penstock.layers.batch import reads_in_place
from penstock.runner.buckets import TOKENS
from penstock.runner.graph_keys import Key
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import OutputDtype, PoolingParams, PoolPlan, Request, Task
from tests.checkpoints import wordpiece_tokenizer, wordpiece_vocabulary, write_bert, write_json
from tests.helpers import ints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
}
DECODER = {
    "architectures": ["Qwen3Model"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "vocab_size": len(wordpiece_vocabulary()),
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "bert", config=CONFIG)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    write_json(folder / "config.json", DECODER)
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def engine(bert: Path) -> Iterator[Engine]:
    with Engine(str(bert), device="cuda", dtype="bfloat16") as engine:
        yield engine


def runner_of(engine: Engine) -> ModelRunner:
    runner = engine.local.engine.core.runner
    assert isinstance(runner, ModelRunner) and runner.graphs is not None
    return runner


def plan_of(lengths: Sequence[int], *params: PoolingParams, seed: int = 0, **more: Any) -> PoolPlan:
    tokens = np.random.default_rng(seed).integers(5, 100, sum(lengths)).astype(np.int32)
    shares = []
    for number, wanted in enumerate(params or (PoolingParams(),)):
        request = Request(str(number), tokens, ints(lengths), wanted, **more)
        shares.append(ScheduledRows(request, ints(range(len(lengths)))))
    return build_plan(shares)


def by_graph(runner: ModelRunner, plan: PoolPlan) -> list[np.ndarray]:
    graphs = runner.graphs
    assert graphs is not None
    before = graphs.replays
    with graphs.capture_on_first_use():
        values = [np.array(output) for output in runner.launch(plan).result().outputs]
    assert graphs.replays == before + 1, "the step ran without a graph"
    return values


def eager(runner: ModelRunner, plan: PoolPlan) -> list[np.ndarray]:
    with torch.inference_mode():
        outputs = runner._step(plan).outputs
        torch.cuda.synchronize()
        return [np.array(output) for output in outputs]


def check(runner: ModelRunner, plan: PoolPlan) -> None:
    for mine, theirs in zip(by_graph(runner, plan), eager(runner, plan), strict=True):
        assert mine.shape == theirs.shape and np.isfinite(mine).all()
        a, b = mine.reshape(-1, mine.shape[-1]), theirs.reshape(-1, mine.shape[-1])
        if mine.shape[-1] > 8:
            cosine = (a * b).sum(1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-9)
            assert cosine.min() > 0.9999
        else:
            assert np.abs(a - b).max() <= 5e-3


@pytest.mark.parametrize("tokens", [t + more for t in TOKENS if t < 4096 for more in (-1, 0, 1)])
def test_replay_equals_eager_at_every_border(engine: Engine, tokens: int) -> None:
    rest, lengths = tokens, []
    while rest:
        lengths.append(min(rest, 500))
        rest -= lengths[-1]
    check(runner_of(engine), plan_of(lengths))


@pytest.mark.parametrize(
    "lengths",
    [
        (1,),
        (1,) * 16,
        (1,) * 17,
        (64,) * 4,
        (63, 64, 65),
        (3, 17, 17, 40, 64, 65, 130, 300),
        (32,) * 64,
        (500, 1),
        (128,) * 7,
        (20,) * 33,
    ],
)
@pytest.mark.parametrize("name", ["bert", "qwen"])
def test_replay_equals_eager_for_mixed_lengths(name: str, lengths: tuple[int, ...], request: Any) -> None:
    folder = request.getfixturevalue(name)
    options: dict[str, Any] = {"load_format": "dummy"} if name == "qwen" else {}
    with Engine(str(folder), device="cuda", dtype="bfloat16", **options) as engine:
        runner = runner_of(engine)
        for seed in range(3):
            check(runner, plan_of(lengths, seed=seed))
        check(runner, plan_of(lengths, PoolingParams(Task.TOKEN_EMBED)))
        check(runner, plan_of(lengths, PoolingParams(), PoolingParams(Task.TOKEN_EMBED)))
        check(runner, plan_of(lengths, PoolingParams(dimensions=32)))
        check(runner, plan_of(lengths, skip=ints([int(n > 1) for n in lengths])))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean"])
def test_every_pooling_method_runs_inside_a_graph(bert: Path, pooling: str) -> None:
    options: dict[str, Any] = {"pooler_config": {"pooling_type": pooling}}
    with Engine(str(bert), device="cuda", dtype="bfloat16", **options) as engine:
        for lengths in ((5,), (16,), (3, 9, 40, 65), (16, 16, 16), (200, 3)):
            check(runner_of(engine), plan_of(lengths))


@pytest.mark.parametrize("dtype", OutputDtype)
def test_a_graph_gives_every_output_dtype(engine: Engine, dtype: OutputDtype) -> None:
    runner = runner_of(engine)
    plan = plan_of((5, 9, 40), PoolingParams(dtype=dtype))
    (mine,), (theirs,) = by_graph(runner, plan), eager(runner, plan)
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    if dtype is OutputDtype.BFLOAT16:
        mine, theirs = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (mine, theirs))
    if dtype.is_packed:
        assert (mine == theirs).mean() > 0.9
    else:
        least = 0.02 if mine.dtype.kind == "f" else 4
        assert np.abs(mine.astype(np.float64) - theirs.astype(np.float64)).max() <= least
    finite = runner.launch(plan).result().finite
    assert all((flag == 1).all() and len(flag) == 3 for flag in finite)


def test_a_graph_takes_type_ids(engine: Engine) -> None:
    types = ints([0, 1] * 10)
    check(runner_of(engine), plan_of((12, 8), type_ids=types))


def test_garbage_in_the_padding_changes_no_row(engine: Engine) -> None:
    """Between replays, the memory that graphs and steps allocate next is filled with NaN."""
    runner = runner_of(engine)
    plan = plan_of((7, 30, 41))
    expected = by_graph(runner, plan)[0]
    for _ in range(5):
        rubbish = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
        del rubbish
        by_graph(runner, plan_of((64, 64, 64, 64), seed=3))
        assert (by_graph(runner, plan)[0] == expected).all()


def test_two_steps_in_flight_and_eager_ones_between_keep_their_own_results(engine: Engine) -> None:
    runner = runner_of(engine)
    shapes = [(5,), (20, 30), (64,) * 20, (7, 300), (10,) * 900, (400, 401)]
    plans = [plan_of(lengths, seed=i) for i, lengths in enumerate(shapes)]
    plans.append(plan_of((9, 10, 11), PoolingParams(dimensions=16)))
    plans.append(plan_of((500,) * 40))  # too large for a graph
    expected = [eager(runner, plan)[0] for plan in plans]
    graphs = runner.graphs
    assert graphs is not None
    draw = np.random.default_rng(0)
    before: Any = None
    with graphs.capture_on_first_use():
        for number in draw.integers(0, len(plans), 300).tolist():
            future = runner.launch(plans[number])
            if before is not None:
                which, earlier = before
                got = earlier.result().outputs[0]
                assert (got * expected[which]).sum(1).min() / (expected[which] ** 2).sum(1).max() > 0.999
            before = (number, future)
        before[1].result()


@pytest.mark.parametrize("wanted", [(PoolingParams(),), (PoolingParams(), PoolingParams(Task.TOKEN_EMBED))])
def test_a_replayed_step_never_waits_between_launch_and_collect(
    engine: Engine, wanted: tuple[PoolingParams, ...]
) -> None:
    runner = runner_of(engine)
    plan = plan_of((5, 20, 70), *wanted)
    for _ in range(4):  # buffers are allocated on first use
        by_graph(runner, plan)
    assert runner.graphs is not None
    before = runner.graphs.replays
    torch.cuda.set_sync_debug_mode("error")
    try:
        futures = [runner.launch(plan) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(future.result().outputs) == len(wanted) for future in futures)
    assert runner.graphs.replays == before + 2


def test_memory_does_not_grow_over_many_steps(engine: Engine) -> None:
    runner = runner_of(engine)
    draw = np.random.default_rng(1)

    def steps(count: int) -> None:
        for seed in range(count):
            lengths = draw.integers(1, int(draw.choice([20, 64, 300])), int(draw.integers(1, 24)))
            runner.launch(plan_of(lengths.tolist(), seed=seed)).result()

    steps(1000)
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved()
    graphs = runner.graphs
    assert graphs is not None
    captured = len(graphs.captured)
    steps(2000)
    grown = torch.cuda.memory_reserved() - held
    assert grown <= (64 << 20) + (len(graphs.captured) - captured) * (4 << 20)
    assert graphs.captured, "small steps are captured without being told to"


def test_answers_are_the_same_alone_and_under_load(bert: Path) -> None:
    draw = np.random.default_rng(2)
    inputs = [draw.integers(5, 100, int(draw.integers(1, 200))).tolist() for _ in range(200)]
    with Engine(str(bert), device="cuda", dtype="bfloat16", max_num_batched_tokens=2048) as engine:
        alone = np.concatenate([engine.embed([row]) for row in inputs])
        with ThreadPoolExecutor(16) as pool:
            for _ in range(4):
                crowd = np.concatenate(list(pool.map(lambda row: engine.embed([row]), inputs)))
                assert (alone * crowd).sum(1).min() > 0.9995
        graphs = runner_of(engine).graphs
        assert graphs is not None and graphs.replays > 200


WIDE = CONFIG | {"intermediate_size": 65_536, "max_position_embeddings": 4096}


def leave(extra: int) -> None:
    """Limit this process to `extra` bytes more than it holds now."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + extra) / total))


@pytest.mark.parametrize("room", [1.2, 0.6])
def test_a_capture_out_of_memory_loses_no_step_and_holds_nothing(tmp_path: Path, room: float) -> None:
    """There is memory for a step but not also for a capture, or not even for the run before the capture.

    A step of 4,096 tokens needs about 512 MB between the two products of a layer. A capture cannot reuse
    memory of eager steps.
    """
    folder = write_bert(tmp_path / "wide", config=WIDE)
    with Engine(str(folder), device="cuda", dtype="bfloat16", load_format="dummy") as engine:
        runner = runner_of(engine)
        graphs = runner.graphs
        assert graphs is not None
        plan = plan_of((512,) * 8)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        expected = eager(runner, plan)[0]
        needed = torch.cuda.max_memory_allocated() - before
        graphs.drop()
        leave(int(room * needed))
        held = torch.cuda.memory_reserved()
        try:
            core = engine.local.engine.core
            with graphs.capture_on_first_use():
                try:
                    got = runner.launch(plan).result().outputs[0]
                except DeviceOutOfMemory:
                    assert room < 1, "there was room for the step itself"
                else:
                    np.testing.assert_allclose(got, expected, atol=2e-2)
            assert graphs.key_of(plan) in graphs.refused, "the capture had memory: this proves nothing"
            assert not graphs.captured
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() <= held + needed / 5, "workspaces of the library, no more"
            # The engine continues, with smaller steps if the device is too small, and no request fails.
            rows = [row.tolist() for row in np.split(plan.token_ids, 8)]
            np.testing.assert_allclose(engine.embed(rows), expected, atol=2e-2)
            assert core.device_failure is None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        by_graph(runner, plan_of((16,) * 3))  # graphs can still be captured


def test_enforce_eager_has_no_graphs(bert: Path) -> None:
    with Engine(str(bert), device="cuda", dtype="bfloat16", enforce_eager=True) as engine:
        assert engine.local.engine.core.runner.graphs is None
        assert np.isfinite(engine.embed([[5, 6, 7]])).all()


CUT: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 128,
    "long_prefill_token_threshold": 48,
    "load_format": "dummy",
    "device": "cuda",
    "dtype": "bfloat16",
}


def piece(length: int, begin: int, end: int, first_block: int | None, params: PoolingParams) -> ScheduledRows:
    tokens = np.random.default_rng(length).integers(5, 100, length).astype(np.int32)
    table = None if first_block is None else tuple(range(first_block, first_block + -(-length // 16)))
    request = Request(str(length), tokens, ints([length]), params)
    return ScheduledRows(request, ints([0]), ints([begin]), ints([end]), (table,))


@pytest.mark.parametrize("params", [PoolingParams(Task.TOKEN_EMBED), PoolingParams()])
@pytest.mark.parametrize("window", [None, 20])
def test_chunked_steps_replay_as_they_run_eagerly(
    qwen: Path, params: PoolingParams, window: int | None, tmp_path: Path
) -> None:
    folder = qwen
    if window is not None:
        folder = tmp_path
        sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
        write_json(folder / "config.json", DECODER | sliding)
        wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    with Engine(str(folder), **CUT) as engine:
        runner = runner_of(engine)
        assert runner.cache is not None and reads_in_place(runner.cache.store)
        steps = [
            [piece(200, 0, 48, 0, params)],
            [piece(200, 48, 96, 0, params), piece(70, 0, 48, 20, params), piece(9, 0, 9, None, params)],
            [piece(200, 96, 144, 0, params), piece(70, 48, 70, 20, params)],
            [piece(200, 144, 200, 0, params)],
        ]
        for shares in steps:
            check(runner, build_plan(shares, block_size=16))
        graphs = runner.graphs
        assert graphs is not None and any(key.max_cached_keys is not None for key in graphs.captured)


def test_chunked_rows_equal_whole_rows_with_graphs(qwen: Path) -> None:
    draw = np.random.default_rng(3)
    inputs = [draw.integers(5, 100, n).tolist() for n in (1, 20, 48, 49, 100, 300, 500, 33, 260, 7)]
    whole_options = {name: CUT[name] for name in ("load_format", "device", "dtype")}
    with Engine(str(qwen), **whole_options) as whole, Engine(str(qwen), **CUT) as cut:
        expected, vectors = whole.token_embed(inputs), whole.embed(inputs)
        for _ in range(12):  # repeated shapes are captured
            for got, wanted in zip(cut.token_embed(inputs), expected, strict=True):
                lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1)
                assert ((got * wanted).sum(1) / lengths).min() > 0.998
            assert (cut.embed(inputs) * vectors).sum(1).min() > 0.998
        graphs = runner_of(cut).graphs
        assert graphs is not None and any(key.max_cached_keys is not None for key in graphs.captured)


@pytest.mark.parametrize("name", ["mpnet", "deberta-v3"])
def test_a_model_that_iterates_over_length_groups_runs_eagerly(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.parity.encoders import BACKBONES, CASES, make_rows, opened

    case = (CASES | BACKBONES).get(name)
    if case is None:
        pytest.skip(f"no such case: {name}")
    case.write(tmp_path, "Model", scale=0.1)
    with opened(tmp_path) as cpu, opened(tmp_path, device="cuda", dtype="bfloat16") as cuda:
        runner = cuda.engine._core.runner
        assert isinstance(runner, ModelRunner)
        rows = make_rows()
        for mine, theirs in zip(cuda.ask(rows, Task.EMBED), cpu.ask(rows, Task.EMBED), strict=True):
            assert float(mine @ theirs) / float(np.linalg.norm(mine) * np.linalg.norm(theirs)) > 0.999
        assert runner.graphs is None or not runner.graphs.captured


def shape_key(runner: ModelRunner, lengths: Sequence[int]) -> Key:
    assert runner.graphs is not None
    key = runner.graphs.key_of(plan_of(lengths))
    assert key is not None
    return key


@pytest.mark.parametrize("name", ["bert", "qwen"])
def test_graphs_that_were_captured_without_a_step_give_the_answers_of_eager_steps(
    name: str, request: Any
) -> None:
    folder = request.getfixturevalue(name)
    options: dict[str, Any] = {"graph_capture_seconds": 0, "graph_history": False}
    if name == "qwen":
        options["load_format"] = "dummy"
    shapes = [(5,), (20, 30), (64,) * 20, (7, 300), (3, 17, 64, 65, 130, 300), (100,) * 30]
    with Engine(str(folder), device="cuda", dtype="bfloat16", **options) as engine:
        runner = runner_of(engine)
        graphs = runner.graphs
        assert graphs is not None and not graphs.captured
        keys = [shape_key(runner, lengths) for lengths in shapes]
        graphs.policy.plan(keys)
        while runner.min_idle_s is not None:
            runner.run_idle()
        assert set(keys) <= set(graphs.captured)
        for seed in range(2):
            for lengths in shapes:
                check(runner, plan_of(lengths, seed=seed))


def test_a_larger_graph_gives_the_answers_of_the_eager_step(bert: Path) -> None:
    options: dict[str, Any] = {"graph_capture_seconds": 0, "graph_history": False}
    with Engine(str(bert), device="cuda", dtype="bfloat16", **options) as engine:
        runner = runner_of(engine)
        graphs = runner.graphs
        assert graphs is not None
        graphs.policy.plan([shape_key(runner, (64,) * 60)])
        assert runner.min_idle_s is not None
        runner.run_idle()
        runner.launch(plan_of((64,) * 60)).result()  # measures its time
        graphs.policy.times.host_s = 1.0  # padding costs less than launching, however fast the host is
        graphs.policy.captured(next(iter(graphs.captured)), 1000.0)  # a capture costs more than both
        for rows in (8, 17, 33, 48):
            plan = plan_of([60] * rows, seed=rows)
            before, mine = graphs.replays, runner.launch(plan).result().outputs[0].copy()
            assert graphs.replays == before + 1 and len(graphs.captured) == 1, "it runs by the larger graph"
            theirs = eager(runner, plan)[0]
            assert (mine * theirs).sum(1).min() > 0.9999 * (theirs**2).sum(1).max()


def test_warm_up_captures_within_its_time_and_saves_shapes(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lengths = (9, 200, 201)
    with Engine(str(bert), device="cuda", dtype="bfloat16", graph_capture_seconds=0) as engine:
        runner = runner_of(engine)
        key = shape_key(runner, lengths)
        assert runner.graphs is not None and not runner.graphs.captured
        runner.launch(plan_of(lengths)).result()
    assert len(list((tmp_path / "penstock" / "graphs").glob("*.json"))) == 1
    with Engine(str(bert), device="cuda", dtype="bfloat16", graph_capture_seconds=30) as engine:
        runner = runner_of(engine)
        assert runner.graphs is not None and key in runner.graphs.captured
        assert len(runner.graphs.captured) > 20
        check(runner, plan_of(lengths))

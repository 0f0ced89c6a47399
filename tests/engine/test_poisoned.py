"""Failed steps with dependent steps in flight: no answer is computed from invalid KV cache blocks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Engine
from penstock.engine.loop import EngineCore
from penstock.errors import DeviceOutOfMemory, RowFailed
from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.scheduler import Budget, Chunking, Scheduler
from penstock.scheduler.vector_cache import VectorCache
from penstock.types import (
    Array,
    Failure,
    Ints,
    PooledOutput,
    PooledResult,
    PoolingParams,
    PoolPlan,
    Request,
    SampledResult,
    StepPlan,
    StepResult,
    Task,
)
from tests.engine.chunked import check_no_memory_is_held, chunked, rows
from tests.generation.fakes import generation_request
from tests.helpers import ints
from tests.thinning import num_examples
from tests.waiting import PATIENCE_S, wait_until

BLOCK = 4
PLACES = 64
_GARBAGE = -7

Fails = Callable[[int, StepPlan], Exception | None]


def reading(tokens: list[int]) -> float:
    """The fake model's output for these tokens. It depends on every token and its position."""
    total = 7
    for token in tokens:
        total = (total * 31 + int(token) + 1) % 1_000_003
    return float(total)


def scored(query: float, document: float) -> float:
    return float((int(query) * 17 + int(document)) % 1_000_003)


class AsyncRunner:
    """A fake device that stores token ids instead of keys, and whose steps end when the test calls `finish`.
    A failed step writes garbage to its blocks, which later steps read."""

    def __init__(self, blocks: int, fails: Fails) -> None:
        self.memory = np.full(blocks * BLOCK, _GARBAGE, dtype=np.int32)
        self.store = np.full(PLACES, _GARBAGE, dtype=np.float64)
        self.fails = fails
        self.steps = 0
        self.in_flight: deque[tuple[Future[StepResult], StepResult | Exception]] = deque()
        self.failed_alone: set[str] = set()
        self.most_in_flight = 0

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        error = self.fails(self.steps, plan)
        self.steps += 1
        ids = plan.token_ids if error is None else np.full_like(plan.token_ids, _GARBAGE)
        if error is not None and len(plan.slices) == 1:
            self.failed_alone.add(plan.slices[0].request.id)
        result = self._run(plan, ids)
        self.in_flight.append((future, result if error is None else error))
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return future

    def finish(self) -> None:
        future, result = self.in_flight.popleft()
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def close(self) -> None:
        return None

    def _run(self, plan: StepPlan, ids: Ints) -> StepResult:
        prefixes = self._prefixes(plan, ids)
        outputs: list[Array] = []
        for variant in plan.variants:
            if (pairs := variant.pairs) is not None:
                last = np.array([reading(tokens) for tokens in prefixes])
                self.store[pairs.write_to] = last[pairs.write_from]
                queries = self.store[pairs.query_starts[pairs.pair_queries]]
                own = len(pairs.pair_queries) - pairs.num_from_store
                places = pairs.document_starts
                documents = np.concatenate([last[places[:own]], self.store[places[own:]]])
                values = [scored(q, d) for q, d in zip(queries, documents, strict=True)]
                outputs.append(np.array(values, dtype=np.float64).reshape(-1, 1))
                continue
            rows = range(plan.num_rows) if variant.rows is None else variant.rows.tolist()
            if variant.params.per_token:
                values = [
                    reading(prefixes[row][: len(prefixes[row]) - int(plan.lengths[row]) + at + 1])
                    for row in rows
                    for at in range(int(plan.lengths[row]))
                ]
            else:
                values = [reading(prefixes[row]) for row in rows]
            outputs.append(np.array(values, dtype=np.float64).reshape(-1, 1))
        return PooledResult(tuple(outputs), device_s=0.001)

    def _prefixes(self, plan: StepPlan, ids: Ints) -> list[list[int]]:
        """The tokens of each row up to the end of this step: from its blocks, and from the step itself."""
        if plan.kv is None:
            return [part.tolist() for part in np.split(ids, plan.cu_lengths[1:-1])]
        kv = plan.kv
        self.memory[kv.write_slots] = ids[kv.write_tokens]
        run = np.empty(int(kv.cu_keys[-1]), dtype=np.int32)
        run[kv.cached_key_at] = self.memory[kv.read_slots]
        run[kv.new_key_at] = ids
        return [part.tolist() for part in np.split(run, kv.cu_keys[1:-1])]


def make_core(
    fails: Fails,
    *,
    depth: int,
    tokens: int = 12,
    chunk: int = 6,
    blocks: int = 24,
    prefixes: bool = True,
    chunked: bool = True,
) -> tuple[EngineCore, AsyncRunner]:
    runner = AsyncRunner(blocks, fails)
    chunking = Chunking(BlockPool(blocks, BLOCK), chunk, prefixes) if chunked else None
    scheduler = Scheduler(Budget(tokens, 8, 10**9), chunking, VectorCache(PLACES, documents=True))
    core = EngineCore(
        runner,  # type: ignore[arg-type]
        scheduler,
        depth=depth,
        clock=lambda: 1.0,
        share_identical=False,
    )
    return core, runner


def request(name: str, rows: list[list[int]], task: Task = Task.EMBED, pairs: Ints | None = None) -> Request:
    flat = ints([token for row in rows for token in row])
    lengths, params = ints([len(row) for row in rows]), PoolingParams(task)
    return Request(name, flat, lengths, params, pairs=pairs, reuse_prefix=task is Task.EMBED)


def expected(asked: Request) -> list[float]:
    rows = [part.tolist() for part in np.split(asked.token_ids, np.cumsum(asked.lengths)[:-1])]
    if asked.pairs is not None:
        first = asked.num_queries
        queries = [reading(row) for row in rows[:first]]
        return [
            scored(queries[query], reading(rows[first + i])) for i, query in enumerate(asked.pairs.tolist())
        ]
    if asked.params.per_token:
        return [reading(row[: i + 1]) for row in rows for i in range(len(row))]
    return [reading(row) for row in rows]


def run(core: EngineCore, runner: AsyncRunner, turns: int = 5_000) -> dict[str, PooledOutput | Failure]:
    """Run until all requests are answered. The oldest step ends whenever no more can be launched."""
    found: dict[str, PooledOutput | Failure] = {}
    for _ in range(turns):
        if not core.busy:
            break
        before = runner.steps
        for outcome in core.step():
            assert outcome.id not in found, "a request has two outcomes"
            assert isinstance(outcome, PooledOutput | Failure)
            found[outcome.id] = outcome
        if runner.in_flight and runner.steps == before:
            runner.finish()
    assert not core.busy, "the core is still busy"
    while runner.in_flight:  # steps of cancelled requests
        runner.finish()
    core.step()
    core.check_integrity()
    assert core.scheduler.vector_cache is not None
    core.scheduler.vector_cache.check_integrity()
    assert core.scheduler.queue.num_tokens == core.scheduler.queue.num_rows == len(core.scheduler.queue) == 0
    assert not core.scheduler.isolated
    return found


def check(found: dict[str, PooledOutput | Failure], asked: list[Request], may_fail: set[str]) -> None:
    assert found.keys() == {each.id for each in asked}
    for each in asked:
        outcome = found[each.id]
        if isinstance(outcome, Failure):
            assert isinstance(outcome.error, RowFailed) and each.id in may_fail, each.id
        else:
            assert outcome.values[:, 0].tolist() == expected(each), each.id


def step_fails(*numbers: int) -> Fails:
    return lambda number, plan: RuntimeError("this step fails") if number in numbers else None


LONG = list(range(100, 130))


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("task", [Task.EMBED, Task.TOKEN_EMBED])
@pytest.mark.parametrize("failing", range(5))
def test_a_row_whose_chunk_failed_starts_over_and_others_continue(
    depth: int, task: Task, failing: int
) -> None:
    core, runner = make_core(step_fails(failing), depth=depth, prefixes=False)
    asked = [request("a", [LONG], task), request("b", [LONG[::-1]], task), request("c", [[1, 2, 3]])]
    for each in asked:
        core.add(each)
    found = run(core, runner)
    assert runner.most_in_flight == depth
    check(found, asked, set())


@pytest.mark.parametrize("depth", [2, 3])
def test_a_row_that_reused_a_prefix_of_a_failed_step_starts_over(depth: int) -> None:
    core, runner = make_core(step_fails(0), depth=depth, chunk=12)
    asked = [request("a", [LONG[:10]]), request("b", [[*LONG[:9], 5, 6]]), request("c", [[9, 8, 7]])]
    core.add(asked[0])
    core.step()
    for each in asked[1:]:
        core.add(each)
    core.step()
    assert len(runner.in_flight) == 2
    assert core.pool is not None and core.pool.hit_tokens, "the second reuses a prefix that the first writes"
    found = run(core, runner)
    assert isinstance(found["a"], Failure), "it was alone in the failed step"
    check(found, asked, {"a"})
    assert runner.steps == 3, "only the row that depended on it ran again"


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("failing", range(4))
def test_documents_in_flight_are_scored_again_when_their_query_failed(
    depth: int, chunked: bool, failing: int
) -> None:
    core, runner = make_core(step_fails(failing), depth=depth, chunked=chunked, prefixes=False)
    rows = [LONG[:8], LONG[8:13], *([[i, 50 + i, 7] for i in range(9)])]
    asked = [request("a", [[1, 2]]), request("s", rows, Task.SCORE, ints([0, 1, 0, 1, 0, 1, 0, 1, 0]))]
    for each in asked:
        core.add(each)
    found = run(core, runner)
    check(found, asked, runner.failed_alone)


@pytest.mark.parametrize("depth", [2, 3])
def test_no_request_fails_when_memory_runs_out_with_steps_in_flight(depth: int) -> None:
    def fails(number: int, plan: StepPlan) -> Exception | None:
        return DeviceOutOfMemory("no room") if number in (0, 2) else None

    core, runner = make_core(fails, depth=depth, prefixes=False)
    asked = [request("a", [LONG]), request("b", [LONG[::-1]], Task.TOKEN_EMBED)]
    for each in asked:
        core.add(each)
    check(run(core, runner), asked, set())


def test_isolated_rows_take_the_blocks_of_open_rows_in_the_queue() -> None:
    """There are blocks for two long rows. One is poisoned; the other restarts although a third row has taken
    its blocks."""
    poison = 666

    def fails(number: int, plan: StepPlan) -> Exception | None:
        return ValueError("poison") if poison in plan.token_ids else None

    core, runner = make_core(fails, depth=2, blocks=16, prefixes=False)
    asked = [request("bad", [[*LONG[:-1], poison]]), request("b", [LONG[::-1]]), request("c", [LONG[3:]])]
    for each in asked:
        core.add(each)
    found = run(core, runner)
    assert isinstance(found["bad"], Failure)
    check(found, asked, {"bad"})


class BothRunner(AsyncRunner):
    """Also runs generation steps, which end at once and always sample token 1."""

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        if isinstance(plan, PoolPlan):
            return super().launch(plan)
        future: Future[StepResult] = Future()
        future.set_result(
            SampledResult(np.ones(len(plan.sample.sampled_rows), dtype=np.int32), device_s=0.001)
        )
        return future


def test_isolated_rows_wait_for_the_blocks_of_generating_sequences() -> None:
    """Two rows free their blocks with their last chunk, sequences take the blocks, and then the step of that
    chunk fails."""
    rows, failed = [list(range(100, 145)), list(range(200, 244))], []

    def fails(number: int, plan: StepPlan) -> Exception | None:
        if failed or rows[0][-1] not in plan.token_ids:
            return None
        failed.append(number)
        return RuntimeError("this step fails")

    runner, pool = BothRunner(24, fails), BlockPool(24, BLOCK)
    core = EngineCore(
        runner,  # type: ignore[arg-type]
        Scheduler(Budget(16, 8, 10**9), Chunking(pool, 8), VectorCache(PLACES)),
        depth=2,
        clock=lambda: 1.0,
        share_identical=False,
        generation=GenerationScheduler(pool, GenerationLimits(6, 16, 16, 60, 10**6, prefix_caching=False)),
    )
    asked = [request(name, [row]) for name, row in zip("ab", rows, strict=True)]
    for each in asked:
        core.add(each)
    found: dict[str, PooledOutput | Failure] = {}
    for turn in range(600):
        if turn:  # both have started
            core.add(generation_request(f"g{turn}", [[7] * 9], 12))  # some sequences always wait
        for outcome in core.step():
            if isinstance(outcome, PooledOutput | Failure):
                found[outcome.id] = outcome
        if runner.in_flight and (not failed or turn % 8 == 0):
            runner.finish()
        if len(found) == len(asked):
            break
    assert failed
    check(found, asked, set())


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("failing", [1, 2, 4])
@pytest.mark.parametrize("prefixes", [False, True])
def test_a_real_model_gives_the_same_vectors_when_a_step_fails(
    folder: Path, depth: int, failing: int, prefixes: bool
) -> None:
    long, other = rows([150, 149], seed=3)
    asked = [
        (long, Task.EMBED),
        (other, Task.TOKEN_EMBED),
        (long[:100] + other[:30], Task.EMBED),
        (other[::-1], Task.EMBED),
    ]

    def submit(engine: Engine, submitted: Callable[[], None] = lambda: None) -> list[Array]:
        futures = []
        for number, (row, task) in enumerate(asked):
            made = request(f"r{number}", [row], task)
            futures.append(engine.local.engine.submit(made))
        submitted()
        return [future.result(timeout=PATIENCE_S).values for future in futures]

    with chunked(folder) as plain:
        wanted = submit(plain)
    options = {"enable_prefix_caching": prefixes, "long_prefill_token_threshold": 20}
    with chunked(folder, pipeline_depth=depth, **options) as engine:
        runner = engine.local.engine.core.runner
        run_step, steps = runner._run_on_cpu, iter(range(1000))
        gate = threading.Event()

        def fails(plan: StepPlan) -> StepResult:
            gate.wait(PATIENCE_S)
            if next(steps) == failing:
                raise RuntimeError("this step fails")
            return run_step(plan)

        runner._run_on_cpu = fails  # type: ignore[method-assign]

        def release_steps() -> None:
            wait_until(lambda: len(engine.local.engine.core.pending) == len(asked))
            gate.set()

        got = submit(engine, release_steps)
        for mine, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
        check_no_memory_is_held(engine)


TASKS = st.sampled_from([Task.EMBED, Task.EMBED, Task.TOKEN_EMBED, Task.SCORE])


@settings(max_examples=num_examples(400), deadline=None)
@given(
    calls=st.lists(
        st.tuples(TASKS, st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 2)),
        min_size=1,
        max_size=7,
    ),
    failing=st.sets(st.integers(0, 40), max_size=8),
    full=st.sets(st.integers(0, 40), max_size=3),
    poisoned=st.sets(st.integers(0, 6), max_size=2),
    cancelled=st.dictionaries(st.integers(0, 6), st.integers(1, 20), max_size=2),
    depth=st.integers(1, 4),
    blocks=st.integers(8, 30),
    prefixes=st.booleans(),
    chunked=st.booleans(),
)
def test_every_answer_is_right_whichever_steps_fail(
    calls: list[tuple[Task, list[int], int]],
    failing: set[int],
    full: set[int],
    poisoned: set[int],
    cancelled: dict[int, int],
    depth: int,
    blocks: int,
    prefixes: bool,
    chunked: bool,
) -> None:
    def fails(number: int, plan: StepPlan) -> Exception | None:
        bad = {f"r{i}" for i in poisoned} & {piece.request.id for piece in plan.slices}
        if bad or number in failing:
            return RuntimeError("this step fails")
        return DeviceOutOfMemory("no room") if number in full else None

    core, runner = make_core(fails, depth=depth, blocks=blocks, prefixes=prefixes, chunked=chunked)
    asked = []
    for i, (task, lengths, shared) in enumerate(calls):
        lengths = [max(1, length // 3) for length in lengths] if task is Task.SCORE else lengths
        rows = [
            [50 + shared] * (n // 2) + [1000 * i + 10 * r + k % 7 for k in range(n - n // 2)]
            for r, n in enumerate(lengths)
        ]
        if not chunked:
            rows = [row[:12] for row in rows]
        documents = [[i, k] for k in range(1 + len(lengths) // 2)]
        pairs = ints([k % len(lengths) for k in range(len(documents))]) if task is Task.SCORE else None
        asked.append(request(f"r{i}", rows + documents if pairs is not None else rows, task, pairs))
    for each in asked:
        core.add(each)
    gone: set[str] = set()

    def cancel_when_due(number: int, plan: StepPlan) -> Exception | None:
        for i, when in cancelled.items():
            if number == when and (name := f"r{i}") in core.pending:
                due.append(name)
        return fails(number, plan)

    due: list[str] = []
    runner.fails = cancel_when_due
    step = core.step

    def cancelling() -> list[object]:
        outcomes = step()
        for name in due:
            if name in core.pending and name not in {o.id for o in outcomes}:
                core.cancel(name)
                gone.add(name)
        due.clear()
        return list(outcomes)

    core.step = cancelling  # type: ignore[method-assign,assignment]
    found = run(core, runner)
    left = [each for each in asked if each.id not in gone]
    may_fail = runner.failed_alone | ({each.id for each in left} if full else set())
    check(found, left, may_fail)

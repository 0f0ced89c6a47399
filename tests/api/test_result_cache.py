"""The result cache: cached rows are answered with the same bytes and without the engine, others never are."""

from __future__ import annotations

import asyncio
import base64
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from penstock.api import cached_rows, result_cache
from penstock.api.app import build_app
from penstock.api.cached_rows import CachedRow, are_finite, decode_row, encode_row, fits, row_digests
from penstock.api.result_cache import (
    ENTRY_BYTES,
    CacheControl,
    MemoryStore,
    ResultCache,
    cache_control_of,
)
from penstock.api.state import ServerState
from penstock.errors import EngineError
from penstock.types import OutputDtype, PooledOutput, PoolingParams, Request, Task
from tests.api.local_app import CountingClient, local_app, local_state
from tests.api.loop_threads import LoopThreads
from tests.checkpoints import (
    write_bert,
    write_cross_encoder,
    write_late,
    write_m3,
    write_splade,
    write_token_classifier,
)
from tests.helpers import make_request
from tests.parity.labelled import write_gliclass, write_gliner

TEXTS = ["the long water", "people write many words", "oil", "find a word in time"]
CACHED = {"result_cache_mb": 8}


class RevisedClient(CountingClient):
    """An engine client that reports the revision of its model."""

    revision = "first"
    engine_settings: dict[str, Any] = {}
    error: Exception | None = None
    result: Callable[[PooledOutput], PooledOutput] = staticmethod(lambda output: output)

    async def run(self, request: Request) -> PooledOutput:
        if self.error is not None:
            self.requests.append(request)
            raise self.error
        return self.result(await super().run(request))


class Served:
    def __init__(self, state: ServerState, http: TestClient, engine: CountingClient) -> None:
        self.state = state
        self.http = http
        self.engine = engine

    def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[Any, int | None]:
        """The answer without its id and time stamp, and the number of rows from the cache."""
        answer = self.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        hits = answer.headers.get("x-cache-hits")
        content = answer.json()
        if isinstance(content, dict):
            content = {name: each for name, each in content.items() if name not in ("id", "created")}
        return content, None if hits is None else int(hits)

    def embed(self, *texts: str, **more: Any) -> tuple[Any, int | None]:
        headers = more.pop("headers", None)
        return self.post("/v1/embeddings", headers, input=texts, encoding_format="base64", **more)

    def rows_run(self) -> list[int]:
        """The number of rows in each request that reached the engine since the last call."""
        counts = [request.num_rows for request in self.engine.requests]
        self.engine.requests.clear()
        return counts

    @property
    def memory(self) -> MemoryStore:
        assert self.state.result_cache is not None and self.state.result_cache.memory is not None
        return self.state.result_cache.memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Served]:
    with (
        local_state(folder, client=RevisedClient, server=CACHED) as (state, engine),
        TestClient(build_app(state)) as http,
    ):
        yield Served(state, http, engine)


@pytest.fixture
def served(shared: Served) -> Served:
    """The application with an empty cache."""
    shared.state.result_cache = ResultCache.of(shared.state.config)
    shared.engine.revision, shared.engine.error = "first", None  # type: ignore[attr-defined]
    shared.engine.result = lambda output: output  # type: ignore[attr-defined]
    shared.engine.requests.clear()
    return shared


def vector_of(encoded: str) -> Any:
    return np.frombuffer(base64.b64decode(encoded), "<f4")


# --- cached answers -----------------------------------------------------------------------------------------


def test_a_repeated_request_gets_the_same_bytes_without_the_engine(served: Served) -> None:
    first, cold = served.embed(*TEXTS)
    assert cold == 0 and served.rows_run() == [4]
    again, warm = served.embed(*TEXTS)
    assert again == first and warm == 4 and served.rows_run() == []


def test_only_unknown_rows_run_and_rows_keep_their_order(served: Served) -> None:
    separate = [served.embed(text)[0]["data"][0]["embedding"] for text in TEXTS]
    served.state.result_cache = ResultCache.of(served.state.config)
    served.embed(TEXTS[1], TEXTS[3])
    served.rows_run()
    answer, hits = served.embed(*TEXTS)
    assert hits == 2 and served.rows_run() == [2]
    vectors = [vector_of(row["embedding"]) for row in answer["data"]]
    alone = [vector_of(encoded) for encoded in separate]
    np.testing.assert_allclose(vectors, alone, atol=1e-5)
    assert served.embed(*TEXTS) == (answer, 4)


def test_usage_counts_rows_from_the_cache_too(served: Served) -> None:
    first, _ = served.embed(*TEXTS)
    partial, hits = served.embed(*TEXTS, "see how they look")
    assert hits == 4 and partial["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    "other",
    [
        {"dimensions": 8},
        {"normalize": False},
        {"embed_dtype": "float16"},
        {"cache_salt": "mine"},
        {"truncate_prompt_tokens": 4},
        {"prompt": "query: "},
    ],
    ids=str,
)
def test_whatever_changes_an_answer_separates_entries(served: Served, other: dict[str, Any]) -> None:
    plain, _ = served.embed(*TEXTS)
    assert served.embed(*TEXTS, **other)[1] in (0, 1)  # one text has only four tokens
    changed, hits = served.embed(*TEXTS, **other)
    assert hits == 4
    assert served.embed(*TEXTS) == (plain, 4)
    assert (changed == plain) == ("cache_salt" in other)


def test_what_changes_no_answer_does_not_separate_entries(served: Served) -> None:
    served.embed(*TEXTS)
    assert served.embed(*TEXTS, priority=3, timeout=50, user="someone")[1] == 4
    assert served.post("/v1/embeddings", input=TEXTS, encoding_format="float")[1] == 4


def test_another_revision_of_the_model_never_sees_old_entries(served: Served) -> None:
    served.embed(*TEXTS)
    served.engine.revision = "second"  # type: ignore[attr-defined]
    assert served.embed(*TEXTS)[1] == 0
    served.engine.revision = "first"  # type: ignore[attr-defined]
    assert served.embed(*TEXTS)[1] == 4


def test_nothing_is_kept_for_a_model_of_unknown_revision(served: Served) -> None:
    served.engine.revision = ""  # type: ignore[attr-defined]
    assert [served.embed(*TEXTS)[1] for _ in range(2)] == [None, None]
    assert served.rows_run() == [4, 4] and len(served.memory) == 0


def test_a_model_that_is_replaced_while_its_rows_run_leaves_nothing_behind(served: Served) -> None:
    def replaced(output: PooledOutput) -> PooledOutput:
        served.engine.revision = "second"  # type: ignore[attr-defined]
        return output

    served.engine.result = replaced  # type: ignore[attr-defined]
    assert served.embed(*TEXTS)[1] == 0
    assert len(served.memory) == 0


def test_two_models_do_not_share_the_results_of_a_text(served: Served, tmp_path: Path) -> None:
    other = write_bert(tmp_path, config={"layer_norm_eps": 0.1})
    with local_state(other, client=RevisedClient) as (state, engine):
        model = state.models["model"]
        engine.revision = "other"  # type: ignore[attr-defined]
        served.state.models["other"] = model
        try:
            first, _ = served.embed(*TEXTS, model="model")
            second, hits = served.embed(*TEXTS, model="other")
            assert hits == 0 and second["data"] != first["data"]
            assert served.embed(*TEXTS, model="other") == (second, 4)
            assert served.embed(*TEXTS, model="model") == (first, 4)
        finally:
            del served.state.models["other"]
            model.text.close()


# --- Cache-Control headers ----------------------------------------------------------------------------------


def test_no_cache_computes_again_and_keeps_the_result(served: Served) -> None:
    fresh = {"Cache-Control": "no-cache"}
    assert [served.embed(*TEXTS, headers=fresh)[1] for _ in range(2)] == [0, 0]
    assert served.rows_run() == [4, 4]
    assert served.embed(*TEXTS)[1] == 4


def test_no_store_leaves_the_cache_alone(served: Served) -> None:
    assert served.embed(*TEXTS, headers={"Cache-Control": "private, No-Store"})[1] is None
    assert len(served.memory) == 0
    assert served.embed(*TEXTS)[1] == 0


@pytest.mark.parametrize(
    ("header", "meaning"),
    [
        (b"", CacheControl.DEFAULT),
        (b"max-age=60, no-transform", CacheControl.DEFAULT),
        (b"no-cache", CacheControl.NO_CACHE),
        (b"Max-Age=0", CacheControl.NO_CACHE),
        (b"no-cache , no-store", CacheControl.NO_STORE),
        (b"\xff\x00,,=", CacheControl.DEFAULT),
    ],
)
def test_a_cache_control_header_has_its_standard_meaning(header: bytes, meaning: CacheControl) -> None:
    assert cache_control_of(header) is meaning


def test_a_server_without_a_cache_has_none_of_it(folder: Path) -> None:
    with local_state(folder, client=RevisedClient) as (state, engine), TestClient(build_app(state)) as http:
        assert state.result_cache is None
        served = Served(state, http, engine)
        assert [served.embed(*TEXTS)[1] for _ in range(2)] == [None, None]
        assert served.rows_run() == [4, 4]


# --- failures -----------------------------------------------------------------------------------------------


def test_a_failure_is_not_kept(served: Served) -> None:
    served.engine.error = EngineError("lost")  # type: ignore[attr-defined]
    assert served.http.post("/v1/embeddings", json={"input": TEXTS}).status_code == 500
    assert len(served.memory) == 0
    served.engine.error = None  # type: ignore[attr-defined]
    assert served.embed(*TEXTS)[1] == 0


def test_known_rows_are_answered_while_the_engine_fails(served: Served) -> None:
    answer, _ = served.embed(*TEXTS)
    served.engine.error = EngineError("lost")  # type: ignore[attr-defined]
    assert served.embed(*TEXTS) == (answer, 4)


def test_a_result_that_is_not_finite_is_not_kept(served: Served) -> None:
    def spoiled(output: PooledOutput) -> PooledOutput:
        values = np.array(output.values)
        values[1, 0] = np.nan
        return replace(output, values=values)

    served.engine.result = spoiled  # type: ignore[attr-defined]
    served.embed(*TEXTS)
    assert len(served.memory) == 0


def test_a_cancelled_request_keeps_nothing(folder: Path) -> None:
    class Stuck:
        revision = "first"

        async def run(self, request: Request) -> PooledOutput:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    class Model:
        engine: Any = Stuck()
        spec: Any = type("Spec", (), {"name": "model"})
        adapter: Any = None

    class User:
        cache_control = CacheControl.DEFAULT
        num_cached_rows: int | None = None

    started = asyncio.Event()

    async def cancel() -> None:
        task = asyncio.ensure_future(
            cache.answer(User(), Model(), make_request("a", [3, 2]), result_cache.Scheduling())
        )
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    memory = MemoryStore(1 << 20)
    cache = ResultCache(memory, None)
    asyncio.run(cancel())
    assert len(memory) == 0


def test_an_output_larger_than_the_cache_is_not_taken_apart(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.embed(TEXTS[0])
    assert served.state.result_cache is not None
    monkeypatch.setattr(served.state.result_cache, "_max_kept_bytes", 100)
    monkeypatch.setattr(result_cache, "split_output", None)
    assert served.embed(*TEXTS[1:])[1] == 0
    assert len(served.memory) == 1 and served.memory.num_evicted == 0


def test_a_found_row_of_another_shape_is_computed_again(served: Served) -> None:
    """Possible only in a store that others write to."""
    answer, _ = served.embed(*TEXTS)
    assert served.state.result_cache is not None
    wrong = CachedRow((("<f4", (3,)),), (bytes(12),))
    entries = served.memory._entries
    for key in list(entries)[:2]:
        entries[key].row = wrong
    served.rows_run()
    assert served.embed(*TEXTS) == (answer, 0)
    assert served.rows_run() == [2, 4]
    assert served.embed(*TEXTS) == (answer, 4)


# --- every task ---------------------------------------------------------------------------------------------

PAIRS = {"text_1": TEXTS[0], "text_2": TEXTS[1:]}
LABELS = {"labels": ["water", "oil"]}
TASKS: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any], bool]] = {
    "embed": (write_bert, "/v1/embeddings", {"input": TEXTS}, True),
    "packed": (write_bert, "/v1/embeddings", {"input": TEXTS, "embed_dtype": "binary"}, True),
    "chunks": (
        write_bert,
        "/v1/embeddings",
        {"input": ["find the long water " * 40, TEXTS[0]], "chunking": "mean"},
        True,
    ),
    "token_embed": (write_bert, "/pooling", {"input": TEXTS, "task": "token_embed"}, True),
    "bi-encoder score": (write_bert, "/score", PAIRS, False),
    "sparse": (write_splade, "/pooling", {"input": TEXTS, "task": "sparse"}, True),
    "several tasks": (
        write_m3,
        "/pooling",
        {"input": TEXTS, "task": ["embed", "sparse", "token_embed"]},
        True,
    ),
    "lexical": (write_m3, "/pooling", {"input": TEXTS, "task": "sparse"}, True),
    "cross-encoder score": (write_cross_encoder, "/score", PAIRS, True),
    "rerank": (write_cross_encoder, "/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}, True),
    "classify": (lambda path: write_cross_encoder(path, labels=3), "/classify", {"input": TEXTS}, True),
    "late score": (write_late, "/score", PAIRS, False),
    "late vectors": (write_late, "/pooling", {"input": TEXTS, "task": "token_embed"}, True),
    "token classes": (write_token_classifier, "/v1/entities", {"input": TEXTS}, True),
    "entities": (lambda path: write_gliner(path).folder, "/v1/entities", {"input": TEXTS} | LABELS, True),
    "zero-shot": (
        lambda path: write_gliclass(path, prompt_first=True).folder,
        "/v1/zero-shot",
        {"input": TEXTS} | LABELS,
        True,
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_every_task_answers_with_the_cache_as_without(name: str, tmp_path: Path) -> None:
    write, path, body, is_cached = TASKS[name]
    folder = write(tmp_path)
    with local_state(folder, client=RevisedClient, server=CACHED) as (state, engine):
        cache, state.result_cache = state.result_cache, None
        with TestClient(build_app(state)) as http:
            served = Served(state, http, engine)
            plain, _ = served.post(path, **body)
            state.result_cache = cache
            assert served.post(path, **body)[0] == plain
            served.rows_run()
            warm, hits = served.post(path, **body)
    assert warm == plain
    assert (served.rows_run() == []) == is_cached
    assert bool(hits) == is_cached


def test_rows_of_tokens_are_put_together_in_order(served: Served) -> None:
    whole, _ = served.post("/pooling", input=TEXTS, task="token_embed", encoding_format="base64")
    served.state.result_cache = ResultCache.of(served.state.config)
    served.post("/pooling", input=[TEXTS[3], TEXTS[1]], task="token_embed")
    served.rows_run()
    mixed, hits = served.post("/pooling", input=TEXTS, task="token_embed")
    assert hits == 2 and served.rows_run() == [2]
    plain, _ = served.post("/pooling", {"Cache-Control": "no-store"}, input=TEXTS, task="token_embed")
    for got, wanted in zip(mixed["data"], plain["data"], strict=True):
        np.testing.assert_allclose(got["data"], wanted["data"], atol=1e-5)
    assert len(whole["data"]) == 4


def test_scores_of_two_rows_are_not_kept(served: Served) -> None:
    assert served.post("/score", text_1=TEXTS[0], text_2=TEXTS[1:])[1] is None
    assert len(served.memory) == 0


# --- keys ---------------------------------------------------------------------------------------------------


def test_a_row_has_the_same_key_alone_as_among_others() -> None:
    together = make_request("all", [4, 1, 7])
    alone = make_request("one", [7], first_token=6)
    assert row_digests(alone) == row_digests(together)[2:]


@pytest.mark.parametrize(
    "params",
    [
        PoolingParams(Task.TOKEN_EMBED),
        PoolingParams(dimensions=4),
        PoolingParams(normalize=True),
        PoolingParams(normalize=False),
        PoolingParams(dtype=OutputDtype.INT8),
        PoolingParams(Task.SPARSE, top_k=3),
        PoolingParams(Task.SPARSE, lexical=True),
        PoolingParams(Task.SCORE, listwise=True),
        PoolingParams(Task.ENTITIES, num_labels=2),
    ],
    ids=str,
)
def test_every_parameter_is_part_of_the_key(params: PoolingParams) -> None:
    plain, other = make_request("a", [4]), make_request("b", [4], params=params)
    assert row_digests(plain) != row_digests(other)
    plain.extra_params = (params,)
    assert row_digests(plain) != row_digests(make_request("c", [4]))


def test_a_secret_changes_every_key() -> None:
    request = make_request("a", [4, 2])
    assert not set(row_digests(request)) & set(row_digests(request, b"secret"))


def test_the_rows_of_large_requests_are_hashed_off_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = LoopThreads(monkeypatch)
    for owner, name in ((result_cache, "row_digests"), (result_cache, "split_output")):
        threads.watch(owner, name)
    served.embed("water")
    assert threads.ran_on_loop("row_digests") == threads.ran_on_loop("split_output") == {True}
    monkeypatch.setattr(result_cache, "MAX_LOOP_ROWS", 1)
    served.embed(*TEXTS * 3)
    assert threads.ran_on_loop("row_digests") == threads.ran_on_loop("split_output") == {False}


# --- the in-memory store ------------------------------------------------------------------------------------


def row_of(size: int, byte: int = 0) -> CachedRow:
    return CachedRow((("|u1", (size,)),), (bytes([byte]) * size,))


def test_the_least_recently_used_rows_leave_first() -> None:
    store = MemoryStore(3 * (10 + ENTRY_BYTES))
    store.put([b"a", b"b", b"c"], [row_of(10)] * 3)
    store.get([b"a"])
    store.put([b"d"], [row_of(10)])
    assert [row is not None for row in store.get([b"a", b"b", b"c", b"d"])] == [True, False, True, True]
    assert store.num_evicted == 1


def test_a_row_larger_than_the_store_is_not_kept_and_evicts_nothing() -> None:
    store = MemoryStore(1000)
    store.put([b"a"], [row_of(10)])
    store.put([b"b"], [row_of(1000)])
    assert store.get([b"a", b"b"])[1] is None and len(store) == 1 and store.num_evicted == 0


def test_rows_expire() -> None:
    now_s = 0.0
    store = MemoryStore(10_000, ttl_s=10, clock=lambda: now_s)
    store.put([b"a"], [row_of(10)])
    now_s = 9.9
    assert store.get([b"a"]) == [row_of(10)]
    now_s = 10.0
    assert store.get([b"a"]) == [None] and store.num_bytes == len(store) == 0


OPERATIONS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 400), st.integers(0, 255)), max_size=60
)


@given(OPERATIONS)
def test_the_store_behaves_like_a_list_in_order_of_use(operations: list[tuple[bool, int, int, int]]) -> None:
    limit = 5 * ENTRY_BYTES
    store, model = MemoryStore(limit), {}
    for is_put, number, size, byte in operations:
        key = bytes([number])
        if is_put:
            store.put([key], [row_of(size, byte)])
            model.pop(key, None)
            model[key] = row_of(size, byte)
            while sum(row.num_bytes + ENTRY_BYTES for row in model.values()) > limit:
                del model[next(iter(model))]
        else:
            found = model.get(key)
            assert store.get([key]) == [found]
            if found is not None:
                model[key] = model.pop(key)
        assert len(store) == len(model)
        assert store.num_bytes == sum(row.num_bytes + ENTRY_BYTES for row in model.values()) <= limit


def test_entries_take_no_more_memory_than_they_are_counted_for() -> None:
    request, store = make_request("a", [1] * 2000), MemoryStore(1 << 30)
    values = np.zeros((2000, 32), dtype=np.float32)
    tracemalloc.start()
    try:
        rows = cached_rows.split_output(request, PooledOutput("a", values, result_cache.Timings()))
        assert rows is not None
        store.put([b"%064d" % number for number in range(2000)], rows)
        del rows
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used <= store.num_bytes


# --- rows as bytes ------------------------------------------------------------------------------------------

ROW = CachedRow((("<f4", (2,)), ("|i1", (1,))), (bytes(8), b"\1"))


def test_a_row_survives_being_written_and_read() -> None:
    assert decode_row(encode_row(ROW, b"key", b"secret"), b"key", b"secret") == ROW


@given(st.binary(max_size=80))
def test_no_bytes_make_reading_fail(stored: bytes) -> None:
    assert decode_row(stored, b"key") is None
    content = encode_row(ROW, b"key")[16:]
    for damaged in (stored, content[: len(stored)], content + stored[:1] + b"\0"):
        assert decode_row(cached_rows._code(b"key", damaged, b"") + damaged, b"key") in (None, ROW)


def test_a_row_of_another_key_or_secret_or_format_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = encode_row(ROW, b"key", b"secret")
    assert decode_row(stored, b"other", b"secret") is None
    assert decode_row(stored, b"key", b"guess") is None
    assert decode_row(stored[:-1], b"key", b"secret") is None
    monkeypatch.setattr(cached_rows, "_FORMAT", 2)
    assert decode_row(stored, b"key", b"secret") is None


@pytest.mark.parametrize(
    ("layout", "part", "does_fit"),
    [
        (("<f4", (2,)), np.array([1, 2], "<f4").tobytes(), True),
        (("<f4", (3,)), np.array([1, 2, 3], "<f4").tobytes(), False),  # the model has 2 dimensions
        (("<f4", (2,)), b"1234", False),  # too short
        (("<f2", (2,)), np.array([1, 2], "<f2").tobytes(), False),  # not the requested dtype
        (("|O", (1,)), bytes(8), False),
        (("<f4", (-1, -2)), bytes(8), False),
        (("<f4", (2, 1, 1)), bytes(8), False),
    ],
)
def test_only_rows_that_can_be_results_are_accepted(
    layout: tuple[str, tuple[int, ...]], part: bytes, does_fit: bool
) -> None:
    assert fits(CachedRow((layout,), (part,)), (PoolingParams(),), 5, embed_dim=2) is does_fit


def test_rows_with_values_that_are_not_finite_are_told_apart() -> None:
    rows = [CachedRow((("<f4", (1,)),), (np.array([value], "<f4").tobytes(),)) for value in (1, 2, np.nan)]
    assert are_finite(rows[:2]) and not are_finite(rows)
    assert are_finite([CachedRow((("<u2", (1,)),), (b"\xff\xff",))])


def test_a_row_of_tokens_has_a_value_for_each_token() -> None:
    row = CachedRow((("<f4", (2,)),), (bytes(5 * 8),))
    params = (PoolingParams(Task.TOKEN_EMBED),)
    assert fits(row, params, 5, embed_dim=2) and not fits(row, params, 4, embed_dim=2)
    assert not fits(row, params * 2, 5, embed_dim=2)


def test_metrics_count_lookups_and_hits(served: Served) -> None:
    def value(name: str) -> float:
        lines, start = served.http.get("/metrics").text.splitlines(), f"penstock_result_cache_{name}"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(start))

    lookups, hits = value("lookups_total"), value("hits_total")
    served.embed(*TEXTS)
    served.embed(*TEXTS[:3])
    assert value("lookups_total") - lookups == 7 and value("hits_total") - hits == 3
    assert value("bytes") == served.memory.num_bytes > 0


def test_a_cache_is_made_only_where_it_is_configured(folder: Path) -> None:
    with local_app(folder, server={"result_cache_ttl_s": 5.0}) as (http, _):
        assert "x-cache-hits" not in http.post("/v1/embeddings", json={"input": "water"}).headers


def test_kept_rows_are_nothing_that_the_garbage_collector_has_to_visit() -> None:
    """A process freezes its heap before it serves; cache entries must not make collections longer."""
    store = MemoryStore(1 << 20)
    store.put([b"a"], [row_of(10)])
    (entry,) = store._entries.values()
    assert not gc.is_tracked(entry) and not gc.is_tracked(entry.row)

"""How requests of every dialect choose a LoRA adapter, and which choices are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from penstock import Engine, SamplingParams
from penstock.api.adapters import ServedAdapter, updated
from penstock.api.app import build_app
from penstock.api.keys import ApiKey
from penstock.api.state import ServerState
from penstock.config import ServerConfig
from penstock.errors import AdapterNotFound, BadValue
from penstock.handle import StreamListener, Unsubscribe
from penstock.serving.launch import AdapterLaunch
from penstock.types import PooledOutput, Request
from tests.api.local_app import WholeClient, local_state
from tests.checkpoints import write_cross_encoder, write_splade, write_token_classifier
from tests.lora_models import TEXTS, Adapted, adapted_embedder, adapted_llama, adapted_reranker
from tests.waiting import PATIENCE_S

TENANT = AdapterLaunch(0, "tenant", "/adapters/tenant", "digest", "/adapters/tenant")


class Recorder(WholeClient):
    """An engine that records every request, and runs requests for adapters on the base model."""

    async def run(self, request: Request) -> PooledOutput:
        self.requests.append(request)
        return await self.engine.run(_plain(request))

    def stream(self, request: Request, listener: StreamListener) -> Unsubscribe:
        self.requests.append(request)
        return self.engine.stream(_plain(request), listener)


def _plain(request: Request) -> Request:
    found = Request.__new__(Request)
    for name in Request.__dataclass_fields__:
        setattr(found, name, getattr(request, name))
    found.adapters = None
    return found


@contextmanager
def app(folder: Path, **options: Any) -> Iterator[tuple[TestClient, Recorder, ServerState]]:
    with local_state(folder, client=Recorder, **options) as (state, local):
        (model,) = state.models.values()
        model.takes_adapters, model.adapters = True, {"tenant": ServedAdapter(TENANT)}
        assert isinstance(local, Recorder)
        with TestClient(build_app(state)) as http:
            yield http, local, state


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Recorder, ServerState]]:
    folder = tmp_path_factory.mktemp("embedder")
    with app(adapted_embedder(folder).base) as started:
        yield started


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "cross": write_cross_encoder(folder / "cross", labels=3),
        "rank": write_cross_encoder(folder / "rank"),
        "sparse": write_splade(folder / "sparse"),
        "tokens": write_token_classifier(folder / "tokens"),
        "text": adapted_llama(folder / "text").base,
    }


MESSAGES = [{"role": "user", "content": "Hello"}]
PAIR = {"query": TEXTS[0], "documents": TEXTS}
EMBED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": TEXTS}),
    ("/v1/embeddings", {"input": TEXTS, "chunking": "mean"}),
    ("/v1/embeddings", {"input": TEXTS, "task": "x"}),  # Jina's body; the model has no tasks
    ("/v1/embeddings", {"input": TEXTS, "output_dtype": "int8"}),  # Voyage's body
    ("/pooling", {"input": TEXTS, "task": "token_embed"}),
    ("/embed", {"inputs": TEXTS}),
    ("/embed_all", {"inputs": TEXTS}),
    ("/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}),
    ("/v2/embed", {"texts": TEXTS, "input_type": "search_query", "embedding_types": ["float", "int8"]}),
    ("/v1/embed", {"texts": TEXTS}),
    ("/api/embed", {"input": TEXTS}),
    ("/api/embeddings", {"prompt": TEXTS[0]}),
    ("/v1/contextualizedembeddings", {"inputs": [TEXTS]}),
    ("/v1/multimodalembeddings", {"inputs": [{"content": [{"type": "text", "text": "x"}]}]}),
    ("/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
    ("/v1/score", {"queries": TEXTS[0], "documents": TEXTS}),
    ("/v1/rerank", PAIR),
    ("/v2/rerank", PAIR),
    ("/rerank", PAIR),
    ("/rerank", {"query": TEXTS[0], "texts": TEXTS}),  # TEI's body
    ("/api/rerank", PAIR),
    ("/", {"inputs": TEXTS[0]}),
    ("/models/tenant", {"inputs": TEXTS[0]}),
    ("/invocations", {"input": TEXTS}),
]
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("rank", "/v1/rerank", PAIR),
    ("rank", "/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
    ("cross", "/classify", {"input": TEXTS}),
    ("cross", "/predict", {"inputs": TEXTS[0]}),
    ("cross", "/", {"inputs": TEXTS[0], "parameters": {"top_k": 1}}),
    ("sparse", "/embed_sparse", {"inputs": TEXTS}),
    ("sparse", "/v1/sparse", {"input": TEXTS}),
    ("tokens", "/v1/entities", {"input": TEXTS}),
    ("text", "/v1/completions", {"prompt": "Hello", "max_tokens": 2}),
    ("text", "/v1/completions", {"prompt": "Hello", "max_tokens": 2, "stream": True}),
    ("text", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("text", "/api/chat", {"messages": MESSAGES, "options": {"num_predict": 2}, "stream": False}),
    ("text", "/api/generate", {"prompt": "Hello", "options": {"num_predict": 2}, "stream": False}),
    ("text", "/v2/chat", {"messages": MESSAGES, "max_tokens": 2}),
    ("text", "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}),
]


def check_adapter(http: TestClient, local: Recorder, path: str, body: dict[str, Any]) -> None:
    """Check that every engine request of a body carries the adapter, however the body names it."""
    for chosen in ({"model": "tenant"}, {"model": "model:tenant"}, {"adapter": "tenant"}):
        local.requests.clear()
        answer = http.post(path, json={**body, **chosen})
        assert answer.status_code == 200, (path, chosen, answer.text)
        assert local.requests
        for request in local.requests:
            assert request.adapters is not None and set(request.adapters.tolist()) == {TENANT.id}
            assert len(request.adapters) == request.num_rows
    local.requests.clear()
    if "tenant" not in path:
        assert http.post(path, json=body).status_code == 200
        assert all(request.adapters is None for request in local.requests)


@pytest.mark.parametrize(("path", "body"), EMBED, ids=[f"{path} {i}" for i, (path, _) in enumerate(EMBED)])
def test_every_route_of_an_embedder_takes_an_adapter(
    embedder: tuple[TestClient, Recorder, ServerState], path: str, body: dict[str, Any]
) -> None:
    http, local, _ = embedder
    if body.get("task") == "x":
        answer = http.post(path, json={**body, "model": "tenant"})
        assert answer.status_code == 400 and "leave task out" in answer.text
        return
    check_adapter(http, local, path, body)


@pytest.mark.parametrize("kind", ["rank", "cross", "sparse", "tokens", "text"])
def test_every_route_of_other_models_takes_an_adapter(folders: dict[str, Path], kind: str) -> None:
    with app(folders[kind]) as (http, local, _):
        for owner, path, body in OTHERS:
            if owner == kind:
                check_adapter(http, local, path, body)
        if kind == "text":
            parameters = {"max_new_tokens": 2, "adapter_id": "tenant"}
            local.requests.clear()
            http.post("/generate", json={"inputs": "Hello", "parameters": parameters})
            assert [request.adapters is not None for request in local.requests] == [True]


def test_instances_of_one_request_may_choose_different_adapters(
    embedder: tuple[TestClient, Recorder, ServerState],
) -> None:
    http, local, _ = embedder
    local.requests.clear()
    instances = [{"inputs": TEXTS[0], "model": "tenant"}, {"inputs": TEXTS[1]}]
    assert http.post("/vertex", json={"instances": instances}).status_code == 200
    chosen = [None if each.adapters is None else each.adapters.tolist() for each in local.requests]
    assert sorted(map(str, chosen)) == ["None", "[0]"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/embed", {"inputs": "x"}),
        ("/v2/embed", {"texts": ["x"], "input_type": "search_query", "embedding_types": ["float"]}),
        ("/api/embed", {"input": "x"}),
        ("/v1/rerank", PAIR),
        ("/pooling", {"input": "x"}),
    ],
)
def test_an_adapter_that_is_not_loaded_is_a_404_that_names_those_that_are(
    embedder: tuple[TestClient, Recorder, ServerState], path: str, body: dict[str, Any]
) -> None:
    http, _, _ = embedder
    for chosen in ({"adapter": "other"}, {"model": "model:other"}):
        answer = http.post(path, json={**body, **chosen})
        expected = 400 if path == "/v1/rerank/cohere" else 404
        assert answer.status_code == expected, answer.text
        assert "'other' is not loaded; model model has: tenant" in answer.text


def test_a_name_and_a_field_that_contradict_each_other_are_refused(
    embedder: tuple[TestClient, Recorder, ServerState],
) -> None:
    http, _, state = embedder
    (model,) = state.models.values()
    model.adapters = {
        **model.adapters,
        "second": ServedAdapter(msgspec.structs.replace(TENANT, id=1, name="second")),
    }
    try:
        answer = http.post("/v1/embeddings", json={"input": "x", "model": "tenant", "adapter": "second"})
        assert answer.status_code == 400 and "leave one out" in answer.text
    finally:
        del model.adapters["second"]


def test_a_prompt_may_follow_a_model_or_an_adapter(
    embedder: tuple[TestClient, Recorder, ServerState],
) -> None:
    http, local, _ = embedder
    for name, has_adapter in (
        ("model:query", False),
        ("tenant:query", True),
        ("model:tenant:query", True),
        ("model:latest", False),
        ("tenant:latest", True),
    ):
        local.requests.clear()
        answer = http.post("/v1/embeddings", json={"input": "x", "model": name})
        assert answer.status_code == 200, answer.text
        assert (local.requests[0].adapters is not None) is has_adapter
    for name in ("tenant:query:query", "model:tenant:tenant", "tenant:model", ":tenant", "a:" * 5000):
        assert http.post("/v1/embeddings", json={"input": "x", "model": name}).status_code == 404


def test_a_model_that_takes_no_adapters_says_which_flag_it_needs(
    embedder: tuple[TestClient, Recorder, ServerState],
) -> None:
    http, _, state = embedder
    (model,) = state.models.values()
    adapters, model.adapters, model.takes_adapters = model.adapters, {}, False
    try:
        answer = http.post("/v1/embeddings", json={"input": "x", "adapter": "tenant"})
        assert answer.status_code == 422 and "--enable-lora" in answer.text
    finally:
        model.adapters, model.takes_adapters = adapters, True


def test_an_adapter_that_two_models_have_needs_the_name_of_one(
    embedder: tuple[TestClient, Recorder, ServerState],
) -> None:
    _, _, state = embedder
    (model,) = state.models.values()
    both = ServerState(ServerConfig(), {"one": model, "two": model})
    with pytest.raises(BadValue, match="several models have an adapter 'tenant'"):
        both.find("tenant")
    assert both.find("one:tenant").model.adapter is model.adapters["tenant"]
    with pytest.raises(AdapterNotFound):
        both.find("one:other")


def test_a_key_for_an_adapter_allows_it_alone(embedder: tuple[TestClient, Recorder, ServerState]) -> None:
    from penstock.api.call import Call
    from penstock.api.metrics import ApiMetrics
    from penstock.errors import ModelNotAllowed

    _, _, state = embedder
    body = msgspec.defstruct("Body", [("model", str | None, None), ("adapter", str | None, None)])
    for name in ("tenant", "model:tenant"):
        call = Call(state, ApiMetrics(), 0.0)
        call.key = ApiKey("k", models=frozenset({name}))
        for allowed in (
            body(model="tenant"),
            body(model="model:tenant"),
            body(model="model", adapter="tenant"),
        ):
            assert call.model(allowed).name == "tenant"
        with pytest.raises(ModelNotAllowed):
            call.model(body(model="model"))
        with pytest.raises(ModelNotAllowed, match=r"its models are: tenant$"):
            call.model(body(model="model", adapter="other"))
        assert call.names == ["tenant"]
        call.release_adapters()
    refusals = []
    call.key = ApiKey("k", models=frozenset({"other"}))
    for name in ("tenant", "nobody"):  # an adapter that exists, and one that does not
        with pytest.raises(ModelNotAllowed) as raised:
            call.model(body(model=name))
        refusals.append(raised.value.message.replace(name, "NAME"))
    assert refusals[0] == refusals[1]
    call.key = ApiKey("k", models=frozenset({"model"}))
    assert call.model(body(model="tenant")).name == "tenant"
    call.release_adapters()


def test_an_adapter_is_kept_until_its_last_request_is_done() -> None:
    unused: list[int] = []
    adapter = ServedAdapter(TENANT)
    adapter.enter()
    adapter.enter()
    assert updated({"tenant": adapter}, [], lambda gone: unused.append(gone.id)) == {}
    adapter.leave()
    assert unused == []
    adapter.leave()
    assert unused == [TENANT.id]


def test_a_table_with_the_same_adapter_keeps_its_count() -> None:
    adapter = ServedAdapter(TENANT)
    adapter.enter()
    unused: list[int] = []
    newer = msgspec.structs.replace(TENANT, id=5)
    kept = updated({"tenant": adapter}, [TENANT], lambda gone: unused.append(gone.id))
    assert kept == {"tenant": adapter} and unused == []
    replaced = updated(kept, [newer], lambda gone: unused.append(gone.id))
    assert replaced["tenant"].id == 5 and unused == [], "a request uses the old one"
    adapter.leave()
    assert unused == [TENANT.id]


def test_results_of_adapters_are_cached_apart(tmp_path: Path) -> None:
    made: Adapted = adapted_embedder(tmp_path)
    with app(made.base, server={"result_cache_mb": 4}) as (http, local, state):
        local.revision = "loaded"  # type: ignore[attr-defined]
        (model,) = state.models.values()

        def hits(**body: Any) -> str:
            return str(http.post("/v1/embeddings", json={"input": "x", **body}).headers["x-cache-hits"])

        assert [hits(), hits()] == ["0", "1"]
        assert [hits(adapter="tenant"), hits(adapter="tenant"), hits()] == ["0", "1", "1"]
        model.adapters = {"tenant": ServedAdapter(msgspec.structs.replace(TENANT, digest="other"))}
        assert hits(adapter="tenant") == "0", "other content"
        model.adapters = {"tenant": ServedAdapter(msgspec.structs.replace(TENANT, id=9, digest="other"))}
        assert hits(adapter="tenant") == "0", "loaded again"


def test_models_list_adapters_with_their_parent(embedder: tuple[TestClient, Recorder, ServerState]) -> None:
    http, _, _ = embedder
    listed = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
    assert listed["tenant"]["parent"] == "model" and listed["tenant"]["root"] == TENANT.path
    assert listed["model"]["parent"] is None and listed["model"]["adapters"] == ["tenant"]
    assert "tenant" in http.get("/api/tags").text
    assert http.get("/metrics").text.count("penstock_lora_requests_in_flight")


@contextmanager
def adapted_app(made: Adapted) -> Iterator[TestClient]:
    """The application with a real engine that has the adapter."""
    with local_state(made.base, client=WholeClient, enable_lora=True) as (state, local):
        local.engine.load_adapter(0, str(made.adapters["tenant"]), "tenant").result(PATIENCE_S)
        (model,) = state.models.values()
        model.takes_adapters, model.adapters = True, {"tenant": ServedAdapter(TENANT)}
        with TestClient(build_app(state)) as http:
            yield http


def test_text_and_ranks_of_an_adapter_are_those_of_the_merged_checkpoint(tmp_path: Path) -> None:
    reranker = adapted_reranker(tmp_path / "rank", "tenant")
    with adapted_app(reranker) as http, Engine(str(reranker.merged["tenant"]), device="cpu") as merged:
        rows = http.post("/v1/rerank", json={**PAIR, "model": "tenant"}).json()["results"]
        expected = merged.rerank(TEXTS[0], TEXTS)
    assert [row["index"] for row in rows] == [each.index for each in expected]
    scores = [row["relevance_score"] for row in rows]
    assert scores == pytest.approx([each.score for each in expected], abs=1e-4)
    writer = adapted_llama(tmp_path / "text", "tenant")
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with adapted_app(writer) as http, Engine(str(writer.merged["tenant"]), device="cpu") as merged:
        text = http.post("/v1/completions", json={**body, "model": "tenant"}).json()
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (wanted,) = merged.generate("Hello", greedy)
    assert text["choices"][0]["text"] == wanted.text and text["model"] == "tenant"

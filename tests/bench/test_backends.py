from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.bench.backends import BACKENDS, fitting_backends
from penstock.bench.datasets.item import Item
from penstock.bench.options import BackendName, BodyOptions, DataOptions, DatasetName, ServerOptions
from penstock.bench.prepare import prepare, send_trial_request
from penstock.bench.selftest import null_body
from penstock.bench.target import target_of
from penstock.errors import BadValue
from tests.bench.stub import Stub, stub

RANKING = Item(["d", "e"], rows=2, query="q")
TEXT = Item("t", output_tokens=5)
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("name", "item", "body"),
    [
        ("openai-embeddings", TEXT, {"model": "m", "input": "t", "truncate_prompt_tokens": -1}),
        (
            "openai-embeddings-chat",
            TEXT,
            {"model": "m", "messages": [{"role": "user", "content": "t"}], "truncate_prompt_tokens": -1},
        ),
        ("vllm-pooling", TEXT, {"model": "m", "input": "t", "truncate_prompt_tokens": -1}),
        (
            "vllm-pooling",
            Item({"input": "t", "task": "embed"}),
            {"model": "m", "input": "t", "task": "embed", "truncate_prompt_tokens": -1},
        ),
        (
            "vllm-rerank",
            RANKING,
            {"model": "m", "query": "q", "documents": ["d", "e"], "truncate_prompt_tokens": -1},
        ),
        ("cohere-rerank", RANKING, {"model": "m", "query": "q", "documents": ["d", "e"]}),
        ("infinity-rerank", RANKING, {"model": "m", "query": "q", "documents": ["d", "e"]}),
        (
            "vllm-score",
            RANKING,
            {"model": "m", "text_1": "q", "text_2": ["d", "e"], "truncate_prompt_tokens": -1},
        ),
        ("vllm-classify", TEXT, {"model": "m", "input": "t", "truncate_prompt_tokens": -1}),
        (
            "cohere-embed",
            TEXT,
            {
                "model": "m",
                "texts": ["t"],
                "input_type": "search_document",
                "embedding_types": ["float"],
                "truncate": "END",
            },
        ),
        ("ollama-embed", TEXT, {"model": "m", "input": ["t"], "truncate": True}),
        ("tei-predict", Item(["t", "u"], rows=2), {"inputs": [["t"], ["u"]], "truncate": True}),
        ("tei", TEXT, {"inputs": "t", "truncate": True}),
        ("tei", RANKING, {"query": "q", "texts": ["d", "e"], "truncate": True}),
        ("infinity-embeddings", TEXT, {"model": "m", "input": "t"}),
        ("openai", TEXT, {"model": "m", "prompt": "t", "max_tokens": 5, **STREAMED}),
        (
            "openai-chat",
            TEXT,
            {
                "model": "m",
                "messages": [{"role": "user", "content": "t"}],
                "max_completion_tokens": 5,
                **STREAMED,
            },
        ),
    ],
)
def test_each_backend_builds_its_body(name: str, item: Item, body: dict[str, Any]) -> None:
    assert BACKENDS[BackendName(name)].make(item, "m") == body


@pytest.mark.parametrize("name", ["vllm-rerank", "cohere-rerank", "infinity-rerank", "vllm-score"])
def test_ranking_without_documents_is_refused(name: str) -> None:
    with pytest.raises(BadValue, match="random-rerank"):
        BACKENDS[BackendName(name)].make(TEXT, "m")


@pytest.mark.parametrize("name", ["openai-embeddings", "vllm-pooling", "openai", "openai-chat"])
def test_other_backends_refuse_documents_to_rank(name: str) -> None:
    with pytest.raises(BadValue, match="rerank"):
        BACKENDS[BackendName(name)].make(RANKING, "m")


@pytest.mark.parametrize("name", ["cohere-embed", "ollama-embed", "tei-predict"])
def test_backends_of_texts_refuse_token_ids(name: str) -> None:
    with pytest.raises(BadValue, match="prompts that are texts"):
        BACKENDS[BackendName(name)].make(Item([1, 2]), "m")


@pytest.mark.parametrize(
    ("name", "tasks", "proposed"),
    [
        ("openai", ["embed", "score"], ["openai-embeddings", "vllm-rerank"]),
        ("vllm-classify", ["generate", "embed"], ["openai-embeddings", "openai"]),
        ("openai-embeddings", ["token_classify"], ["vllm-pooling"]),
        ("openai-embeddings", ["embed"], []),
    ],
)
def test_a_backend_that_fits_is_proposed(name: str, tasks: list[str], proposed: list[str]) -> None:
    assert fitting_backends(BackendName(name), tasks) == proposed


@pytest.mark.parametrize("name", BACKENDS)
def test_the_self_test_answers_as_every_backend_expects(name: BackendName) -> None:
    backend = BACKENDS[name]
    if backend.generates:
        return
    is_ranking = backend.tasks == frozenset({"score"})
    item = RANKING if is_ranking else Item(["t", "u"], rows=2)
    (answer,) = null_body(name, backend, item)
    assert backend.missing(orjson.loads(answer), item) is None


def prepared(server: Stub, prompts: Path, body: BodyOptions | None = None, **fields: Any) -> Any:
    data = DataOptions(
        dataset_name=DatasetName.CUSTOM, dataset_path=str(prompts), num_prompts=3, skip_chat_template=True
    )
    return prepare(ServerOptions(base_url=server.url, **fields), data, body or BodyOptions())


@pytest.mark.parametrize(
    "name",
    ["openai-embeddings", "openai-embeddings-chat", "tei", "infinity-embeddings", "openai", "openai-chat"],
)
def test_each_backend_gets_a_response(name: str, server: Stub, prompts: Path) -> None:
    send_trial_request(prepared(server, prompts, backend=BackendName(name)), 10.0)
    assert server.bodies[0][0] == BACKENDS[BackendName(name)].endpoint


def test_the_server_is_asked_for_its_model(server: Stub, prompts: Path) -> None:
    load = prepared(server, prompts, backend=BackendName.OPENAI_EMBEDDINGS)
    assert load.model == "stub-model"


def test_extra_fields_and_sampling_go_into_the_body(server: Stub, prompts: Path) -> None:
    body = BodyOptions(extra_body='{"user": "u"}', temperature=0.5, top_k=3, ignore_eos=True)
    load = prepared(server, prompts, body, backend=BackendName.OPENAI)
    sent = orjson.loads(load.bodies[0])
    assert {key: sent[key] for key in ("user", "temperature", "top_k", "ignore_eos")} == {
        "user": "u",
        "temperature": 0.5,
        "top_k": 3,
        "ignore_eos": True,
    }
    with pytest.raises(BadValue, match="only with --backend openai"):
        prepared(server, prompts, body, backend=BackendName.OPENAI_EMBEDDINGS)
    with pytest.raises(BadValue, match="--extra-body"):
        prepared(server, prompts, BodyOptions(extra_body="[]"), backend=BackendName.OPENAI)


def test_headers_and_the_key_are_sent(server: Stub, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    send_trial_request(
        prepared(server, prompts, backend=BackendName.OPENAI_EMBEDDINGS, header=["x-a=1", "x-b=2=3"]), 10.0
    )
    sent = {name.lower(): value for name, value in server.headers[-1].items()}
    assert (sent["x-a"], sent["x-b"], sent["authorization"]) == ("1", "2=3", "Bearer secret")
    with pytest.raises(BadValue, match="KEY=VALUE"):
        target_of(ServerOptions(header=["nothing"]))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(BadValue, match="is not a URL"):
        target_of(ServerOptions(base_url=url))


def test_a_base_url_may_have_a_path() -> None:
    target = target_of(ServerOptions(base_url="http://127.0.0.1:81/prefix/"))
    assert target.message("POST", "/v1/embeddings", b"{}").startswith(
        b"POST /prefix/v1/embeddings HTTP/1.1\r\n"
    )
    assert target.base_url == "http://127.0.0.1:81/prefix"


def test_the_error_names_a_wrong_endpoint(server: Stub, prompts: Path) -> None:
    load = prepared(server, prompts, backend=BackendName.OPENAI_EMBEDDINGS, endpoint="/v1/embedding")
    with pytest.raises(BadValue, match=r"404.*no route /v1/embedding.*are --backend and --endpoint right"):
        send_trial_request(load, 10.0)
    with pytest.raises(BadValue, match="must begin with /"):
        prepared(server, prompts, endpoint="v1/embeddings")


def test_an_endpoint_of_another_kind_is_refused(server: Stub, prompts: Path) -> None:
    load = prepared(server, prompts, backend=BackendName.OPENAI, endpoint="/v1/embeddings")
    with pytest.raises(BadValue, match="--backend openai"):
        send_trial_request(load, 10.0)
    load = prepared(server, prompts, backend=BackendName.TEI, endpoint="/v1/completions")
    with pytest.raises(BadValue, match="lacks a list of 1"):
        send_trial_request(load, 10.0)


def test_a_missing_server_is_reported(prompts: Path) -> None:
    with stub() as server:
        gone = server
    with pytest.raises(BadValue, match=r"no server answers at http://127.0.0.1:\d+: Connection refused"):
        prepared(gone, prompts, backend=BackendName.OPENAI_EMBEDDINGS)


def test_the_client_counts_tokens_if_the_server_does_not(server: Stub, prompts: Path, model: Path) -> None:
    plain = prepared(server, prompts, backend=BackendName.TEI, model=str(model))
    assert all(count >= 6 for count in plain.count_input_tokens())
    unknown = prepared(server, prompts, backend=BackendName.TEI, model="nothing-of-that-name")
    assert unknown.count_input_tokens() is None


def test_generation_flags_are_refused_for_other_backends(server: Stub, prompts: Path) -> None:
    with pytest.raises(BadValue, match="ignore_eos: only with"):
        prepared(server, prompts, BodyOptions(ignore_eos=True), backend=BackendName.OPENAI_EMBEDDINGS)


def test_a_completion_has_one_prompt(server: Stub, model: Path) -> None:
    data = DataOptions(random_batch_size=2, num_prompts=4, random_input_len=8)
    with pytest.raises(BadValue, match="--random-batch-size"):
        prepare(ServerOptions(base_url=server.url, model=str(model)), data, BodyOptions())

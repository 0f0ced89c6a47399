"""Store URLs: what they name, which errors they give, and that they never reveal a secret."""

from __future__ import annotations

import pytest

from penstock.errors import BadValue
from penstock.stores.locations import Metric, credentials, hide_secrets, parse


@pytest.mark.parametrize(
    ("url", "address", "collection"),
    [
        ("lancedb:data/db/docs", "data/db", "docs"),
        ("lancedb:s3://bucket/db/docs", "s3://bucket/db", "docs"),
        ("qdrant:http://localhost:6333/docs", "http://localhost:6333", "docs"),
        ("qdrant:https://host/prefix/docs", "https://host/prefix", "docs"),
        ("qdrant:./qdrant/docs", "./qdrant", "docs"),
        ("opensearch:https://user:pw@host:9200/docs", "https://user:pw@host:9200", "docs"),
        ("pgvector:postgresql://me@host/db?table=docs", "postgresql://me@host/db", "docs"),
        (
            "pgvector:postgresql:///db?host=/run/pg&table=app.docs&metric=dot",
            "postgresql:///db?host=%2Frun%2Fpg",
            "app.docs",
        ),
    ],
)
def test_a_url_names_a_store_and_a_collection(url: str, address: str, collection: str) -> None:
    location = parse(url)
    assert (location.address, location.collection) == (address, collection)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("docs", "names no vector store; write lancedb:"),
        ("milvus:http://x/y", "names no vector store"),
        ("lancedb:", "it is empty"),
        ("lancedb:docs", "needs a store and the name of a collection"),
        ("qdrant:http://localhost", "needs a store and the name of a collection"),
        ("qdrant:http://localhost:6333/", "needs a store and the name of a collection"),
        ("opensearch:localhost:9200/docs", "needs http://"),
        ("pgvector:mysql://x/y?table=z", "needs postgresql://"),
        ("pgvector:postgresql://x/y", "names no table"),
        ("pgvector:postgresql://x/y?table=a;drop", "is no name"),
        ("pgvector:postgresql://x/y?table=t&index=ivf", "use hnsw or none"),
        ("qdrant:/a/b?metric=manhattan", "use cosine, dot, l2, hamming"),
        ("qdrant:/a/b?colour=red", "'colour' is no option"),
        ("lancedb:/a/b c", "is no name"),
    ],
)
def test_a_url_that_is_wrong_is_refused_with_what_is_accepted(url: str, words: str) -> None:
    with pytest.raises(BadValue, match=words.replace("?", r"\?")):
        parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "pgvector:postgresql://me:geheim@host/db?table=docs",
        "pgvector:postgresql://host/db?password=geheim&table=docs",
        "opensearch:https://me:geheim@host:9200/docs",
        "qdrant:https://:geheim@host:6333/docs",
    ],
)
def test_secrets_are_never_shown(url: str) -> None:
    location = parse(url)
    assert "geheim" in location.address
    for text in (location.shown, repr(location), hide_secrets(url), location.beside("other").shown):
        assert "geheim" not in text
    assert "other" in location.beside("other").shown
    with pytest.raises(BadValue) as caught:
        parse(url.replace("docs", "d;") if "table" in url else url.replace("/docs", "/d;"))
    assert "geheim" not in str(caught.value)


def test_a_password_may_have_any_characters() -> None:
    assert credentials("https://me:p%40ss%2F@host:9200") == ("https://host:9200", "me", "p@ss/")
    assert credentials("https://host:9200") == ("https://host:9200", None, None)


def test_a_url_may_name_a_distance() -> None:
    assert parse("qdrant:/a/b?metric=l2").metric is Metric.L2
    assert parse("qdrant:/a/b").metric is None

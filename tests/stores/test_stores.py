"""Rules for every vector store: rows are replaced by id, models never mix, and nothing is lost."""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import BadValue, NotPossible
from penstock.jobs.stamp import Stamp
from penstock.stores import Metric, StoreFailed, open_store
from penstock.stores.sink import store_sink
from tests.stores.opensearch_stand_in import StandIn
from tests.stores.tables import STAMP, fixed_lists, multi, sparse, table, vectors

TIMES = [dt.datetime(2026, 1, day, tzinfo=dt.UTC) for day in (1, 2, 3)]


def stamped(**changes: Any) -> Stamp:
    return msgspec.structs.replace(STAMP, **changes)


def write(url: str, *tables: pa.Table, stamp: Stamp = STAMP, **options: Any) -> None:
    with open_store(url, **options) as store:
        store.open(tables[0].schema, stamp)
        for each in tables:
            store.write(each)
        store.finish()


def read(url: str) -> dict[Any, dict[str, Any]]:
    with open_store(url) as store:
        assert store.find() is not None
        rows = [row for part in store.read(2) for row in part.to_pylist()]
    assert len(rows) == len({row["id"] for row in rows})
    return {row.pop("id"): row for row in rows}


def nearest(url: str, queries: pa.Table, k: int = 1) -> list[list[Any]]:
    with open_store(url) as store:
        assert store.find() is not None
        return [[hit.id for hit in hits] for hits in store.search(queries, k)]


@pytest.mark.parametrize("ids", [["a", "it's", "ü/?"], [7, 0, 1 << 40]], ids=["texts", "numbers"])
def test_rows_are_read_as_they_were_written(url: str, ids: list[Any]) -> None:
    rows = table(ids, title=pa.array(["one", None, "three"]), size=pa.array([1, 2, 3]))
    write(url, rows)
    wanted = {
        each: {"title": title, "size": size}
        for each, title, size in zip(ids, ["one", None, "three"], [1, 2, 3], strict=True)
    }
    assert read(url) == wanted
    assert nearest(url, rows.select(["vector"])) == [[each] for each in ids]


def test_writing_twice_changes_nothing_and_a_later_row_replaces_an_earlier(url: str) -> None:
    rows = table(["a", "b", "c"], title=pa.array(["1", "2", "3"]))
    write(url, rows, rows)
    write(url, rows)
    assert len(read(url)) == 3
    write(url, table(["b", "b"], vectors(2, seed=9), title=pa.array(["older", "newer"])))
    assert {each: row["title"] for each, row in read(url).items()} == {"a": "1", "b": "newer", "c": "3"}
    assert nearest(url, table(["q"], vectors(2, seed=9)[1:]).select(["vector"])) == [["b"]]


def test_two_models_never_mix_in_a_collection(url: str) -> None:
    rows = table(["a"])
    write(url, rows)
    with pytest.raises(BadValue, match=r"must not mix.* model is model-a and model-b"):
        write(url, rows, stamp=stamped(model="model-b", revision="two"))
    with pytest.raises(BadValue, match='prompt is "" and "passage: "'):
        write(url, rows, stamp=stamped(prompt="passage: "))
    write(url, table(["b"]), stamp=stamped(model="the same files", version="another"))
    assert set(read(url)) == {"a", "b"}


def test_the_stamp_is_in_the_store(url: str) -> None:
    stamp = stamped(similarity="dot")
    write(url, table(["a"]), stamp=stamp)
    with open_store(url) as store:
        found = store.find()
    assert found is not None and found.mark is not None
    assert (found.mark.stamp, found.mark.metric, found.num_rows) == (stamp, Metric.DOT, 1)


def test_a_distance_that_no_store_has_is_refused(new_url: Callable[[str], str]) -> None:
    with pytest.raises(NotPossible, match="by manhattan, which vector stores do not; add metric=cosine"):
        write(new_url("lancedb"), table(["a"]), stamp=stamped(similarity="manhattan"))


def test_a_column_whose_type_changes_is_refused_where_columns_have_types(
    new_url: Callable[[str], str],
) -> None:
    first, second = table(["a"], n=pa.array([None])), table(["b"], n=pa.array([7]))
    url = new_url("lancedb")
    write(url, first, second)
    assert read(url)["b"] == {"n": "7"}
    with pytest.raises(BadValue, match="the column 'n' holds string here, but int64 in earlier rows"):
        write(new_url("lancedb"), second, table(["c"], n=pa.array(["many"])))


def test_a_collection_that_does_not_exist_is_not_found(url: str) -> None:
    with open_store(url) as store:
        assert store.find() is None


def test_another_distance_is_refused(url: str) -> None:
    write(url, table(["a"]))
    with pytest.raises(BadValue, match="compares vectors by cosine, not by l2"):
        write(url + ("&" if "?" in url else "?") + "metric=l2", table(["b"]))


def test_stored_says_which_ids_are_there(url: str) -> None:
    write(url, table(["a", "b"], changed=pa.array(["x", "y"])))
    with open_store(url) as store:
        store.find()
        assert store.stored(["a", "b", "z"]) == {"a": None, "b": None}
        assert store.stored(["b", "z"], "changed") == {"b": "y"}
        assert store.stored([]) == {}


def test_kept_columns_of_many_types_are_held(url: str) -> None:
    rows = table(
        ["a", "b", "c"],
        flag=pa.array([True, False, None]),
        weight=pa.array([0.5, None, 2.0]),
        at=pa.array(TIMES),
        tags=pa.array([["x", "y"], [], None]),
        about=pa.array([{"n": 1}, {"n": 2}, None]),
    )
    write(url, rows)
    held = read(url)["a"]
    assert (held["flag"], held["weight"]) == (True, 0.5)
    assert str(held["at"]).startswith("2026-01-01")
    assert "x" in held["tags"]


def test_sparse_vectors_are_held_or_refused_by_name(url: str, kind: str) -> None:
    terms = [{5: 1.0, 2: 0.5}, {7: 2.0}, {2: 3.0, 9: 0.0}]
    rows = table(["a", "b", "c"]).append_column("sparse", sparse(terms))
    if kind == "lancedb":
        with pytest.raises(NotPossible, match="lancedb holds no sparse vectors"):
            write(url, rows)
        return
    write(url, rows)
    assert nearest(url, pa.table({"sparse": sparse([{7: 1.0}, {2: 1.0}, {5: 1.0}])})) == [["b"], ["c"], ["a"]]


def test_multi_vectors_are_held_or_refused_by_name(url: str, kind: str) -> None:
    tokens = [vectors(count, seed=count) for count in (2, 3, 4)]
    rows = table(["a", "b", "c"]).append_column("multi_vector", multi(tokens))
    if kind in ("pgvector", "opensearch"):
        with pytest.raises(NotPossible, match=f"{kind} holds no multi-vectors"):
            write(url, rows)
        return
    write(url, rows)
    assert nearest(url, pa.table({"multi_vector": multi(tokens)})) == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("dtype", ["float16", "int8", "uint8", "binary", "ubinary"])
def test_other_number_formats_are_held_or_refused_by_name(url: str, kind: str, dtype: str) -> None:
    holds = {
        "lancedb": {"float16", "binary", "ubinary"},
        "qdrant": {"float16", "uint8"},
        "pgvector": {"float16", "binary", "ubinary"},
        "opensearch": {"float16", "int8", "binary", "ubinary"},
    }
    packed = dtype in ("binary", "ubinary")
    drawn = np.random.default_rng(3).integers(1, 100, (3, 8))
    values = drawn.astype({"binary": "int8", "ubinary": "uint8"}.get(dtype, dtype))
    rows = table(["a", "b", "c"], values)
    stamp = stamped(dtype=dtype, dimension=64 if packed else 8)
    if dtype not in holds[kind]:
        with pytest.raises(NotPossible, match=f"{kind} holds no .* vectors; use --embed-dtype"):
            write(url, rows, stamp=stamp)
        return
    write(url, rows, stamp=stamp)
    assert nearest(url, pa.table({"vector": fixed_lists(values)})) == [["a"], ["b"], ["c"]]


def test_a_column_that_the_collection_does_not_have_is_refused(url: str, kind: str) -> None:
    write(url, table(["a"]))
    more = table(["b"], title=pa.array(["x"]))
    if kind in ("lancedb", "pgvector"):
        with pytest.raises(BadValue, match="has no column title"):
            write(url, more)
    else:
        write(url, more)
        assert read(url)["b"] == {"title": "x"}


def test_a_collection_of_others_is_written_only_with_adopt(url: str, kind: str) -> None:
    unstamp(url, kind, table(["a"]))
    with pytest.raises(BadValue, match=r"nothing says which model made its vectors.*--adopt"):
        write(url, table(["b"]))
    write(url, table(["b"]), adopt=True)
    write(url, table(["c"]))
    assert set(read(url)) == {"a", "b", "c"}
    with pytest.raises(BadValue, match="must not mix"):
        write(url, table(["d"]), stamp=stamped(model="model-b", revision="two"), adopt=True)


def test_a_collection_of_others_with_another_width_is_not_adopted(url: str, kind: str) -> None:
    unstamp(url, kind, table(["a"]))
    with pytest.raises(BadValue):
        write(url, table(["b"], vectors(1, 16)), stamp=stamped(dimension=16), adopt=True)


def unstamp(url: str, kind: str, rows: pa.Table) -> None:
    """Write rows, and remove the record that Penstock keeps of them."""
    write(url, rows)
    store: Any = open_store(url)
    store.find()
    if kind == "lancedb":
        store._database().create_table(store.location.collection, rows, mode="overwrite")
    elif kind == "qdrant":
        store._client._client.collections[store.location.collection].config.metadata = None
        store._client._client._save()
    elif kind == "pgvector":
        store._connection.execute(f"COMMENT ON TABLE {store.location.collection} IS 'mine'")
    else:
        store._client.indices.put_mapping(index=store.location.collection, body={"_meta": {}})
    store.close()


def test_a_passing_failure_is_tried_again(
    new_url: Callable[[str], str], opensearch: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("penstock.stores.base.time.sleep", pauses.append)
    url = new_url("opensearch")
    opensearch.busy_writes = 2
    write(url, table(["a", "b"]))
    assert set(read(url)) == {"a", "b"}
    assert len(pauses) == 2


def test_a_reader_that_stops_early_leaves_no_scroll_open(
    new_url: Callable[[str], str], opensearch: StandIn
) -> None:
    url = new_url("opensearch")
    write(url, table(["a", "b", "c"]))
    with open_store(url) as store:
        store.find()
        pages = store.read(1)
        next(pages)
        assert opensearch.scrolls
        pages.close()  # type: ignore[attr-defined]
    assert not opensearch.scrolls


def test_a_store_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("qdrant:http://127.0.0.1:9/docs", "opensearch:http://user:secret@127.0.0.1:9/docs"):
        with pytest.raises(Exception, match=r"127\.0\.0\.1:9/docs") as caught, open_store(url) as store:
            store.find()
        assert type(caught.value).__name__ == "StoreFailed"
        assert "secret" not in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import sys

    for kind, package, extra, rest in (
        ("lancedb", "lancedb", "lance", f"{tmp_path}/t"),
        ("qdrant", "qdrant_client", "qdrant", f"{tmp_path}/t"),
        ("pgvector", "psycopg", "pgvector", "postgresql:///db?table=t"),
        ("opensearch", "opensearchpy", "opensearch", "http://localhost/t"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(NotPossible, match=f"{package}; install Penstock with the extra {extra}"):
            open_store(f"{kind}:{rest}")


def test_ids_that_are_neither_numbers_nor_texts_are_refused(new_url: Callable[[str], str]) -> None:
    with pytest.raises(BadValue, match="ids are double"):
        write(new_url("lancedb"), table([0.5]))


def test_uuids_keep_their_form_in_qdrant(new_url: Callable[[str], str]) -> None:
    given = ["6f6ad0d1-6a6e-5d4b-8b5f-0d9d2a3f7c11", "plain", "6F6AD0D1-6A6E-5D4B-8B5F-0D9D2A3F7C12"]
    url = new_url("qdrant")
    write(url, table(given))
    assert set(read(url)) == set(given)
    store: Any = open_store(url)
    with store:
        points = {
            str(point.id): point.payload for point in store._client.scroll(store.location.collection)[0]
        }
    assert points[given[0]] == {}
    assert {payload["id"] for key, payload in points.items() if key != given[0]} == set(given[1:])


def test_a_store_reaches_other_processes_as_a_sink(new_url: Callable[[str], str]) -> None:
    url = new_url("lancedb")
    sink = pickle.loads(pickle.dumps(store_sink(url, adopt=False)))
    rows = table(["a"])
    assert sink.check(rows.schema, STAMP) == 0
    opened = sink.open()
    opened.open(rows.schema, STAMP)
    opened.write(rows)
    opened.finish()
    assert sink.check(rows.schema, STAMP) == 1
    assert sink.label == url


@pytest.mark.stores
def test_a_lost_connection_is_opened_again(
    new_url: Callable[[str], str], postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    pauses: list[float] = []
    monkeypatch.setattr("penstock.stores.base.time.sleep", pauses.append)
    url = new_url("pgvector")
    rows = table(["a", "b"])
    with open_store(url) as store, psycopg.connect(postgres, autocommit=True) as other:
        store.open(rows.schema, STAMP)
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        store.write(rows)
    assert set(read(url)) == {"a", "b"}
    assert len(pauses) == 1


@pytest.mark.stores
def test_a_database_that_cannot_be_reached_is_named() -> None:
    with (
        pytest.raises(StoreFailed, match=r"pgvector:postgresql://me@127\.0\.0\.1:9/db") as caught,
        open_store("pgvector:postgresql://me:geheim@127.0.0.1:9/db?table=docs") as store,
    ):
        store.find()
    assert "geheim" not in str(caught.value)

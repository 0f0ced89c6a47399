"""OpenSearch: an index with `knn_vector` and `rank_features` fields. The mapping's `_meta` holds the mark."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import orjson
import pyarrow as pa

from penstock.errors import BadValue, NotPossible
from penstock.stores.base import MARK_KEY, Found, Hit, Id, Mark, StoreFailed, VectorStore, need, query_column
from penstock.stores.columns import (
    ID,
    SPARSE,
    VECTOR,
    DenseType,
    Layout,
    arrow_table,
    dense_rows,
    is_text,
    is_whole_number,
    json_row,
    rows_of,
    sparse_rows,
    without_id,
)
from penstock.stores.locations import Location, Metric, credentials

_MAX_WRITE_BYTES = 8 << 20
_MAX_ID_BYTES = 512
_SCROLL = "30m"  # how long the caller may take to process a page
_TIMEOUT_S = 60
_TRANSIENT = (429, 502, 503, 504)
_SPACES = {
    Metric.COSINE: "cosinesimil",
    Metric.DOT: "innerproduct",
    Metric.L2: "l2",
    Metric.HAMMING: "hamming",
}
_DATA_TYPES = {DenseType.INT8: "byte", DenseType.BITS: "binary"}  # other types are "float"


class OpenSearchStore(VectorStore):
    kind = "opensearch"
    extra = "opensearch"
    dense_types = frozenset({DenseType.FLOAT32, DenseType.FLOAT16, DenseType.INT8, DenseType.BITS})
    metrics = frozenset(Metric)
    max_dimension = 16_000
    holds_sparse = True

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        opensearch = need("opensearchpy", self.extra)
        self._errors = need("opensearchpy.exceptions", self.extra)
        url, user, password = credentials(location.address)
        user = user or os.environ.get("OPENSEARCH_USERNAME")
        password = password or os.environ.get("OPENSEARCH_PASSWORD")
        self._client: Any = opensearch.OpenSearch(
            hosts=[url],
            http_auth=(user, password or "") if user else None,
            timeout=_TIMEOUT_S,
            max_retries=0,  # `_again` retries writes
        )

    @property
    def _index(self) -> str:
        return self.location.collection

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except self._errors.TransportError as error:
            raise StoreFailed(f"{self}: {_reason(error)}") from None

    def close(self) -> None:
        self._client.close()

    def find(self) -> Found | None:
        with self._failures():
            if not self._client.indices.exists(index=self._index):
                return None
            ((_, about),) = self._client.indices.get(index=self._index).items()
            count = self._client.count(index=self._index)["count"]
        meta = about.get("mappings", {}).get("_meta", {})
        self.mark = msgspec.convert(meta[MARK_KEY], Mark) if MARK_KEY in meta else None
        return Found(self.mark, count)

    def _create(self, layout: Layout, mark: Mark) -> None:
        properties: dict[str, Any] = {ID: {"type": "long" if layout.has_number_ids else "keyword"}}
        properties |= {field.name: _mapping(field.type) for field in layout.payload}
        if layout.dense_type is not None:
            properties[self.column(VECTOR)] = self._vector_mapping(layout, mark.metric)
        if layout.has_sparse:
            properties[SPARSE] = {"type": "rank_features"}
        body = {
            "settings": {"index": {"knn": layout.dense_type is not None}},
            "mappings": {"_meta": {MARK_KEY: msgspec.to_builtins(mark)}, "properties": properties},
        }
        with self._failures():
            self._client.indices.create(index=self._index, body=body)

    def _vector_mapping(self, layout: Layout, metric: Metric) -> dict[str, Any]:
        assert layout.dense_type is not None
        is_bits = layout.dense_type is DenseType.BITS
        return {
            "type": "knn_vector",
            "dimension": layout.width * 8 if is_bits else layout.width,
            "data_type": _DATA_TYPES.get(layout.dense_type, "float"),
            "method": {
                "name": "hnsw",
                "engine": "faiss" if is_bits else "lucene",
                "space_type": _SPACES[metric],
            },
        }

    def _adopt(self, layout: Layout, mark: Mark) -> None:
        with self._failures():
            ((_, about),) = self._client.indices.get(index=self._index).items()
            mappings = about.get("mappings", {})
            if layout.dense_type is not None:
                there = mappings.get("properties", {}).get(self.column(VECTOR), {})
                if there.get("type") != "knn_vector" or there.get("dimension") != layout.dimension:
                    raise BadValue(
                        f"{self}: the field {self.column(VECTOR)} is {there.get('type', 'not there')} of "
                        f"{there.get('dimension', 0)} dimensions, not knn_vector of {layout.dimension}",
                        param="--adopt",
                    )
            meta = {**mappings.get("_meta", {}), MARK_KEY: msgspec.to_builtins(mark)}
            self._client.indices.put_mapping(index=self._index, body={"_meta": meta})

    def _upsert(self, table: pa.Table) -> None:
        assert self.layout is not None
        lines: list[bytes] = []
        size = 0
        for each, source in self._documents(table, self.layout):
            if len(each.encode()) > _MAX_ID_BYTES:
                raise BadValue(
                    f"an id of OpenSearch has at most {_MAX_ID_BYTES} bytes, but {each[:40]!r}… has more",
                    param="--id-column",
                )
            pair = [orjson.dumps({"index": {"_id": each}}), orjson.dumps(source)]
            lines += pair
            size += sum(map(len, pair))
            if size >= _MAX_WRITE_BYTES:
                self._bulk(lines)
                lines, size = [], 0
        if lines:
            self._bulk(lines)

    def _documents(self, table: pa.Table, layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
        ids = table.column(ID).to_pylist()
        dense = self._dense(table, layout) if layout.dense_type is not None else None
        sparse = list(sparse_rows(table)) if layout.has_sparse else None
        payloads = rows_of(table, [field.name for field in layout.payload])
        for row, each in enumerate(ids):
            source = {ID: each, **json_row(payloads[row])}
            if dense is not None:
                source[self.column(VECTOR)] = dense[row].tolist()
            if sparse is not None:
                indices, weights = sparse[row]
                terms = zip(indices.tolist(), weights.tolist(), strict=True)
                source[SPARSE] = {str(term): weight for term, weight in terms if weight > 0}
            yield str(each), source

    def _dense(self, table: pa.Table, layout: Layout) -> Any:
        assert layout.dense_type is not None
        rows = dense_rows(table, layout.dense_type)
        return rows.view(np.int8) if layout.dense_type is DenseType.BITS else rows

    def _bulk(self, lines: list[bytes]) -> None:
        body = b"\n".join(lines) + b"\n"
        answer = self._client.bulk(index=self._index, body=body.decode())
        if not answer.get("errors"):
            return
        failed = [item["index"] for item in answer["items"] if item["index"].get("status", 200) >= 300]
        if all(item["status"] in _TRANSIENT for item in failed):
            raise self._errors.TransportError(failed[0]["status"], "rows were refused", failed[0])
        item = next(item for item in failed if item["status"] not in _TRANSIENT)
        raise StoreFailed(f"{self}: the row {item.get('_id')!r} was refused: {item.get('error')}")

    def _is_transient(self, error: Exception) -> bool:
        if isinstance(error, self._errors.ConnectionError):
            return True
        return isinstance(error, self._errors.TransportError) and error.args[0] in _TRANSIENT

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, self._errors.TransportError):
            return StoreFailed(f"{self}: {_reason(error)}")
        return error

    def finish(self) -> None:
        with self._failures():
            self._client.indices.refresh(index=self._index)

    def read(self, batch_rows: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        hidden = [self.column(VECTOR), SPARSE, f"{SPARSE}.*"]
        source = {"excludes": hidden} if columns is None else {"includes": [*columns, ID]}
        body = {"size": batch_rows, "sort": ["_doc"], "_source": source}
        with self._failures():
            self._client.indices.refresh(index=self._index)
            answer = self._client.search(index=self._index, body=body, scroll=_SCROLL)
        try:
            while hits := answer["hits"]["hits"]:
                ids = [_own_id(hit) for hit in hits]
                payloads = [
                    without_id(hit.get("_source", {}), each) for hit, each in zip(hits, ids, strict=True)
                ]
                yield arrow_table(ids, payloads, columns)
                with self._failures():
                    answer = self._client.scroll(body={"scroll_id": answer["_scroll_id"], "scroll": _SCROLL})
        finally:  # also for a reader that stops early: the server keeps an open scroll for minutes
            with self._failures():
                self._client.clear_scroll(scroll_id=answer["_scroll_id"])

    def stored(self, ids: Sequence[Id], column: str | None = None) -> Mapping[Id, Any]:
        if not ids:
            return {}
        includes = [column] if column else ["_none_"]
        with self._failures():
            answer = self._client.mget(
                index=self._index,
                body={"ids": [str(each) for each in ids]},
                _source_includes=",".join(includes),
            )
        found = {doc["_id"]: doc.get("_source", {}) for doc in answer["docs"] if doc.get("found")}
        return {each: found[str(each)].get(column or "") for each in ids if str(each) in found}

    def search(self, queries: pa.Table, k: int) -> list[list[Hit]]:
        name = query_column(queries)
        if name == SPARSE:
            wanted = [self._sparse_query(*row) for row in sparse_rows(queries)]
        else:
            wanted = [self._exact_query(row) for row in self._query_rows(queries)]
        return [self._hits(query, k) for query in wanted]

    def _query_rows(self, queries: pa.Table) -> Any:
        is_bits = self.mark is not None and self.mark.metric is Metric.HAMMING
        rows = dense_rows(queries, DenseType.BITS if is_bits else DenseType.FLOAT32)
        return rows.view(np.int8) if is_bits else rows

    def _exact_query(self, row: Any) -> dict[str, Any]:
        """Build a query that compares every row, since the index would be approximate."""
        metric = self.search_metric
        field = self.column(VECTOR)
        params = {"field": field, "query_value": row.tolist(), "space_type": _SPACES[metric]}
        script = {"lang": "knn", "source": "knn_score", "params": params}
        return {"script_score": {"query": {"exists": {"field": field}}, "script": script}}

    def _sparse_query(self, indices: Any, weights: Any) -> dict[str, Any]:
        terms = [
            {"rank_feature": {"field": f"{SPARSE}.{term}", "linear": {}, "boost": weight}}
            for term, weight in zip(indices.tolist(), weights.tolist(), strict=True)
        ]
        return {"bool": {"should": terms}}

    def _hits(self, query: dict[str, Any], k: int) -> list[Hit]:
        body = {"size": k, "query": query, "_source": [ID]}
        with self._failures():
            answer = self._client.search(index=self._index, body=body)
        return [Hit(_own_id(hit), hit["_score"]) for hit in answer["hits"]["hits"]]

    def _alias_targets(self) -> list[str]:
        with self._failures():
            if not self._client.indices.exists_alias(name=self._index):
                return []
            return list(self._client.indices.get_alias(name=self._index))

    def check_cut_over(self, successor: VectorStore) -> None:
        super().check_cut_over(successor)
        targets = self._alias_targets()
        if len(targets) != 1:
            what = "an index" if not targets else f"an alias of {len(targets)} indices"
            raise NotPossible(
                f"{self._index} is {what}, and only an alias of one index can be switched; create such an "
                "alias, let your application use it, and name it here",
                param="--cut-over",
            )

    def cut_over(self, successor: VectorStore) -> VectorStore:
        self.check_cut_over(successor)
        (before,) = self._alias_targets()
        actions = [
            {"remove": {"index": before, "alias": self._index}},
            {"add": {"index": successor.location.collection, "alias": self._index}},
        ]
        with self._failures():
            self._client.indices.update_aliases(body={"actions": actions})
        return OpenSearchStore(self.location.beside(before))


def _own_id(hit: Mapping[str, Any]) -> Id:
    """Return the id with which the row was written."""
    given = hit.get("_source", {}).get(ID)
    own: Id = given if isinstance(given, int | str) and str(given) == hit["_id"] else hit["_id"]
    return own


def _mapping(kind: pa.DataType) -> dict[str, Any]:
    """Choose how OpenSearch indexes a kept column."""
    if pa.types.is_boolean(kind):
        return {"type": "boolean"}
    if is_whole_number(kind):
        return {"type": "unsigned_long" if pa.types.is_uint64(kind) else "long"}
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return {"type": "double"}
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return {"type": "date"}
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        return {"type": "object", "enabled": False}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _mapping(kind.value_type)
    if is_text(kind) or pa.types.is_null(kind):
        return {"type": "text", "fields": {"keyword": {"type": "keyword", "ignore_above": 256}}}
    return {"type": "keyword", "index": False, "doc_values": False}


def _reason(error: Any) -> str:
    info = error.args[2] if len(error.args) > 2 else None
    causes = info.get("error") if isinstance(info, dict) else None
    if isinstance(causes, dict):
        return f"{causes.get('type')}: {causes.get('reason')}"
    return " ".join(str(each) for each in error.args[:2])

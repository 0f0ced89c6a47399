"""Qdrant: a server, or a folder in embedded mode. The collection's metadata holds the mark.

Qdrant's ids are whole numbers or UUIDs. Any other id is converted to a UUID, and kept as `id` in the payload.
"""

from __future__ import annotations

import atexit
import os
import threading
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from penstock.errors import BadValue, NotPossible
from penstock.stores.base import MARK_KEY, Found, Hit, Id, Mark, StoreFailed, VectorStore, need, query_column
from penstock.stores.columns import (
    ID,
    MULTI_VECTOR,
    SPARSE,
    VECTOR,
    DenseType,
    Layout,
    arrow_table,
    dense_rows,
    json_row,
    multi_rows,
    rows_of,
    sparse_rows,
    without_id,
)
from penstock.stores.locations import Location, Metric

_NAMESPACE = uuid.UUID("6f6ad0d1-6a6e-5d4b-8b5f-0d9d2a3f7c11")  # for the UUIDs that replace other ids
_MAX_WRITE_BYTES = 8 << 20  # JSON size of the vectors in one call; servers accept 32 MB by default
_JSON_BYTES_PER_NUMBER = 12
_TIMEOUT_S = 60


@dataclass(slots=True)
class SharedClient:
    client: Any
    num_users: int = 0
    lock: Any = field(default_factory=threading.RLock)


_folders: dict[Path, SharedClient] = {}  # embedded stores that are open in this process


@atexit.register
def _close_folders() -> None:
    """Close folders that a failed run left open, before the interpreter shuts down."""
    while _folders:
        _folders.popitem()[1].client.close()


class QdrantStore(VectorStore):
    kind = "qdrant"
    extra = "qdrant"
    dense_types = frozenset({DenseType.FLOAT32, DenseType.FLOAT16, DenseType.UINT8})
    metrics = frozenset({Metric.COSINE, Metric.DOT, Metric.L2})
    max_dimension = 65_536
    holds_sparse = True
    holds_multi_vectors = True

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._client_class = need("qdrant_client", self.extra).QdrantClient
        self._models = need("qdrant_client.models", self.extra)
        self._connection: Any = None

    @property
    def _client(self) -> Any:
        self._connect()
        return self._connection

    @property
    def _folder(self) -> Path:
        return Path(self.location.address).resolve()

    def _connect(self) -> None:
        if self._connection is not None:
            return
        if not self.location.is_remote:
            self._connection = self._open_folder(self._folder)
            return
        self._connection = self._client_class(
            url=self.location.address,
            api_key=os.environ.get("QDRANT_API_KEY"),
            timeout=_TIMEOUT_S,
            check_compatibility=False,
        )

    def _open_folder(self, folder: Path) -> Any:
        """Open a folder. Only one client can have it open, so all stores of this process share the client."""
        if folder not in _folders:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # The user guide already says so.
            warnings.filterwarnings("ignore", message="Local mode is not recommended")
            try:
                _folders[folder] = SharedClient(
                    self._client_class(path=str(folder), force_disable_check_same_thread=True)
                )
            except RuntimeError as error:
                if "already accessed" in str(error):
                    raise BadValue(f"another process has {self} open", param="--to") from None
                raise
        _folders[folder].num_users += 1
        return _folders[folder].client

    def close(self) -> None:
        client, self._connection = self._connection, None
        if client is None:
            return
        if not self.location.is_remote:
            folder = self._folder
            _folders[folder].num_users -= 1
            if _folders[folder].num_users:
                return
            del _folders[folder]
        client.close()

    def find(self) -> Found | None:
        name = self.location.collection
        if not self.location.is_remote and not Path(self.location.address).is_dir():
            return None
        with self._calls():
            if not self._client.collection_exists(name) and name not in self._aliases():
                return None
            info = self._client.get_collection(name)
            count = self._client.count(name, exact=True).count
        metadata = getattr(info.config, "metadata", None) or {}
        self.mark = msgspec.convert(metadata[MARK_KEY], Mark) if MARK_KEY in metadata else None
        return Found(self.mark, count)

    def _aliases(self) -> dict[str, str]:
        return {each.alias_name: each.collection_name for each in self._client.get_aliases().aliases}

    def _create(self, layout: Layout, mark: Mark) -> None:
        models = self._models
        distance = self._distance(mark.metric)
        vectors: dict[str, Any] = {}
        if layout.dense_type is not None:
            datatype = models.Datatype(layout.dense_type.value)
            vectors[self.column(VECTOR)] = models.VectorParams(
                size=layout.width, distance=distance, datatype=datatype
            )
        if layout.multi_width is not None:
            max_sim = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
            vectors[MULTI_VECTOR] = models.VectorParams(
                size=layout.multi_width, distance=distance, multivector_config=max_sim
            )
        sparse = {SPARSE: models.SparseVectorParams()} if layout.has_sparse else None
        with self._calls():
            self._client.create_collection(
                self.location.collection,
                vectors_config=vectors,
                sparse_vectors_config=sparse,
                metadata={MARK_KEY: msgspec.to_builtins(mark)},
            )
        self._check_stamped()

    def _check_stamped(self) -> None:
        found = self.find()
        if found is None or found.mark is None:
            raise NotPossible(
                f"{self}: this server keeps no metadata of collections, so the model cannot be recorded; "
                "use Qdrant 1.16 or newer",
                param="--to",
            )

    def _distance(self, metric: Metric) -> Any:
        distance = self._models.Distance
        return {Metric.COSINE: distance.COSINE, Metric.DOT: distance.DOT, Metric.L2: distance.EUCLID}[metric]

    def _adopt(self, layout: Layout, mark: Mark) -> None:
        params = self._client.get_collection(self.location.collection).config.params
        for name, width in ((VECTOR, layout.dense_type and layout.width), (MULTI_VECTOR, layout.multi_width)):
            if width and (there := _size(params.vectors, self.column(name))) != width:
                has = f"vectors of {there} numbers" if there else "none"
                raise BadValue(f"{self} has {has} as {self.column(name)!r}, not {width}", param="--adopt")
        with self._calls():
            self._client.update_collection(
                self.location.collection, metadata={MARK_KEY: msgspec.to_builtins(mark)}
            )
        self._check_stamped()

    def _upsert(self, table: pa.Table) -> None:
        assert self.layout is not None
        numbers = sum(table.column(name).nbytes for name in self.layout.vector_names) // 4
        pieces = max(1, -(-numbers * _JSON_BYTES_PER_NUMBER // _MAX_WRITE_BYTES))
        rows = max(1, -(-table.num_rows // pieces))
        for start in range(0, table.num_rows, rows):
            self._upsert_piece(table.slice(start, rows), self.layout)

    def _upsert_piece(self, table: pa.Table, layout: Layout) -> None:
        models = self._models
        ids = table.column(ID).to_pylist()
        payloads = [json_row(row) for row in rows_of(table, [field.name for field in layout.payload])]
        for payload, each in zip(payloads, ids, strict=True):
            if not _is_plain(each):
                payload[ID] = each
        vectors: dict[str, list[Any]] = {}
        if layout.dense_type is not None:
            vectors[self.column(VECTOR)] = dense_rows(table, layout.dense_type).tolist()
        if layout.has_sparse:
            vectors[SPARSE] = [
                models.SparseVector(indices=indices.tolist(), values=values.tolist())
                for indices, values in sparse_rows(table)
            ]
        if layout.multi_width is not None:
            vectors[MULTI_VECTOR] = [row.tolist() for row in multi_rows(table)]
        points = [
            models.PointStruct(
                id=point_id(each),
                vector={name: values[row] for name, values in vectors.items()},
                payload=payloads[row],
            )
            for row, each in enumerate(ids)
        ]
        with self._turn():
            self._client.upsert(self.location.collection, points=points, wait=True)

    def _is_transient(self, error: Exception) -> bool:
        status = getattr(error, "status_code", None)
        is_answer = type(error).__name__ == "UnexpectedResponse"
        return type(error).__name__ == "ResponseHandlingException" or (
            is_answer and status in (429, 502, 503)
        )

    def _explained(self, error: Exception) -> Exception:
        return StoreFailed(f"{self}: {error}") if type(error).__name__ == "UnexpectedResponse" else error

    def read(self, batch_rows: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        at: Any = None
        names = None if columns is None else [*columns, ID]
        while True:
            with self._calls():
                points, at = self._client.scroll(
                    self.location.collection,
                    limit=batch_rows,
                    offset=at,
                    with_payload=True if names is None else names,
                    with_vectors=False,
                )
            if points:
                yield arrow_table(
                    [_own_id(point) for point in points],
                    [without_id(point.payload or {}, _own_id(point)) for point in points],
                    columns,
                )
            if at is None:
                return

    def stored(self, ids: Sequence[Id], column: str | None = None) -> Mapping[Id, Any]:
        points = {str(point_id(each)): each for each in ids}
        with self._calls():
            found = self._client.retrieve(
                self.location.collection,
                [point_id(each) for each in ids],
                with_payload=False if column is None else [column],
                with_vectors=False,
            )
        return {points[str(point.id)]: (point.payload or {}).get(column or "") for point in found}

    def search(self, queries: pa.Table, k: int) -> list[list[Hit]]:
        models = self._models
        name = query_column(queries)
        rows: list[Any]
        if name == VECTOR:
            rows = dense_rows(queries, DenseType.FLOAT32).tolist()
        elif name == SPARSE:
            rows = [
                models.SparseVector(indices=indices.tolist(), values=values.tolist())
                for indices, values in sparse_rows(queries)
            ]
        else:
            rows = [row.tolist() for row in multi_rows(queries)]
        using = self._vector_name(name)
        requests = [
            models.QueryRequest(
                query=row,
                using=using,
                limit=k,
                params=models.SearchParams(exact=True) if self.location.is_remote else None,
                with_payload=[ID],
            )
            for row in rows
        ]
        with self._calls():
            answers = self._client.query_batch_points(self.location.collection, requests=requests)
        return [[self._hit(point) for point in answer.points] for answer in answers]

    def _hit(self, point: Any) -> Hit:
        distance = self.mark is not None and self.mark.metric is Metric.L2
        return Hit(_own_id(point), -point.score if distance else point.score)

    def _vector_name(self, name: str) -> str | None:
        """Return the name of these vectors in the collection; None if it has one unnamed vector."""
        if name != VECTOR:
            return name
        there = self._client.get_collection(self.location.collection).config.params.vectors
        if not isinstance(there, dict):
            return None
        wanted = self.column(VECTOR)
        return next(iter(there)) if wanted not in there and len(there) == 1 else wanted

    def check_cut_over(self, successor: VectorStore) -> None:
        super().check_cut_over(successor)
        with self._calls():
            aliases = self._aliases()
        if self.location.collection not in aliases:
            raise NotPossible(
                f"{self.location.collection} is a collection, and only an alias can be switched; create an "
                "alias for it, let your application use the alias, and name the alias here",
                param="--cut-over",
            )

    def cut_over(self, successor: VectorStore) -> VectorStore:
        self.check_cut_over(successor)
        models, alias = self._models, self.location.collection
        before = self._aliases()[alias]
        delete = models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=alias))
        create = models.CreateAliasOperation(
            create_alias=models.CreateAlias(collection_name=successor.location.collection, alias_name=alias)
        )
        with self._calls():
            self._client.update_collection_aliases([delete, create])
        return QdrantStore(self.location.beside(before))

    def _turn(self) -> AbstractContextManager[Any]:
        """Lock an embedded client, which only one thread at a time may call."""
        self._connect()
        return nullcontext() if self.location.is_remote else _folders[self._folder].lock

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Convert the client's errors to `StoreFailed` with the store's name."""
        try:
            with self._turn():
                yield
        except Exception as error:
            if type(error).__name__ in ("ResponseHandlingException", "UnexpectedResponse"):
                raise StoreFailed(f"{self}: {error}") from None
            raise


def point_id(value: Id) -> int | str:
    """Return the id of a point. Whole numbers from 0 and UUIDs are kept; other ids become a UUID."""
    return value if _is_plain(value) else str(uuid.uuid5(_NAMESPACE, str(value)))


def _is_plain(value: Id) -> bool:
    if isinstance(value, int):
        return 0 <= value < 1 << 64
    try:
        return str(uuid.UUID(value)) == value
    except ValueError:
        return False


def _own_id(point: Any) -> Id:
    """Return the id with which the point was written."""
    given = (point.payload or {}).get(ID)
    if isinstance(given, int | str) and point_id(given) == point.id:
        return given
    own: Id = point.id
    return own


def _size(vectors: Any, name: str) -> int | None:
    if isinstance(vectors, dict):
        return vectors[name].size if name in vectors else None
    return None

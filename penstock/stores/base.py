"""The interface of vector stores, and the rules that all of them follow.

A collection carries a mark: the stamp of its vectors (model, revision, settings) and its metric. A store
opens a collection for writing only if the mark matches the writer's, so vectors of two models never mix.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import msgspec
import pyarrow as pa

from penstock.errors import BadValue, NotPossible, PenstockError
from penstock.jobs.stamp import Stamp
from penstock.stores.columns import (
    ID,
    MULTI_VECTOR,
    SPARSE,
    VECTOR,
    DenseType,
    Layout,
    fitted,
    last_of_each_id,
    plain_ids,
)
from penstock.stores.locations import Location, Metric

MARK_KEY = "penstock"  # key of the mark in a store's own metadata
_MAX_TRIES = 5
_FIRST_PAUSE_S = 0.5
_METRICS = {"cosine": Metric.COSINE, "dot": Metric.DOT, "euclidean": Metric.L2}
Id = int | str


class StoreFailed(PenstockError):
    """A vector store could not be reached, or refused what it was sent."""

    status = 502
    code = "store_failed"


class StoreUnreachable(StoreFailed):
    """A vector store does not answer, or is busy. The same call may succeed shortly."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The stamp and metric of a collection's vectors, stored with it."""

    layout: int = 1
    stamp: Stamp
    metric: Metric

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def model_metric(stamp: Stamp) -> Metric:
    """Return the metric that the model was trained for."""
    if stamp.similarity not in _METRICS:
        raise NotPossible(
            f"the model compares vectors by {stamp.similarity}, which vector stores do not; add "
            "metric=cosine, metric=dot or metric=l2 to the URL",
            param="--to",
        )
    return _METRICS[stamp.similarity]


class Hit(NamedTuple):
    """A row found by a search. A higher `score` is better; its unit depends on the store."""

    id: Id
    score: float


@dataclass(frozen=True, slots=True)
class Found:
    """An existing collection. `mark` is None if Penstock did not create it."""

    mark: Mark | None
    num_rows: int
    columns: tuple[str, ...] | None = None  # None: rows may have any columns


class VectorStore(ABC):
    """One collection of a vector store.

    To write, call `open`, `write` for each table, then `finish`. To read, call `find`, then `read` or
    `search`. A write is an upsert by id, so writing the same table twice changes nothing.
    """

    kind: ClassVar[str]
    extra: ClassVar[str]  # the extra in pyproject.toml with the packages that the store needs
    dense_types: ClassVar[frozenset[DenseType]]
    metrics: ClassVar[frozenset[Metric]]
    max_dimension: ClassVar[int]
    has_schema: ClassVar[bool] = False  # all rows have the same columns and types
    holds_sparse: ClassVar[bool] = False
    holds_multi_vectors: ClassVar[bool] = False
    why_no_cut_over: ClassVar[str | None] = None  # None: the store can switch atomically

    def __init__(self, location: Location) -> None:
        self.location = location
        self.may_adopt = False  # whether to write to a collection without a stamp
        self.layout: Layout | None = None
        self.mark: Mark | None = None

    def __str__(self) -> str:
        return self.location.shown

    # Writing

    def check(self, layout: Layout) -> None:
        """Refuse what the store cannot hold."""
        if layout.has_sparse and not self.holds_sparse:
            raise NotPossible(f"{self.kind} holds no sparse vectors", param="--to")
        if layout.multi_width is not None and not self.holds_multi_vectors:
            raise NotPossible(f"{self.kind} holds no multi-vectors", param="--to")
        if (dense := layout.dense_type) is not None and dense not in self.dense_types:
            known = ", ".join(sorted(self.dense_types))
            raise NotPossible(
                f"{self.kind} holds no {dense} vectors; use --embed-dtype for one of: {known}",
                param="--embed-dtype",
            )
        if (dimension := layout.stamp.dimension or 0) > self.max_dimension:
            raise NotPossible(
                f"{self.kind} holds vectors of at most {self.max_dimension:,} dimensions, not "
                f"{dimension:,}; use --dimensions",
                param="--dimensions",
            )
        if (wanted := self._metric(layout)) not in self.metrics:
            known = ", ".join(sorted(self.metrics))
            raise NotPossible(f"{self.kind} has no {wanted} distance; it has: {known}", param="--to")

    def check_open(self, schema: pa.Schema, stamp: Stamp) -> int:
        """Refuse what `open` would refuse, without changes. Returns the number of rows."""
        layout = Layout.of(schema, stamp)
        self.check(layout)
        found = self.find()
        if found is None:
            return 0
        if found.mark is None:
            self._refuse_unmarked()
        else:
            self._refuse_mix(found.mark, Mark(stamp=stamp, metric=self._metric(layout)))
        self._check_columns(layout, found)
        return found.num_rows

    def open(self, schema: pa.Schema, stamp: Stamp) -> None:
        """Create the collection, or check that its vectors are of the same model and settings."""
        layout = Layout.of(schema, stamp)
        self.check(layout)
        mark = Mark(stamp=stamp, metric=self._metric(layout))
        found = self.find() or self._created(layout, mark)
        if found is None:
            pass
        elif found.mark is None:
            self._refuse_unmarked()
            self._check_columns(layout, found)
            self._adopt(layout, mark)
        else:
            self._refuse_mix(found.mark, mark)
            self._check_columns(layout, found)
        self.layout, self.mark = layout, mark

    def write(self, table: pa.Table) -> None:
        """Insert rows, or replace rows with the same ids. If a table repeats an id, its last row is written.

        Transient failures are retried: writing the same rows twice is harmless.
        """
        rows = last_of_each_id(plain_ids(table))
        if self.has_schema and self.layout is not None:
            rows = fitted(rows, self.layout.schema)
        if rows.num_rows:
            self._again(lambda: self._upsert(rows))

    def finish(self) -> None:  # noqa: B027
        """Make the written rows visible and build indexes."""

    def close(self) -> None:  # noqa: B027
        """Close the connection."""

    def __enter__(self) -> VectorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading

    @abstractmethod
    def find(self) -> Found | None:
        """Look up the collection; None if it does not exist."""

    @abstractmethod
    def read(self, batch_rows: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read all rows: `id` and the named columns, or by default all columns without vectors."""

    @abstractmethod
    def stored(self, ids: Sequence[Id], column: str | None = None) -> Mapping[Id, Any]:
        """Return the ids that exist, each with its value of `column`, or None."""

    @abstractmethod
    def search(self, queries: pa.Table, k: int) -> list[list[Hit]]:
        """Find each query's nearest rows, exactly. `queries` has a column vector, sparse or multi_vector."""

    # Moving

    def cut_over(self, successor: VectorStore) -> VectorStore:
        """Point the name of this collection to `successor`, in one atomic step.

        Returns the collection that now holds the old rows, for a rollback.
        """
        raise NotPossible(f"{self.kind} has no atomic switch: {self.why_no_cut_over}", param="--cut-over")

    def check_cut_over(self, successor: VectorStore) -> None:
        """Raise if `cut_over` would fail."""
        if self.why_no_cut_over is not None:
            raise NotPossible(f"{self.kind} has no atomic switch: {self.why_no_cut_over}", param="--cut-over")
        if self.kind != successor.kind or self.location.address != successor.location.address:
            raise NotPossible(
                f"a switch needs both collections in one store, but they are {self} and {successor}; "
                "point your application to the new one instead",
                param="--cut-over",
            )

    # For subclasses

    def _created(self, layout: Layout, mark: Mark) -> Found | None:
        """Create the collection. If another worker was faster, returns the collection that it created."""
        try:
            self._create(layout, mark)
        except Exception:
            if (found := self.find()) is None:
                raise
            return found
        return None

    @abstractmethod
    def _create(self, layout: Layout, mark: Mark) -> None: ...

    @abstractmethod
    def _adopt(self, layout: Layout, mark: Mark) -> None:
        """Set the mark of a collection that Penstock did not create."""

    @abstractmethod
    def _upsert(self, table: pa.Table) -> None:
        """Insert or replace rows. Ids are int64 or string, without duplicates."""

    def _is_transient(self, error: Exception) -> bool:
        """Whether the same call may succeed shortly."""
        return isinstance(error, StoreUnreachable)

    def _explained(self, error: Exception) -> Exception:
        """Convert an error of the store's package to one that names the store."""
        return error

    def _again(self, call: Callable[[], None]) -> None:
        pause_s = _FIRST_PAUSE_S
        for left in reversed(range(_MAX_TRIES)):
            try:
                return call()
            except Exception as error:
                if not self._is_transient(error):
                    raise self._explained(error) from None
                if left == 0:
                    raise StoreFailed(f"{self} failed {_MAX_TRIES} times: {error}") from None
            time.sleep(pause_s)
            pause_s *= 2
        return None

    def _metric(self, layout: Layout) -> Metric:
        if layout.dense_type is DenseType.BITS:
            return Metric.HAMMING
        return self.location.metric or model_metric(layout.stamp)

    def _refuse_unmarked(self) -> None:
        if not self.may_adopt:
            raise BadValue(
                f"{self} exists, and nothing says which model made its vectors; name another collection, or "
                "give --adopt if you know that they are of this model and these settings",
                param="--adopt",
            )

    def _refuse_mix(self, there: Mark, ours: Mark) -> None:
        if difference := there.stamp.difference(ours.stamp):
            raise BadValue(
                f"{self} holds vectors of another kind, which must not mix with these: {difference}; "
                "name another collection, or move this one with penstock migrate",
                param="--to",
            )
        if there.metric != ours.metric:
            raise BadValue(f"{self} compares vectors by {there.metric}, not by {ours.metric}", param="--to")

    def _check_columns(self, layout: Layout, found: Found) -> None:
        if found.columns is None:
            return
        names = [self.column(name) for name in layout.schema.names]
        if missing := [name for name in names if name not in found.columns]:
            raise BadValue(
                f"{self} has no column {', '.join(missing)}; it has: {', '.join(found.columns)}",
                param="--keep",
            )

    @property
    def search_metric(self) -> Metric:
        """The metric for searches. Without a mark it is the metric in the URL, or cosine."""
        return self.mark.metric if self.mark else self.location.metric or Metric.COSINE

    def column(self, name: str) -> str:
        """Return a column's name in the store. `?id=` and `?vector=` in the URL rename two columns."""
        if name == ID:
            return self.location.options.get("id", ID)
        if name == VECTOR:
            return self.location.options.get("vector", VECTOR)
        return name


def read_mark(text: str | bytes | None) -> Mark | None:
    """Decode the mark in a store's metadata; None if there is none."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Mark)
    except msgspec.DecodeError as error:
        raise BadValue(
            f"the collection's stamp cannot be read ({error}); a newer Penstock may have made it"
        ) from None


def query_column(queries: pa.Table) -> str:
    (name,) = [name for name in queries.column_names if name in (VECTOR, SPARSE, MULTI_VECTOR)]
    return str(name)


def need(module: str, extra: str) -> Any:
    """Import a store's package. If it is missing, the error says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise NotPossible(
            f"this store needs the package {error.name or module}; install Penstock with the extra {extra}",
            param="--to",
        ) from None

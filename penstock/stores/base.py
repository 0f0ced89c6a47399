"""What every vector store does, and the rules that hold for all of them.

A collection carries a mark: the stamp of its vectors (model, revision, settings) and its distance. A store
opens a collection for writing only if the mark is the writer's own, so two models never mix.
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

MARK_KEY = "penstock"  # under which a store's own metadata holds the mark
_MAX_TRIES = 5
_FIRST_PAUSE_S = 0.5
_METRICS = {"cosine": Metric.COSINE, "dot": Metric.DOT, "euclidean": Metric.L2}
Id = int | str


class StoreFailed(PenstockError):
    """A vector store could not be reached, or refused what it was sent."""

    status = 502
    code = "store_failed"


class StoreUnreachable(StoreFailed):
    """A vector store does not answer, or is busy. The same call may succeed a moment later."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection says about its vectors."""

    layout: int = 1
    stamp: Stamp
    metric: Metric

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def model_metric(stamp: Stamp) -> Metric:
    """The distance that the model is made for."""
    if stamp.similarity not in _METRICS:
        raise NotPossible(
            f"the model compares vectors by {stamp.similarity}, which vector stores do not; add "
            "metric=cosine, metric=dot or metric=l2 to the URL",
            param="--to",
        )
    return _METRICS[stamp.similarity]


class Hit(NamedTuple):
    """A row that a search found. `score` is higher for better rows, in the store's own unit."""

    id: Id
    score: float


@dataclass(frozen=True, slots=True)
class Found:
    """A collection that exists. `mark` is None if Penstock has not made it."""

    mark: Mark | None
    num_rows: int
    columns: tuple[str, ...] | None = None  # None: rows may have any


class VectorStore(ABC):
    """One collection of a vector store.

    Writing: `open`, `write` as often as there are tables, `finish`. Reading: `find`, `read`, `search`.
    A write is an upsert by id, so writing the same table twice changes nothing.
    """

    kind: ClassVar[str]
    extra: ClassVar[str]  # of pyproject.toml, with the packages that it needs
    dense_types: ClassVar[frozenset[DenseType]]
    metrics: ClassVar[frozenset[Metric]]
    max_dimension: ClassVar[int]
    has_schema: ClassVar[bool] = False  # every row has the same columns and types
    holds_sparse: ClassVar[bool] = False
    holds_multi_vectors: ClassVar[bool] = False
    why_no_cut_over: ClassVar[str | None] = None  # None: it has an atomic switch

    def __init__(self, location: Location) -> None:
        self.location = location
        self.may_adopt = False  # a collection without a stamp may be written to
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
        """Refuse what `open` would refuse, but change nothing. Returns how many rows there are."""
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
        """Insert the rows, or replace those whose ids are there. Of equal ids in a table the last one counts.

        A failure that may pass is tried again: the same rows twice are the same rows.
        """
        rows = last_of_each_id(plain_ids(table))
        if self.has_schema and self.layout is not None:
            rows = fitted(rows, self.layout.schema)
        if rows.num_rows:
            self._again(lambda: self._upsert(rows))

    def finish(self) -> None:  # noqa: B027
        """Make what was written visible and fast to search."""

    def close(self) -> None:  # noqa: B027
        """Close the connection."""

    def __enter__(self) -> VectorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading

    @abstractmethod
    def find(self) -> Found | None:
        """The collection as it is; None if there is none."""

    @abstractmethod
    def read(self, batch_rows: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """All rows: `id` and the named columns, or all columns that hold no vectors."""

    @abstractmethod
    def stored(self, ids: Sequence[Id], column: str | None = None) -> Mapping[Id, Any]:
        """Which of the ids the collection has, with the value of one column, or None."""

    @abstractmethod
    def search(self, queries: pa.Table, k: int) -> list[list[Hit]]:
        """The nearest rows of each query, exactly. `queries` has a column vector, sparse or multi_vector."""

    # Moving

    def cut_over(self, successor: VectorStore) -> VectorStore:
        """Point the name of this collection to `successor`, in one atomic step.

        Returns where the old rows are, for a rollback.
        """
        raise NotPossible(f"{self.kind} has no atomic switch: {self.why_no_cut_over}", param="--cut-over")

    def check_cut_over(self, successor: VectorStore) -> None:
        """Refuse a switch that `cut_over` could not make."""
        if self.why_no_cut_over is not None:
            raise NotPossible(f"{self.kind} has no atomic switch: {self.why_no_cut_over}", param="--cut-over")
        if self.kind != successor.kind or self.location.address != successor.location.address:
            raise NotPossible(
                f"a switch needs both collections in one store, but they are {self} and {successor}; "
                "point your application to the new one instead",
                param="--cut-over",
            )

    # For the stores themselves

    def _created(self, layout: Layout, mark: Mark) -> Found | None:
        """Create the collection; if another worker was faster, the one that it made."""
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
        """Give a collection of others this mark."""

    @abstractmethod
    def _upsert(self, table: pa.Table) -> None:
        """Insert or replace the rows. Ids are int64 or string, and each occurs once."""

    def _is_transient(self, error: Exception) -> bool:
        """Whether the same call may succeed a moment later."""
        return isinstance(error, StoreUnreachable)

    def _explained(self, error: Exception) -> Exception:
        """What the store's package raised, as an error with the store's name."""
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
        """How this collection is searched. One without a mark is taken to be as the URL says, or cosine."""
        return self.mark.metric if self.mark else self.location.metric or Metric.COSINE

    def column(self, name: str) -> str:
        """A column's name in the store: `?id=` and `?vector=` of the URL rename two of them."""
        if name == ID:
            return self.location.options.get("id", ID)
        if name == VECTOR:
            return self.location.options.get("vector", VECTOR)
        return name


def read_mark(text: str | bytes | None) -> Mark | None:
    """The mark that a store's metadata holds; None if it has none."""
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
    """Import a store's package, or say how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise NotPossible(
            f"this store needs the package {error.name or module}; install Penstock with the extra {extra}",
            param="--to",
        ) from None

"""The user's queries, embedded with each store's model to compare what the stores find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.checkpoint.revision import content_revision
from penstock.errors import BadValue
from penstock.jobs.blocks import VectorColumns
from penstock.jobs.formats import VectorKind
from penstock.jobs.inputs import open_source
from penstock.jobs.rows import choose_columns
from penstock.jobs.stamp import Stamp
from penstock.offline.engine import Engine
from penstock.offline.open import DescribedModel
from penstock.outputs.sparse import SparseRow
from penstock.stores.base import VectorStore
from penstock.stores.columns import VECTOR
from penstock.types import OutputDtype

_PREFERENCE = (VectorKind.DENSE, VectorKind.MULTI_VECTOR, VectorKind.SPARSE)
_ID_NAMES = ("id", "_id", "query_id")
_ROWS = 4096
_SEARCHES = 64  # queries per call to a store


@dataclass(frozen=True, slots=True)
class Queries:
    ids: list[str]
    texts: list[str]


class QueryPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of queries. If both fields are None, the model's own query prompt, if it has one."""

    name: str | None = None
    prompt: str | None = None

    def options(self) -> dict[str, Any]:
        if self.name is None and self.prompt is None:
            return {"input_type": "query"}
        return {"prompt_name": self.name, "prompt": self.prompt}


def read_queries(file: str, column: str | None) -> Queries:
    """Read queries from a file as `penstock embed` does. Without an id column they are numbered from 0."""
    with open_source(file, None) as source:
        id_column = next((name for name in _ID_NAMES if name in source.names), None)
        columns = choose_columns(source, column, id_column, ())
        queries = Queries([], [])
        for chunk in source.chunks(columns, start=0, stop=None, size=_ROWS):
            ids = chunk.numbers if id_column is None else chunk.carried[id_column]
            queries.ids.extend(map(str, ids if isinstance(ids, list) else ids.to_pylist()))
            queries.texts.extend(chunk.texts)
    if not queries.texts:
        raise BadValue(f"{file} has no queries", param="--queries")
    return queries


def embed_queries(
    queries: Queries, engine_fields: dict[str, Any], stamp: Stamp | None, prompt: QueryPrompt, flag: str
) -> pa.Table:
    """Embed queries for a search in a store with this stamp. Returns a table with one column of vectors."""
    described = DescribedModel.of(None, engine_fields)
    _check_revision(described, stamp, flag)
    with Engine.over(described.load()) as engine:
        return _embed(engine, queries.texts, stamp, prompt)


def _check_revision(described: DescribedModel, stamp: Stamp | None, flag: str) -> None:
    if stamp is None or not stamp.revision:
        return
    revision = content_revision(described.spec)
    if revision and revision != stamp.revision:
        raise BadValue(
            f"model {described.spec.name} is not the one that made the vectors: its revision is {revision}, "
            f"theirs is {stamp.revision} of {stamp.model}; name the model with {flag}",
            param=flag,
        )


def _embed(engine: Engine, texts: list[str], stamp: Stamp | None, prompt: QueryPrompt) -> pa.Table:
    stamp = stamp or Stamp(model=engine.spec.name, dimension=engine.spec.embed_dim)
    options: dict[str, Any] = {"truncate_prompt_tokens": -1, **prompt.options()}
    kind = next(kind for kind in _PREFERENCE if kind in stamp.kinds)
    if kind is VectorKind.SPARSE:
        values: Any = [SparseRow(*_arrays(row)) for row in engine.sparse(texts, **options)]
        return _table(kind, values, 0, OutputDtype.FLOAT32, stamp)
    dtype = OutputDtype(stamp.dtype)
    dtype = OutputDtype.FLOAT32 if dtype is OutputDtype.BFLOAT16 else dtype  # the type that stores keep
    options |= {"normalize": stamp.normalize, "dimensions": stamp.dimension, "dtype": dtype.value}
    embed = engine.embed if kind is VectorKind.DENSE else engine.token_embed
    values = embed(texts, **options)
    return _table(kind, values, values[0].shape[-1], dtype, stamp)


def _table(kind: VectorKind, values: Any, width: int, dtype: OutputDtype, stamp: Stamp) -> pa.Table:
    columns = VectorColumns({kind: width}, dtype, stamp, dense_name=VECTOR)
    return pa.table({columns.name(kind): columns.array(kind, values)})


def _arrays(terms: dict[int, float]) -> tuple[Any, Any]:
    return np.array(list(terms), np.int32), np.array(list(terms.values()), np.float32)


def search(store: VectorStore, queries: pa.Table, k: int) -> list[list[str]]:
    """Search a store. Returns the ids found for each query, as texts."""
    found: list[list[str]] = []
    for start in range(0, queries.num_rows, _SEARCHES):
        answers: Sequence[Any] = store.search(queries.slice(start, _SEARCHES), k)
        found += [[str(hit.id) for hit in hits] for hits in answers]
    return found

"""A vector store as the output of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.jobs.job import Sink
from penstock.jobs.stamp import Stamp
from penstock.stores.locations import Location, parse
from penstock.stores.urls import open_store


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """The store to open. Picklable, so that every process can open it."""

    location: Location
    adopt: bool

    def __call__(self) -> StoreSink:
        return StoreSink(self)

    def check(self, schema: Any, stamp: Stamp) -> int:
        """Refuse what cannot be written. Returns the number of rows in the collection."""
        with open_store(self.location, adopt=self.adopt) as store:
            return store.check_open(schema, stamp)


class StoreSink:
    """Writes the tables of a job to a store, and closes the store at the end."""

    def __init__(self, target: StoreTarget) -> None:
        self._store = open_store(target.location, adopt=target.adopt)

    def open(self, schema: pa.Schema, stamp: Stamp) -> None:
        self._store.open(schema, stamp)

    def write(self, table: pa.Table) -> None:
        self._store.write(table)

    def finish(self) -> None:
        with self._store:
            self._store.finish()


def store_sink(url: str, *, adopt: bool) -> Sink:
    """Create the output of `penstock embed --to URL`."""
    target = StoreTarget(parse(url), adopt)
    return Sink(label=target.location.shown, open=target, check=target.check)


def progress_folder(url: str) -> str:
    """Name the folder, in the working folder, where a run without --output keeps its progress."""
    location = parse(url)
    return f"{location.collection}.{location.kind}.parts"

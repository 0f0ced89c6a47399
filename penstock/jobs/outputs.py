"""Where the rows of a job go: a file, a folder of files, or a vector store.

Rows arrive in blocks. A block is committed: its rows are durable before its range of row numbers is recorded,
so a run that is killed at any moment knows which blocks to compute again. Committing a block again is
harmless, because a file has the same name and a store replaces rows by their id.
"""

from __future__ import annotations

from typing import Any, Protocol

from penstock.jobs.stamp import Stamp

ID, VECTOR, SPARSE, MULTI_VECTOR = "id", "vector", "sparse", "multi_vector"  # columns of a finished table


class TableSink(Protocol):
    """Takes finished tables, such as a vector store does.

    A table has `id`, the kept columns, and one or more of `vector` (fixed-size list), `sparse` (struct of
    `indices` and `values`) and `multi_vector` (list of fixed-size lists). Its schema carries the stamp.
    """

    def open(self, schema: Any, stamp: Stamp) -> None:
        """Create what is missing. `BadValue` if rows with another stamp or other columns are there."""

    def write(self, table: Any) -> None:
        """Store the rows durably. A row whose id is there already is replaced."""

    def finish(self) -> None:
        """Called once, after the last row: build indexes, close connections."""

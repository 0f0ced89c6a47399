"""The write speed of vector stores, and their share of the time of `penstock embed --to`.

    python -m benchmarks.store_load --rows 20000 lancedb:/tmp/bench/docs qdrant:/tmp/bench/q/docs

For each store, the table has rows/s of a first load of random vectors, of the same rows again (every row is
replaced), and of short texts through the default model, with the share of the time in the store's `write`.
The collections must not exist; they are left in place.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.jobs.job import Job, run
from penstock.jobs.stamp import Stamp
from penstock.stores import VectorStore, open_store
from penstock.stores.locations import parse
from penstock.stores.sink import store_sink


def tables(rows: int, batch: int, width: int) -> Iterator[pa.Table]:
    draw = np.random.default_rng(0)
    for first in range(0, rows, batch):
        count = min(batch, rows - first)
        values = draw.standard_normal((count, width), np.float32)
        yield pa.table(
            {
                "id": [f"document {row}" for row in range(first, first + count)],
                "title": [f"title {row}" for row in range(first, first + count)],
                "vector": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width),
            }
        )


def load(url: str, rows: int, batch: int, width: int) -> float:
    """Rows per second of writing, `finish` included. Preparing the tables is not counted."""
    seconds = 0.0
    with open_store(url) as store:
        for number, table in enumerate(tables(rows, batch, width)):
            if number == 0:
                store.open(table.schema, Stamp(model="random", dimension=width))
            began_s = time.perf_counter()
            store.write(table)
            seconds += time.perf_counter() - began_s
        began_s = time.perf_counter()
        store.finish()
        seconds += time.perf_counter() - began_s
        found = store.find()
    assert found is not None and found.num_rows == rows
    return rows / seconds


def embed(url: str, rows: int, device: str) -> tuple[float, float]:
    """Rows per second of `penstock embed --to`, and the share of its time in the store."""
    spent = [0.0]
    write = VectorStore.write

    def timed(self: VectorStore, table: pa.Table) -> None:
        began_s = time.perf_counter()
        write(self, table)
        spent[0] += time.perf_counter() - began_s

    VectorStore.write = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "texts.jsonl")
        lines = (
            json.dumps({"key": f"k{i}", "text": f"row {i} is about rivers and turbines"}) for i in range(rows)
        )
        file.write_text("\n".join(lines))
        job = Job(
            inputs=(str(file),),
            output=str(Path(folder, "progress.parts")),
            engine={"device": device},
            id_column="key",
            keep=("text",),
        )
        began_s = time.perf_counter()
        run(job, store_sink(url, adopt=False))
        seconds = time.perf_counter() - began_s
    VectorStore.write = write  # type: ignore[method-assign]
    return rows / seconds, spent[0] / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("urls", nargs="+", metavar="STORE")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--embed-rows", type=int, default=4_096)
    parser.add_argument("--batch-rows", type=int, default=2_048)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    for url in given.urls:
        first = load(url, given.rows, given.batch_rows, given.width)
        again = load(url, given.rows, given.batch_rows, given.width)
        result: dict[str, Any] = {
            "store": parse(url).kind,
            "load_rows_s": round(first),
            "again_rows_s": round(again),
        }
        if given.embed_rows:
            head, name, tail = url.rpartition(parse(url).collection)
            rate, share = embed(f"{head}{name}_texts{tail}", given.embed_rows, given.device)
            result |= {"embed_rows_s": round(rate), "share_in_store": round(share, 3)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

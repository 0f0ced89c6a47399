"""Chunks cross to engines in bundles, whose size follows the speed of the engines."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="bundles are rows of a dataset of Ray Data")

from penstock.jobs.rows import Chunk
from penstock.scale.chunks import BundleSize, bundled, unpacked


def size_after(seconds: float, bundles: int, size: BundleSize | None = None) -> int:
    size = size or BundleSize()
    for _ in range(bundles):
        size.took(seconds * size.num_chunks)
    return size.num_chunks


def test_bundles_grow_while_engines_are_fast() -> None:
    assert size_after(0.001, 3) == 1
    assert size_after(0.001, 4) == 2
    assert size_after(0.001, 100) == BundleSize.MAX_CHUNKS
    assert size_after(0.05, 100) == 4  # which take 0.2 s: eight would take longer than they should


def test_bundles_of_a_slow_engine_are_single_chunks_at_once() -> None:
    size = BundleSize()
    assert size_after(0.001, 100, size) == BundleSize.MAX_CHUNKS
    assert size_after(4.0, 1, size) == 1
    assert size_after(4.0, 100, size) == 1


def test_every_chunk_is_in_one_bundle_in_order() -> None:
    chunks = [Chunk(2 * at, 2, ["a", f"b{at}"], {"id": [at, at + 1]}, at / 50) for at in range(50)]
    tables = list(bundled(iter(chunks)))
    assert all(table.num_rows == 1 for table in tables)
    found = [chunk for table in tables for chunk in unpacked(table)]
    assert [(each.first, each.texts, each.carried, each.read) for each in found] == [
        (each.first, each.texts, each.carried, each.read) for each in chunks
    ]
    assert len(tables) < len(chunks)

"""The memory of an engine on a CPU stays bounded, however many shapes its steps have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runner.cpu_memory import HeapTrimmer
from tests.checkpoints import write_bert
from tests.waiting import PATIENCE_S

CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
MIB_IN_USE = """
import ctypes, sys
from penstock import Engine
from penstock.layers.cpu_shapes import padded_size

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Info
engine = Engine(sys.argv[1], device="cpu", threads=1)
def in_use():
    info = mallinfo2()
    return (info.uordblks + info.hblkhd) / 2**20

def run(lengths):
    for length in lengths:
        engine.embed([[7] * length], progress=False)
    print(in_use())

sizes = {padded_size(length) for length in range(1, 181)}
run([1, 2, 3])
run(sorted(sizes))
run([length for length in range(1, 181) if length not in sizes])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts glibc's heap")
def test_memory_stops_growing_while_new_shapes_keep_coming(tmp_path: Path) -> None:
    """A oneDNN primitive takes 0.5 MB, and each size needs four. If every length needed its own primitives,
    the last 100 lengths would add 200 MB."""
    folder = write_bert(tmp_path / "model", config={"max_position_embeddings": 264})
    environment = {name: value for name, value in os.environ.items() if name not in CACHES}
    ran = subprocess.run(
        [sys.executable, "-c", MIB_IN_USE, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    few, full, later = map(float, ran.stdout.split())
    assert full - few > 50, "no primitive was cached: this test measures nothing"
    assert later - full < 30


def test_the_heap_is_trimmed_when_the_process_has_grown() -> None:
    """Growth counts since the last trim, so that memory that a trim could not return does not cause another
    trim."""
    sizes, trims = iter([100, 300, 250, 350, 400, 310]), []
    trimmer = HeapTrimmer(lambda: trims.append(0), lambda: next(sizes) << 20)
    trimmer._trimmed_bytes = 100 << 20
    start = trimmer._checked_s
    seen = []
    for seconds in (1, 5, 6, 9, 10, 15, 20):  # it does not check again within 5 s of the last check
        trimmer.after_step(start + seconds)
        seen.append(len(trims))
    assert seen == [0, 0, 0, 0, 1, 1, 2] and trimmer._trimmed_bytes == 310 << 20

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from penstock.bench.load.store import Store, draw, write_store, write_tickets
from tests.waiting import PATIENCE_S

DRAWER = """
import sys
from penstock.bench.load.store import draw
fd = int(sys.argv[1])
sys.stdin.readline()
while (ticket := draw(fd)) is not None:
    sys.stdout.write(f"{ticket}\\n")
"""


def test_requests_are_stored_unchanged() -> None:
    requests = [b"one", b"", b"three" * 5000]
    fd = write_store(requests, np.array([0.5, 1.5]))
    store = Store(fd)
    os.close(fd)
    assert [store[i] for i in range(store.count)] == requests
    assert store.due_s == [0.5, 1.5]


def test_every_ticket_is_drawn_once_in_order() -> None:
    fd = write_tickets(5)
    assert [draw(fd) for _ in range(7)] == [0, 1, 2, 3, 4, None, None]
    os.close(fd)


def test_concurrent_processes_never_draw_the_same_ticket() -> None:
    fd = write_tickets(20_000)
    drawers = [
        subprocess.Popen(
            [sys.executable, "-c", DRAWER, str(fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            text=True,
        )
        for _ in range(3)
    ]
    found: list[int] = []
    for drawer in drawers:
        assert drawer.stdin is not None
        drawer.stdin.write("go\n")
        drawer.stdin.flush()
    for drawer in drawers:
        found += [int(line) for line in drawer.communicate(timeout=PATIENCE_S)[0].split()]
    os.close(fd)
    assert sorted(found) == list(range(20_000))

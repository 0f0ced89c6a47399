"""The processes of ranks, as seen in /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tests.e2e.server import ENGINE, Server

RANK = "penstock.runner.parallel.rank"


def ranks() -> dict[int, int]:
    """Process ids of ranks, with the process ids of their parents."""
    found = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            if RANK.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                if stat[0] != "Z":
                    found[int(folder.name)] = int(stat[1])
    return found


def own_ranks(server: Server) -> list[int]:
    engines = server.children(ENGINE)
    return [pid for pid, parent in ranks().items() if parent in engines]

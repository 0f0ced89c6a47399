"""`make schema-test`: schemathesis over the OpenAPI document of a server for each kind of model.

Fails if a reply is 5xx, if an answer's content, status, content type or headers do not match the document, or
if a route never succeeds on any server.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.server import serving
from tests.fuzz.exchange import Outcome
from tests.fuzz.fleet import FLAGS, KINDS
from tests.fuzz.schema_cases import run_schema_cases

MAX_SHOWN = 40
OPERATORS_PATHS = ("/v1/admin/", "/sleep", "/wake_up", "/is_sleeping", "/v1/load_lora", "/v1/unload_lora")
# These succeed only after an upload; tests/api and tests/clients use them in order.
UPLOAD_ROUTES = ("POST /v1/files", "POST /v1/batches")
UPLOADED_PATHS = ("/v1/files/", "/v1/batches/")


class Tally:
    """Counts of the answers, by dialect and by route."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.dialects = {
            f"{method.upper()} {path}": operation["tags"]
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        }
        self.cases: Counter[str] = Counter()  # by dialect
        self.answers: Counter[tuple[str, str]] = Counter()  # by dialect and status class
        self.kinds: Counter[tuple[str, bool]] = Counter()  # by kind and whether it succeeded
        self.succeeded: set[str] = set()  # routes
        self.faults: dict[tuple[str, str, str], tuple[int, str]] = {}  # count, and how to repeat the first

    def count(self, server: str, kind: str, route: str, outcome: Outcome, repeat: str) -> None:
        is_success = outcome.status is not None and outcome.status < 300
        self.kinds[kind, is_success] += 1
        for dialect in self.dialects[route]:
            self.cases[dialect] += 1
            self.answers[dialect, "none" if outcome.status is None else f"{outcome.status // 100}xx"] += 1
        if is_success:
            self.succeeded.add(route)
        if outcome.fault is not None:
            key = route, outcome.fault, outcome.detail
            number, first = self.faults.get(key, (0, f"{server}, {kind}: {repeat}"))
            self.faults[key] = number + 1, first

    @property
    def never_succeeded(self) -> list[str]:
        """Routes without a success, except admin routes (the servers have no admin key) and those that need
        an upload."""
        return sorted(
            route
            for route in set(self.dialects) - self.succeeded - set(UPLOAD_ROUTES)
            if not route.partition(" ")[2].startswith((*OPERATORS_PATHS, *UPLOADED_PATHS))
        )

    def table(self) -> str:
        rows = [("dialect", "cases", "2xx", "4xx", "5xx"), ("---",) * 5]
        for dialect, number in self.cases.items():
            statuses = (str(self.answers[dialect, status]) for status in ("2xx", "4xx", "5xx"))
            rows.append((dialect, str(number), *statuses))
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)

    def kinds_line(self) -> str:
        names = dict.fromkeys(kind for kind, _ in self.kinds)
        parts = [
            f"{name} {self.kinds[name, True] + self.kinds[name, False]} ({self.kinds[name, True]} succeeded)"
            for name in names
        ]
        return f"{self.kinds.total()} cases: " + ", ".join(parts)


def main() -> int:
    options = _options()
    work = Path(tempfile.mkdtemp(prefix="penstock-schema-"))
    kinds = options.servers or list(KINDS)
    tally: Tally | None = None
    for name in kinds:
        began_s = time.monotonic()
        more = ("--kv-cache-gb", "0.05", "--enable-tokenizer-info-endpoint", "--batch-folder")
        with serving(str(KINDS[name](work / name)), *FLAGS, *more, str(work / "batches")) as server:
            document = server.http.get("/openapi.json").json()
            tally = tally or Tally(document)
            seed = options.seed + zlib.crc32(name.encode())
            share = -(-options.cases // len(kinds))
            sent = run_schema_cases(server.url, share, seed, None, partial(tally.count, name))
        print(f"{name}: {sent} cases in {time.monotonic() - began_s:.0f} s", flush=True)
    assert tally is not None
    return _conclude(tally, is_whole=not options.servers)


def _conclude(tally: Tally, *, is_whole: bool) -> int:
    print("\n" + tally.table() + "\n\n" + tally.kinds_line())
    for (route, fault, detail), (number, first) in list(tally.faults.items())[:MAX_SHOWN]:
        print(f"\nFAULT {number} × {fault} at {route}: {detail}\n  first: {first[:2000]}")
    missing = tally.never_succeeded if is_whole else []
    print(f"\nroutes that never succeeded: {json.dumps(missing)}")
    return 1 if tally.faults or missing else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make schema-test", description=__doc__)
    parser.add_argument("--cases", type=int, default=6_000, help="cases over all servers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", nargs="*", choices=list(KINDS), help="default: all")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""A client that sends single rows beside one that sends requests of 2,048 rows, on one server.

    python benchmarks/fairness.py [--seconds 30] [--rows 2048] [--base-url URL] [--flags="--threads 1"]

Each client waits for its answer before it sends again. The latency of the single rows is measured twice: on
the server alone, and beside the large requests. No two requests share a text. Prints a line of a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from urllib.parse import urlsplit

from http_load import start
from texts import natural_texts

PHASES = ("tokenize", "queue", "device", "total")
MAX_CHARS = 100  # of a text: about 25 tokens


@dataclass
class Client:
    """One connection that posts bodies until the time is up."""

    bodies: Iterator[bytes]
    seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)  # as the server reports them, in ms
    statuses: dict[int, int] = field(default_factory=dict)

    def run(self, address: tuple[str, int], until: float, pause_s: float = 0.0) -> None:
        connection = HTTPConnection(*address, timeout=120)
        while time.perf_counter() < until:
            body, began = next(self.bodies), time.perf_counter()
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            self.statuses[response.status] = self.statuses.get(response.status, 0) + 1
            if response.status == 200:
                self.seconds.append(time.perf_counter() - began)
                self.phases.append({name: float(response.getheader(f"x-{name}-ms") or 0) for name in PHASES})
            else:
                time.sleep(float(response.getheader("retry-after") or 1))
            time.sleep(pause_s)
        connection.close()


def bodies(texts: list[str], rows: int, name: str) -> Iterator[bytes]:
    for number in itertools.count():
        own = (texts[(number * rows + at) % len(texts)] for at in range(rows))
        yield json.dumps({"input": [f"{name}{number} {text}" for text in own]}).encode()


def percentile_ms(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(address: tuple[str, int], options: argparse.Namespace) -> None:
    texts = [text[:MAX_CHARS] for text in natural_texts(options.rows)]
    warm = Client(bodies(texts, 64, "w"))
    warm.run(address, time.perf_counter() + 2)
    alone = Client(bodies(texts, 1, "a"))
    alone.run(address, time.perf_counter() + options.seconds / 3, options.pause)
    large, single = Client(bodies(texts, options.rows, "l")), Client(bodies(texts, 1, "s"))
    began = time.perf_counter()
    thread = threading.Thread(target=large.run, args=(address, began + options.seconds))
    thread.start()
    single.run(address, began + options.seconds, options.pause)
    thread.join()
    print("slowest single rows, ms by client and server:")
    for seconds, phases in sorted(zip(single.seconds, single.phases, strict=True), key=lambda e: -e[0])[:5]:
        print(f"{1000 * seconds:.0f}: " + ", ".join(f"{name} {phases[name]:.0f}" for name in PHASES))
    rows_per_s = len(large.seconds) * options.rows / (time.perf_counter() - began)
    print(f"single rows: {single.statuses}, large requests: {large.statuses}")
    print("| alone p50 / p99 ms | beside p50 / p99 / max ms | large rows/s | large p50 s |")
    print("|---|---|---|---|")
    print(
        f"| {percentile_ms(alone.seconds, 0.5):.0f} / {percentile_ms(alone.seconds, 0.99):.0f} "
        f"| {percentile_ms(single.seconds, 0.5):.0f} / {percentile_ms(single.seconds, 0.99):.0f} "
        f"/ {percentile_ms(single.seconds, 1):.0f} "
        f"| {rows_per_s:.0f} | {statistics.median(large.seconds):.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between two single rows")
    parser.add_argument("--base-url", help="a server that runs already; by default one is started")
    parser.add_argument("--flags", default="", help="flags for the server that is started")
    options = parser.parse_args()
    if options.base_url:
        url = urlsplit(options.base_url)
        measure((url.hostname or "127.0.0.1", url.port or 80), options)
        return
    with start(["--device", "cpu", *options.flags.split()]) as server:
        measure(("127.0.0.1", server.port), options)


if __name__ == "__main__":
    main()

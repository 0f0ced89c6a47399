"""A client that sends single rows beside clients that send as much as they can, on one server.

    python benchmarks/fairness.py [--batch-clients 1 4] [--flood 200] [--before TREE] [--rounds 3]

Each connection waits for its answer before it sends again. A batch client sends requests of 2,048 rows. The
flood is one client with many connections from its own address, which send single rows. The latency of the
single rows is measured on the otherwise idle server, and beside batch clients and flood. With `--before`, a
server of that checkout and one of this checkout take turns. No two requests share a text. Prints a table row
for each round, and the medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from http_load import start
from texts import natural_texts

FLOOD_ADDRESS = "127.0.0.2"  # differs from the address of the single rows
PHASES = ("tokenize", "queue", "device", "total")
MAX_CHARS = 100  # per text: about 25 tokens


@dataclass
class Client:
    """One connection that posts bodies until the time is up."""

    bodies: Iterator[bytes]
    seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)  # in ms, reported by the server
    statuses: dict[int, int] = field(default_factory=dict)
    source: tuple[str, int] | None = None  # local address

    def run(self, address: tuple[str, int], until: float, pause_s: float = 0.0) -> None:
        connection = HTTPConnection(*address, timeout=120, source_address=self.source)
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
    if not seconds:
        return math.nan  # no request was answered
    ordered = sorted(seconds)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Figures:
    """The results of one round. Latencies are those of the single rows, in ms."""

    alone_p50: float
    p50: float
    p99: float
    longest: float
    num_single: int
    batch_rows_per_s: float
    flood_rows_per_s: float

    def line(self, *labels: object) -> str:
        numbers = [f"{value:.0f}" for value in astuple(self)]
        return "| " + " | ".join([*map(str, labels), *numbers]) + " |"


HEADINGS = "alone p50 | beside p50 | p99 | max | single rows | batch rows/s | flood rows/s"


def measure(address: tuple[str, int], num_batch: int, options: argparse.Namespace) -> Figures:
    texts = [text[:MAX_CHARS] for text in natural_texts(options.rows)]
    Client(bodies(texts, 64, "w")).run(address, time.perf_counter() + 2)
    alone = Client(bodies(texts, 1, "a"))
    alone.run(address, time.perf_counter() + options.seconds / 4, options.pause)
    batches = [Client(bodies(texts, options.rows, f"l{number}-")) for number in range(num_batch)]
    flood = [
        Client(bodies(texts, 1, f"f{number}-"), source=(FLOOD_ADDRESS, 0)) for number in range(options.flood)
    ]
    single = Client(bodies(texts, 1, "s"))
    began = time.perf_counter()
    until = began + options.seconds
    threads = [threading.Thread(target=each.run, args=(address, until)) for each in (*batches, *flood)]
    for thread in threads:
        thread.start()
    single.run(address, until, options.pause)
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - began
    if options.verbose:
        report_slowest(single)
    return Figures(
        percentile_ms(alone.seconds, 0.5),
        *(percentile_ms(single.seconds, share) for share in (0.5, 0.99, 1)),
        len(single.seconds),
        sum(len(each.seconds) for each in batches) * options.rows / elapsed_s,
        sum(len(each.seconds) for each in flood) / elapsed_s,
    )


def report_slowest(single: Client) -> None:
    print(f"single rows: {single.statuses}; the slowest, in ms by client and server:")
    for seconds, phases in sorted(zip(single.seconds, single.phases, strict=True), key=lambda e: -e[0])[:5]:
        print(f"{1000 * seconds:.0f}: " + ", ".join(f"{name} {phases[name]:.0f}" for name in PHASES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rows", type=int, default=2048, help="rows per request of a batch client")
    parser.add_argument("--batch-clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--flood", type=int, default=0, help="connections of the flooding client")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between single rows")
    parser.add_argument("--before", help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--base-url", help="use a running server; by default one is started")
    parser.add_argument("--flags", default="", help="more flags for the server")
    parser.add_argument("--verbose", action="store_true", help="show the slowest single rows")
    options = parser.parse_args()
    here = str(Path(__file__).resolve().parent.parent)
    trees = {"after": here} if options.before is None else {"before": options.before, "after": here}
    print(f"| batch clients | | {HEADINGS} |\n" + "|---" * 9 + "|")
    for num_batch in options.batch_clients:
        found: dict[str, list[Figures]] = {name: [] for name in trees}
        for _ in range(options.rounds):
            for name, tree in trees.items():
                if options.base_url:
                    url = urlsplit(options.base_url)
                    figures = measure((url.hostname or "127.0.0.1", url.port or 80), num_batch, options)
                else:
                    with start(["--device", "cpu", *options.flags.split()], tree) as server:
                        figures = measure(("127.0.0.1", server.port), num_batch, options)
                found[name].append(figures)
                print(figures.line(num_batch, name), flush=True)
        for name in trees if options.rounds > 1 else ():
            columns = zip(*map(astuple, found[name]), strict=True)
            print(Figures(*map(statistics.median, columns)).line(num_batch, f"{name}, median"), flush=True)


if __name__ == "__main__":
    main()

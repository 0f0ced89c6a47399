"""Scenario S2: token vectors of 16 texts per request as base64, from four clients.

python benchmarks/scenario_s2.py --base-url http://127.0.0.1:9256 --model NAME [--seconds 120] [--different]

All clients post the same body, as the scenario demands, so identical rows in flight are deduplicated. With
--different no two requests share a text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.parse import urlsplit

REPEATS = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192)
UNIT = "retrieval benchmark sentence "


def client(
    base_url: str,
    bodies: Iterator[bytes],
    until: float,
    samples: list[tuple[float, int, int]],
    errors: list[str],
) -> None:
    """Open a connection, post the body and read the whole response, until the time is up."""
    address = urlsplit(base_url)
    while time.perf_counter() < until:
        body = next(bodies)
        began = time.perf_counter()
        connection = HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=60)
        try:
            connection.request("POST", "/pooling", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        except OSError as error:
            errors.append(str(error))
            continue
        finally:
            connection.close()
        seconds = time.perf_counter() - began
        if response.status != 200:
            errors.append(content[:200].decode(errors="replace"))
            continue
        tail = content[content.rindex(b'"usage"') :]
        tokens = int(tail.split(b'"prompt_tokens":')[1].split(b",")[0])
        samples.append((seconds, tokens, len(content)))


def body_of(model: str, before: str = "") -> bytes:
    fields = {
        "model": model,
        "task": "token_embed",
        "truncate_prompt_tokens": -1,
        "encoding_format": "base64",
        "input": [before + UNIT * count for count in REPEATS],
    }
    return json.dumps(fields).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:9256")
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--different", action="store_true", help="no two requests share a text")
    options = parser.parse_args()

    def bodies(client: int) -> Iterator[bytes]:
        if not options.different:
            return itertools.repeat(body_of(options.model))
        return (body_of(options.model, f"{client} {number} ") for number in itertools.count())

    samples: list[tuple[float, int, int]] = []
    errors: list[str] = []
    began = time.perf_counter()
    until = began + options.seconds
    threads = [
        threading.Thread(target=client, args=(options.base_url, bodies(i), until, samples, errors))
        for i in range(options.clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - began
    if not samples:
        raise SystemExit(f"no request succeeded; first error: {errors[0] if errors else 'none'}")
    ms = sorted(seconds * 1000 for seconds, _, _ in samples)
    percentile = statistics.quantiles(ms, n=100, method="inclusive") if len(ms) > 1 else ms * 99
    print(
        f"completed {len(samples)}, errors {len(errors)}, {len(samples) / elapsed:.2f} req/s, "
        f"{sum(t for _, t, _ in samples) / elapsed:,.0f} input tokens/s, "
        f"{samples[0][2] / 1e6:.1f} MB a response"
    )
    print(
        f"mean {statistics.mean(ms):.1f} ms, p50 {percentile[49]:.1f}, "
        f"p95 {percentile[94]:.1f}, p99 {percentile[98]:.1f}"
    )


if __name__ == "__main__":
    main()

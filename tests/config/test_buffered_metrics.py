from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from penstock.buffered_metrics import BufferedMetrics

BUCKETS = (0.001, 0.01, 0.1, 1.0)


def metrics() -> tuple[CollectorRegistry, Counter, Histogram]:
    registry = CollectorRegistry()
    counter = Counter("seen", "Seen", ["kind"], registry=registry)
    return registry, counter, Histogram("seconds", "Seconds", ["kind"], buckets=BUCKETS, registry=registry)


def shown(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]


def test_what_is_tallied_and_flushed_is_what_would_have_been_observed() -> None:
    draw = random.Random(3)
    direct, counter, histogram = metrics()
    later, tallied_counter, tallied_histogram = metrics()
    tallies = BufferedMetrics()
    for number in range(500):
        kind = draw.choice(["a", "b"])
        value = draw.choice([*BUCKETS, draw.randrange(4096) / 2048])  # the bounds themselves too
        value = round(value * 1024) / 1024 if number % 2 else value
        counter.labels(kind).inc(3)
        histogram.labels(kind).observe(value)
        tallies.counter(tallied_counter, kind).inc(3)
        tallies.histogram(tallied_histogram, kind).observe(value)
        if number % 77 == 0:
            tallies.flush()
    tallies.flush()
    tallies.flush()  # nothing is counted twice
    assert [line for line in shown(later) if "_sum" not in line] == [
        line for line in shown(direct) if "_sum" not in line
    ]
    for one, other in zip(sums(later), sums(direct), strict=True):
        assert abs(one - other) < 1e-9


def sums(registry: CollectorRegistry) -> list[float]:
    return [float(line.split()[-1]) for line in shown(registry) if line.startswith("seconds_sum")]


def test_nothing_is_shown_before_the_flush() -> None:
    registry, counter, _ = metrics()
    tallies = BufferedMetrics()
    tallies.counter(counter, "a").inc()
    assert registry.get_sample_value("seen_total", {"kind": "a"}) == 0
    tallies.flush()
    assert registry.get_sample_value("seen_total", {"kind": "a"}) == 1

from __future__ import annotations

import random
from importlib.metadata import version

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from penstock.buffered_metrics import BucketWriter, BufferedMetrics, ObservationList, buffered_histogram

BUCKETS = (0.001, 0.01, 0.1, 1.0)


def metrics() -> tuple[CollectorRegistry, Counter, Histogram]:
    registry = CollectorRegistry()
    counter = Counter("seen", "Seen", ["kind"], registry=registry)
    return registry, counter, Histogram("seconds", "Seconds", ["kind"], buckets=BUCKETS, registry=registry)


def exposed(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]


def exposed_sums(registry: CollectorRegistry) -> list[float]:
    return [float(line.split()[-1]) for line in exposed(registry) if line.startswith("seconds_sum")]


@pytest.fixture(params=["internals", "public interface"])
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """The class that writes to histograms if the internals of prometheus_client are present or missing."""
    if request.param == "internals":
        return BucketWriter
    monkeypatch.setattr("penstock.buffered_metrics._INTERNALS", ("_upper_bounds", "_no_such_attribute"))
    return ObservationList


def test_flushed_metrics_equal_those_observed_directly(access: type) -> None:
    draw = random.Random(3)
    direct, counter, histogram = metrics()
    flushed, buffered_counter, buffered = metrics()
    buffer = BufferedMetrics()
    assert isinstance(buffer.histogram(buffered, "a"), access)
    for number in range(500):
        kind = draw.choice(["a", "b"])
        value = draw.choice([*BUCKETS, draw.randrange(4096) / 2048])  # includes exact bucket bounds
        value = round(value * 1024) / 1024 if number % 2 else value
        counter.labels(kind).inc(3)
        histogram.labels(kind).observe(value)
        buffer.counter(buffered_counter, kind).inc(3)
        buffer.histogram(buffered, kind).observe(value)
        if number % 77 == 0:
            buffer.flush()
    buffer.flush()
    buffer.flush()  # must not count anything twice
    assert [line for line in exposed(flushed) if "_sum" not in line] == [
        line for line in exposed(direct) if "_sum" not in line
    ]
    assert exposed_sums(flushed) == pytest.approx(exposed_sums(direct), abs=1e-9)


def test_nothing_is_exposed_before_the_flush(access: type) -> None:
    registry, counter, histogram = metrics()
    buffer = BufferedMetrics()
    buffer.counter(counter, "a").inc()
    buffer.histogram(histogram, "a").observe(0.5)
    for expected in (0, 1):
        assert registry.get_sample_value("seen_total", {"kind": "a"}) == expected
        assert registry.get_sample_value("seconds_count", {"kind": "a"}) == expected
        buffer.flush()


def test_the_installed_prometheus_client_has_the_internals_that_the_fast_path_uses() -> None:
    _, _, histogram = metrics()
    assert BucketWriter.supports(histogram.labels("a")), (
        f"prometheus_client {version('prometheus_client')} has changed the internals of Histogram; metrics "
        "still work, one observation at a time. Adapt penstock.buffered_metrics.BucketWriter to the release."
    )


class RenamedInternals:
    """A histogram of a prometheus_client release without `_upper_bounds`."""

    _sum = None
    _buckets = ()


class ChangedInternals:
    """A histogram of a prometheus_client release with plain numbers as buckets."""

    _sum = 0.0
    _buckets = (0.0,)
    _upper_bounds = (float("inf"),)


@pytest.mark.parametrize("changed", [RenamedInternals(), ChangedInternals()])
def test_changed_internals_are_noticed(changed: Histogram) -> None:
    assert isinstance(buffered_histogram(changed), ObservationList)

"""Metrics that are counted in plain numbers and flushed to Prometheus a few times a second.

In a server with several processes, Prometheus keeps its values in files that all processes share. Writing to
them for every request would cost more than the request.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Protocol

from prometheus_client import Counter, Histogram

_INTERNALS = ("_upper_bounds", "_buckets", "_sum")  # private attributes that `BucketWriter` uses


class BufferedCounter:
    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._count = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self._count += amount

    def flush(self) -> None:
        if self._count:
            self._counter.inc(self._count)
            self._count = 0.0


class BufferedHistogram(Protocol):
    """A histogram whose labels are set."""

    def observe(self, value: float) -> None: ...

    def flush(self) -> None: ...


class BucketWriter:
    """Counts observations by bucket and adds whole buckets to the histogram.

    prometheus_client has no public way to add more than one observation at a time. Only this class uses its
    internals; `supports` returns whether the installed release has them.
    """

    @staticmethod
    def supports(histogram: Histogram) -> bool:
        if not all(hasattr(histogram, name) for name in _INTERNALS):
            return False
        values: list[Any] = [histogram._sum, *histogram._buckets]
        has_all_buckets = len(histogram._buckets) == len(histogram._upper_bounds)
        return has_all_buckets and all(callable(getattr(value, "inc", None)) for value in values)

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._upper_bounds = histogram._upper_bounds
        self._counts = [0] * len(self._upper_bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._upper_bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        for bucket, count in enumerate(self._counts):
            if count:
                self._histogram._buckets[bucket].inc(count)
                self._counts[bucket] = 0
        if self._sum:
            self._histogram._sum.inc(self._sum)
            self._sum = 0.0


class ObservationList:
    """Keeps observations and reports them one by one: slower, but uses the public interface only."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._values: list[float] = []

    def observe(self, value: float) -> None:
        self._values.append(value)

    def flush(self) -> None:
        values, self._values = self._values, []
        for value in values:
            self._histogram.observe(value)


def buffered_histogram(histogram: Histogram) -> BufferedHistogram:
    return BucketWriter(histogram) if BucketWriter.supports(histogram) else ObservationList(histogram)


class BufferedMetrics:
    """The buffered metrics of one process, by metric and labels. Each is created on first use."""

    def __init__(self) -> None:
        self._counters: dict[tuple[Counter, tuple[str, ...]], BufferedCounter] = {}
        self._histograms: dict[tuple[Histogram, tuple[str, ...]], BufferedHistogram] = {}

    def counter(self, metric: Counter, *labels: str) -> BufferedCounter:
        if (buffered := self._counters.get((metric, labels))) is None:
            buffered = BufferedCounter(metric.labels(*labels) if labels else metric)
            self._counters[metric, labels] = buffered
        return buffered

    def histogram(self, metric: Histogram, *labels: str) -> BufferedHistogram:
        if (buffered := self._histograms.get((metric, labels))) is None:
            buffered = buffered_histogram(metric.labels(*labels) if labels else metric)
            self._histograms[metric, labels] = buffered
        return buffered

    def flush(self) -> None:
        for counter in self._counters.values():
            counter.flush()
        for histogram in self._histograms.values():
            histogram.flush()

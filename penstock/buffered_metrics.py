"""Counts kept in plain numbers and handed to Prometheus a few times a second: its values lie in files that
all processes share, and writing there for every request would cost more than the request."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Counter, Histogram


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


class BufferedHistogram:
    """A histogram, its labels given. Whole buckets are added at a time, which the library has no name for."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds = histogram._upper_bounds
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        for bucket, count in enumerate(self._counts):
            if count:
                self._histogram._buckets[bucket].inc(count)
                self._counts[bucket] = 0
        if self._sum:
            self._histogram._sum.inc(self._sum)
            self._sum = 0.0


class BufferedMetrics:
    """The tallies of one process, by metric and labels; each is made when first asked for."""

    def __init__(self) -> None:
        self._counters: dict[tuple[Counter, tuple[str, ...]], BufferedCounter] = {}
        self._histograms: dict[tuple[Histogram, tuple[str, ...]], BufferedHistogram] = {}

    def counter(self, metric: Counter, *labels: str) -> BufferedCounter:
        if (tally := self._counters.get((metric, labels))) is None:
            tally = BufferedCounter(metric.labels(*labels) if labels else metric)
            self._counters[metric, labels] = tally
        return tally

    def histogram(self, metric: Histogram, *labels: str) -> BufferedHistogram:
        if (tally := self._histograms.get((metric, labels))) is None:
            tally = BufferedHistogram(metric.labels(*labels) if labels else metric)
            self._histograms[metric, labels] = tally
        return tally

    def flush(self) -> None:
        for counter in self._counters.values():
            counter.flush()
        for histogram in self._histograms.values():
            histogram.flush()

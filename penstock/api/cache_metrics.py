"""Prometheus metrics of the result cache."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

LOOKUPS = Counter("penstock_result_cache_lookups", "Rows that the result cache was asked for", ["model"])
HITS = Counter(
    "penstock_result_cache_hits", "Rows answered from the result cache, by store", ["model", "store"]
)
BYTES = Gauge(
    "penstock_result_cache_bytes", "Bytes that the result cache holds in memory", multiprocess_mode="livesum"
)
EVICTIONS = Counter(
    "penstock_result_cache_evictions", "Rows that left the result cache in memory to make room for others"
)
ERRORS = Counter(
    "penstock_result_cache_errors",
    "Failures of the result cache's store: time limits, lost connections, damaged rows, rows not written",
    ["store", "reason"],
)

"""Prometheus metrics of an API process, and the page that shows those of all processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from penstock.api.metric_aliases import Kinds, alias_text
from penstock.buffered_metrics import BufferedCounter, BufferedHistogram, BufferedMetrics
from penstock.errors import (
    Cancelled,
    KeyLimitReached,
    ModelNotAllowed,
    PenstockError,
    QueueFull,
    QueueTooSlow,
    TooManyRequests,
)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
REQUESTS = Counter(
    "penstock_requests",
    "Requests by route, status and model; without a model where none was found",
    ["route", "status", "model"],
)
REQUEST_SECONDS = Histogram(
    "penstock_request_seconds", "End-to-end time of a request", ["route", "model"], buckets=_SECONDS
)
ROWS = Counter("penstock_rows", "Rows received", ["model"])
TOKENS = Counter("penstock_tokens", "Tokens received", ["model"])
GENERATED = Counter("penstock_generated_tokens", "Tokens generated", ["model"])
FIRST_TOKEN_SECONDS = Histogram(
    "penstock_first_token_seconds",
    "Time from arrival to a request's first token",
    ["model"],
    buckets=_SECONDS,
)
PHASES = Histogram(
    "penstock_phase_seconds",
    "Time of a request spent tokenising, queued, on the device and encoding",
    ["phase", "model"],
    buckets=_SECONDS,
)
QUEUE_SECONDS = Histogram(
    "penstock_queue_seconds", "Time from arrival to the first step", ["model"], buckets=_SECONDS
)
IN_FLIGHT = Gauge("penstock_requests_in_flight", "Requests in flight", multiprocess_mode="livesum")
REJECTED = Counter(
    "penstock_rejected",
    "Requests refused because the server was full: too many requests or tokens, or too long a wait",
    ["reason"],
)
for _reason in (QueueFull, TooManyRequests, QueueTooSlow):
    REJECTED.labels(_reason.reason)  # shown from the start, with 0
IGNORED_FIELDS = Counter(
    "penstock_ignored_fields", "Unknown fields of requests that were ignored, by route", ["route"]
)
RETRIED = Counter(
    "penstock_retried_requests",
    "Requests that ran again on another engine, because theirs stopped or hung",
    ["model"],
)
CANCELLED = Counter("penstock_cancelled", "Requests whose client disconnected")
CONNECTIONS = Gauge("penstock_connections", "Open connections", multiprocess_mode="livesum")
BUFFERED_BYTES = Gauge(
    "penstock_buffered_bytes",
    "Bytes of request bodies and large answers that are held",
    multiprocess_mode="livesum",
)
CONNECTION_LIMITS = Counter(
    "penstock_connection_limits", "Connections and requests that met a limit, by limit", ["limit"]
)


class EngineUp:
    """Which engines can serve, as the process that answers a scrape sees them.

    It is in no shared file, so an unloaded model leaves nothing behind.
    """

    _labelnames = ("model", "engine")

    def describe(self) -> list[Metric]:
        return [self._family()]

    def family(self, models: Mapping[str, Sequence[bool]]) -> Metric:
        family = self._family()
        for model, engines in models.items():
            for number, is_up in enumerate(engines):
                family.add_metric([model, str(number)], 1 if is_up else 0)
        return family

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "penstock_engine_up", "1 when an engine of a model can serve", labels=self._labelnames
        )


ENGINE_UP = EngineUp()
KEY_REQUESTS = Counter("penstock_key_requests", "Requests by the name of their API key", ["key"])
KEY_TOKENS = Counter(
    "penstock_key_tokens", "Tokens received and generated, by the name of the API key", ["key"]
)
KEY_REFUSED = Counter(
    "penstock_key_refused",
    "Requests refused because of their API key, by its name: too many requests or tokens, or a model",
    ["key", "reason"],
)
LORA_REQUESTS = Counter(
    "penstock_lora_requests", "Requests with a LoRA adapter, by model and adapter", ["model", "adapter"]
)
LORA_IN_FLIGHT = Gauge(
    "penstock_lora_requests_in_flight",
    "Requests with a LoRA adapter that are in flight, by model and adapter",
    ["model", "adapter"],
    multiprocess_mode="livesum",
)
BATCHES = Gauge(
    "penstock_batches", "Batches in the folder, by status", ["status"], multiprocess_mode="livemax"
)
BATCH_LINES = Counter("penstock_batch_lines", "Lines of batches that were answered", ["endpoint", "result"])
BATCH_LINES_WAITING = Gauge(
    "penstock_batch_lines_waiting",
    "Lines of the batches that run which are not answered",
    ["endpoint"],
    multiprocess_mode="livesum",
)

PUBLISH_INTERVAL_S = 0.1


class ApiMetrics:
    """Records events in memory, and adds them up a moment later for the files that all processes share. This
    costs half as much as updating metrics during each request."""

    def __init__(self) -> None:
        self._buffer = BufferedMetrics()
        self._due = False
        self._finished: list[tuple[str, int, str, float]] = []  # route, status, model, seconds
        self._worked: list[tuple[str, int, int]] = []  # model, rows, tokens
        self._phase_times: list[tuple[str, float, float, float, float]] = []  # model, then as in `phases`
        # Metrics of most requests, by route, status and model, or by model alone: one look-up for each.
        self._requests: dict[tuple[str, int, str], tuple[BufferedCounter, BufferedHistogram]] = {}
        self._work: dict[str, tuple[BufferedCounter, BufferedCounter]] = {}
        self._phases: dict[str, tuple[BufferedHistogram, ...]] = {}

    def request(self, route: str, status: int, model: str, seconds: float) -> None:
        self._finished.append((route, status, model, seconds))
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(PUBLISH_INTERVAL_S, self.publish)

    def refused(self, error: PenstockError) -> None:
        if isinstance(error, QueueFull):
            REJECTED.labels(error.reason).inc()
        elif isinstance(error, Cancelled):
            CANCELLED.inc()

    def key_request(self, key: str) -> None:
        self._buffer.counter(KEY_REQUESTS, key).inc()

    def key_tokens(self, key: str, tokens: int) -> None:
        self._buffer.counter(KEY_TOKENS, key).inc(tokens)

    def key_refused(self, key: str, error: PenstockError) -> None:
        if isinstance(error, KeyLimitReached):
            KEY_REFUSED.labels(key, error.reason.removeprefix("key_")).inc()
        elif isinstance(error, ModelNotAllowed):
            KEY_REFUSED.labels(key, "model").inc()

    def adapter_begins(self, model: str, adapter: str) -> None:
        self._buffer.counter(LORA_REQUESTS, model, adapter).inc()
        LORA_IN_FLIGHT.labels(model, adapter).inc()

    def adapter_ends(self, model: str, adapter: str) -> None:
        LORA_IN_FLIGHT.labels(model, adapter).dec()

    def ignored_fields(self, route: str, count: int) -> None:
        IGNORED_FIELDS.labels(route).inc(count)

    def _requests_of(self, route: str, status: int, model: str) -> tuple[BufferedCounter, BufferedHistogram]:
        made = self._requests[route, status, model] = (
            self._buffer.counter(REQUESTS, route, str(status), model),
            self._buffer.histogram(REQUEST_SECONDS, route, model),
        )
        return made

    def work(self, model: str, num_rows: int, num_tokens: int) -> None:
        self._worked.append((model, num_rows, num_tokens))

    def _work_of(self, model: str) -> tuple[BufferedCounter, BufferedCounter]:
        made = self._work[model] = self._buffer.counter(ROWS, model), self._buffer.counter(TOKENS, model)
        return made

    def generated(self, model: str, tokens: int) -> None:
        GENERATED.labels(model).inc(tokens)

    def first_token(self, model: str, seconds: float) -> None:
        FIRST_TOKEN_SECONDS.labels(model).observe(seconds)

    def phases(
        self, model: str, *, tokenize_s: float, queue_s: float, device_s: float, encode_s: float
    ) -> None:
        self._phase_times.append((model, tokenize_s, queue_s, device_s, encode_s))

    def _phases_of(self, model: str) -> tuple[BufferedHistogram, ...]:
        phases = [
            self._buffer.histogram(PHASES, name, model) for name in ("tokenize", "queue", "device", "encode")
        ]
        made = self._phases[model] = (*phases, self._buffer.histogram(QUEUE_SECONDS, model))
        return made

    def publish(self) -> None:
        self._due = False
        self._add_up()
        self._buffer.flush()

    def _add_up(self) -> None:
        finished, self._finished = self._finished, []
        for route, status, model, seconds in finished:
            key = route, status, model
            count, duration = self._requests.get(key) or self._requests_of(*key)
            count.inc()
            duration.observe(seconds)
        worked, self._worked = self._worked, []
        for model, num_rows, num_tokens in worked:
            rows, tokens = self._work.get(model) or self._work_of(model)
            rows.inc(num_rows)
            tokens.inc(num_tokens)
        phase_times, self._phase_times = self._phase_times, []
        for model, tokenize_s, queue_s, device_s, encode_s in phase_times:
            tokenize, queue, device, encode, waited = self._phases.get(model) or self._phases_of(model)
            tokenize.observe(tokenize_s)
            queue.observe(queue_s)
            device.observe(device_s)
            encode.observe(encode_s)
            waited.observe(queue_s)


def render(
    in_flight: int,
    engines_up: Mapping[str, Sequence[bool]],
    aliases: Collection[str] = (),
    kinds: Kinds | None = None,
) -> bytes:
    """The metrics of every process of this server, as Prometheus reads them.

    `engines_up` says for each model which engines can serve. `aliases` names the sets of aliases to include.
    `kinds` says what TEI would do with each model.
    """
    IN_FLIGHT.set(in_flight)
    registry: CollectorRegistry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
    families = [*registry.collect(), ENGINE_UP.family(engines_up)]
    text = generate_latest(_Collected(families))
    return text + alias_text(families, aliases, kinds or {}) if aliases else text


class _Collected(CollectorRegistry):
    """Metrics that have been collected already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        return self._families

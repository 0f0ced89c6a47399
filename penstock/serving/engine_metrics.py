"""The engine process's share of the Prometheus metrics. Values are kept in files that every process
of the server writes and any API process reads, so one scrape sees them all."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from penstock.buffered_metrics import Tallies
from penstock.engine.loop import EngineCore, StepStats
from penstock.wire.shared_memory import Arena

_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_FILL = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
STEP_SECONDS = Histogram(
    "penstock_step_seconds", "From launch to collect of a step", ["model"], buckets=_SECONDS
)
DEVICE_SECONDS = Counter("penstock_device_seconds", "Time that steps spent on the device", ["model"])
STEP_TOKENS = Histogram("penstock_step_tokens", "Tokens in a step", ["model"], buckets=_TOKENS)
STEP_ROWS = Counter("penstock_step_rows", "Rows that went through steps", ["model"])
BATCH_FILL = Histogram("penstock_batch_fill", "Share of the token budget in use", ["model"], buckets=_FILL)
QUEUED_ROWS = Gauge("penstock_queue_rows", "Rows waiting", ["model"], multiprocess_mode="livesum")
QUEUED_TOKENS = Gauge("penstock_queue_tokens", "Tokens waiting", ["model"], multiprocess_mode="livesum")
PREFIX_HIT_TOKENS = Gauge(
    "penstock_prefix_hit_tokens", "Tokens taken from cached prefixes", ["model"], multiprocess_mode="livesum"
)
PREFIX_ASKED_TOKENS = Gauge(
    "penstock_prefix_asked_tokens",
    "Tokens looked up in cached prefixes",
    ["model"],
    multiprocess_mode="livesum",
)
HELD_BLOCKS = Gauge(
    "penstock_kv_blocks", "Key/value blocks that rows hold", ["model"], multiprocess_mode="livesum"
)
PREEMPTED_ROWS = Gauge(
    "penstock_preempted_rows",
    "Times that a row gave its blocks to others",
    ["model"],
    multiprocess_mode="livesum",
)
SHARED_ROWS = Gauge(
    "penstock_shared_rows",
    "Rows that waited for an identical row instead of running",
    ["model"],
    multiprocess_mode="livesum",
)
SCORE_HITS = Gauge(
    "penstock_score_cache_hits",
    "Rows of scores whose vectors were there already",
    ["model", "kind"],
    multiprocess_mode="livesum",
)
SCORE_ASKED = Gauge(
    "penstock_score_cache_asked",
    "Rows of scores whose vectors were looked up",
    ["model", "kind"],
    multiprocess_mode="livesum",
)
RUNNING_ROWS = Gauge("penstock_running_rows", "Rows in flight", ["model"], multiprocess_mode="livesum")

GRAPHS = Gauge(
    "penstock_graphs",
    "Shapes of steps that are captured as CUDA graphs",
    ["model"],
    multiprocess_mode="livesum",
)
GRAPH_STEPS = Gauge(
    "penstock_graph_steps", "Steps that ran as CUDA graphs", ["model"], multiprocess_mode="livesum"
)
SHARED_BYTES = Gauge(
    "penstock_shared_memory_bytes",
    "Answers in the memory that the engine shares with API processes",
    ["model"],
    multiprocess_mode="livesum",
)


SHOWN_EVERY_S = 0.1


class EngineMetrics:
    def __init__(self, model: str, arena: Arena | None = None) -> None:
        self._arena = arena
        self.shared_bytes = SHARED_BYTES.labels(model)
        self._tallies = Tallies()
        self.step_seconds = self._tallies.histogram(STEP_SECONDS, model)
        self.device_seconds = self._tallies.counter(DEVICE_SECONDS, model)
        self.step_tokens = self._tallies.histogram(STEP_TOKENS, model)
        self.step_rows = self._tallies.counter(STEP_ROWS, model)
        self.batch_fill = self._tallies.histogram(BATCH_FILL, model)
        self.queued_rows = QUEUED_ROWS.labels(model)
        self.queued_tokens = QUEUED_TOKENS.labels(model)
        self.running_rows = RUNNING_ROWS.labels(model)
        self.graphs = GRAPHS.labels(model)
        self.graph_steps = GRAPH_STEPS.labels(model)
        self.shared_rows = SHARED_ROWS.labels(model)
        self.query_hits = SCORE_HITS.labels(model, "query")
        self.query_asked = SCORE_ASKED.labels(model, "query")
        self.document_hits = SCORE_HITS.labels(model, "document")
        self.document_asked = SCORE_ASKED.labels(model, "document")
        self.prefix_hit_tokens = PREFIX_HIT_TOKENS.labels(model)
        self.prefix_asked_tokens = PREFIX_ASKED_TOKENS.labels(model)
        self.held_blocks = HELD_BLOCKS.labels(model)
        self.preempted_rows = PREEMPTED_ROWS.labels(model)
        self._shown_s = 0.0

    def step(self, stats: StepStats) -> None:
        self.step_seconds.observe(stats.step_s)
        self.device_seconds.inc(stats.device_s)
        self.step_tokens.observe(stats.tokens)
        self.step_rows.inc(stats.rows)
        self.batch_fill.observe(stats.fill)

    def turn(self, core: EngineCore) -> bool:
        """Show how things stand, at most ten times a second; whether they are shown as they are now."""
        now = core.clock()
        if now < self._shown_s + SHOWN_EVERY_S:
            return False
        self._shown_s = now
        self._tallies.flush()
        line = core.scheduler.queue
        generation = core.generation
        self.queued_rows.set(line.num_rows + (0 if generation is None else generation.waiting))
        self.queued_tokens.set(line.num_tokens + (0 if generation is None else generation.queued_tokens))
        self.running_rows.set(core.running)
        if (graphs := getattr(core.runner, "graphs", None)) is not None:
            both = [graphs] if (decode := getattr(core.runner, "decode", None)) is None else [graphs, decode]
            self.graphs.set(sum(len(kind.captured) for kind in both))
            self.graph_steps.set(sum(kind.replays for kind in both))
        if core.dedup is not None:
            self.shared_rows.set(core.dedup.shared_rows)
        if (places := core.scheduler.vector_cache) is not None:
            self.query_hits.set(places.query_hits)
            self.query_asked.set(places.query_lookups)
            self.document_hits.set(places.document_hits)
            self.document_asked.set(places.document_lookups)
        if self._arena is not None:
            self.shared_bytes.set(self._arena.used)
        if generation is not None:
            self.preempted_rows.set(generation.num_preemptions)
        if (pool := core.pool) is not None:
            self.held_blocks.set(pool.num_blocks - pool.available)
            self.prefix_hit_tokens.set(pool.hit_tokens)
            self.prefix_asked_tokens.set(pool.lookup_tokens)
        return True

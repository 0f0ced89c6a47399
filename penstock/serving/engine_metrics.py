"""The Prometheus metrics of the engine process.

Every process of the server writes its values to shared files. Any API process can read them, so one scrape
covers all processes.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from penstock.buffered_metrics import BufferedMetrics
from penstock.engine.loop import EngineCore
from penstock.engine.sleep import SleepReport
from penstock.engine.step_stats import StepStats
from penstock.types import EngineSleep
from penstock.wire.shared_memory import SharedMemory

_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_FILL = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_ENGINE = ("model", "engine")  # labels of metrics that are kept for each engine
STEP_SECONDS = Histogram(
    "penstock_step_seconds",
    "Time from the launch of a step to the collection of its results",
    ["model"],
    buckets=_SECONDS,
)
DEVICE_SECONDS = Counter("penstock_device_seconds", "Time that steps spent on the device", _ENGINE)
STEP_TOKENS = Histogram("penstock_step_tokens", "Tokens in a step", ["model"], buckets=_TOKENS)
STEP_ROWS = Counter("penstock_step_rows", "Rows that were run in steps", _ENGINE)
BATCH_FILL = Histogram(
    "penstock_batch_fill", "Tokens of a step divided by the token budget", ["model"], buckets=_FILL
)
QUEUED_ROWS = Gauge("penstock_queue_rows", "Rows waiting", _ENGINE, multiprocess_mode="livesum")
QUEUED_TOKENS = Gauge("penstock_queue_tokens", "Tokens waiting", _ENGINE, multiprocess_mode="livesum")
QUEUE_WAIT_SECONDS = Gauge(
    "penstock_queue_wait_seconds",
    "Estimated time until a request that arrives now would start, by what waits",
    ["model", "kind"],
    multiprocess_mode="livemax",
)
PREFIX_HIT_TOKENS = Gauge(
    "penstock_prefix_hit_tokens",
    "Prompt tokens found in the prefix cache",
    ["model"],
    multiprocess_mode="livesum",
)
PREFIX_ASKED_TOKENS = Gauge(
    "penstock_prefix_asked_tokens",
    "Prompt tokens looked up in the prefix cache",
    ["model"],
    multiprocess_mode="livesum",
)
HELD_BLOCKS = Gauge("penstock_kv_blocks", "KV cache blocks in use", ["model"], multiprocess_mode="livesum")
KV_CAPACITY = Gauge(
    "penstock_kv_capacity_blocks", "KV cache blocks in all", ["model"], multiprocess_mode="livesum"
)
PREEMPTED_ROWS = Gauge(
    "penstock_preempted_rows",
    "Preemptions of sequences",
    ["model"],
    multiprocess_mode="livesum",
)
DRAFTS = Gauge(
    "penstock_speculative_drafts",
    "Proposals that steps have verified, one for each sequence in a step",
    ["model"],
    multiprocess_mode="livesum",
)
DRAFT_TOKENS = Gauge(
    "penstock_speculative_draft_tokens",
    "Proposed tokens that steps have verified",
    ["model"],
    multiprocess_mode="livesum",
)
ACCEPTED_TOKENS = Gauge(
    "penstock_speculative_accepted_tokens",
    "Proposed tokens that were accepted, by their position in the proposal, from 0",
    ["model", "position"],
    multiprocess_mode="livesum",
)
DRAFT_SECONDS = Gauge(
    "penstock_speculative_draft_seconds",
    "Seconds that a draft model took to propose tokens",
    ["model"],
    multiprocess_mode="livesum",
)
SPECULATIVE_SPEEDUP = Gauge(
    "penstock_speculative_speedup",
    "Estimated ratio of decoding speed with speculation to that without; 1 while it is off",
    _ENGINE,
    multiprocess_mode="livesum",
)
SHARED_ROWS = Gauge(
    "penstock_shared_rows",
    "Deduplicated rows: they took the result of an identical row",
    ["model"],
    multiprocess_mode="livesum",
)
SCORE_HITS = Gauge(
    "penstock_score_cache_hits",
    "Rows of score requests whose vectors were cached",
    ["model", "kind"],
    multiprocess_mode="livesum",
)
SCORE_ASKED = Gauge(
    "penstock_score_cache_asked",
    "Rows of score requests whose vectors were looked up in the cache",
    ["model", "kind"],
    multiprocess_mode="livesum",
)
OLDEST_STEP_SECONDS = Gauge(
    "penstock_oldest_step_seconds",
    "How long the oldest step in flight has been running; 0 when none is",
    ["model"],
    multiprocess_mode="livemax",
)
RUNNING_ROWS = Gauge("penstock_running_rows", "Rows in flight", _ENGINE, multiprocess_mode="livesum")
COMPARISONS = Gauge(
    "penstock_comparisons",
    "Comparisons of given vectors that wait or run",
    ["model"],
    multiprocess_mode="livesum",
)

GRAPHS = Gauge(
    "penstock_graphs",
    "Captured CUDA graphs",
    ["model"],
    multiprocess_mode="livesum",
)
GRAPH_STEPS = Gauge(
    "penstock_graph_steps", "Steps that replayed a CUDA graph", ["model"], multiprocess_mode="livesum"
)
SHARED_BYTES = Gauge(
    "penstock_shared_memory_bytes",
    "Bytes of outputs in the memory that the engine shares with API processes",
    ["model"],
    multiprocess_mode="livesum",
)
ASLEEP = Gauge(
    "penstock_engine_asleep",
    "1 while an engine sleeps, also while it is being woken; else 0",
    _ENGINE,
    multiprocess_mode="livesum",
)
SLEEPS = Counter("penstock_sleeps", "Times that the model was put to sleep", ["model"])
WAKES = Counter("penstock_wakes", "Times that the model was woken", ["model"])
WAKE_SECONDS = Histogram(
    "penstock_wake_seconds", "Time that a wake took", ["model"], buckets=(*_SECONDS[4:], 10.0, 30.0)
)

MAX_LORAS = Gauge(
    "penstock_lora_max_adapters",
    "LoRA adapters that an engine keeps on its device, and that one step may have",
    _ENGINE,
    multiprocess_mode="livesum",
)
LORA_LOADED = Gauge(
    "penstock_lora_adapters", "LoRA adapters that are loaded", _ENGINE, multiprocess_mode="livesum"
)
LORA_ON_HOST = Gauge(
    "penstock_lora_adapters_on_host",
    "LoRA adapters in host memory; the others are read from their files",
    _ENGINE,
    multiprocess_mode="livesum",
)
LORA_ON_DEVICE = Gauge(
    "penstock_lora_adapters_on_device", "LoRA adapters on the device", _ENGINE, multiprocess_mode="livesum"
)
LORA_DISK_LOADS = Gauge(
    "penstock_lora_disk_loads",
    "Times that a LoRA adapter was read from its files",
    _ENGINE,
    multiprocess_mode="livesum",
)
LORA_DEVICE_LOADS = Gauge(
    "penstock_lora_device_loads",
    "Times that a LoRA adapter was copied to the device",
    _ENGINE,
    multiprocess_mode="livesum",
)

PUBLISH_INTERVAL_S = 0.1


class EngineMetrics:
    """The metrics of one model in this process."""

    def __init__(self, model: str, shared_memory: SharedMemory | None = None, engine: int = 0) -> None:
        """`engine` is the number of this engine within its model."""
        number = str(engine)
        self._shared_memory = shared_memory
        self.shared_bytes = SHARED_BYTES.labels(model)
        self._buffer = BufferedMetrics()
        self.step_seconds = self._buffer.histogram(STEP_SECONDS, model)
        self.device_seconds = self._buffer.counter(DEVICE_SECONDS, model, number)
        self.step_tokens = self._buffer.histogram(STEP_TOKENS, model)
        self.step_rows = self._buffer.counter(STEP_ROWS, model, number)
        self.batch_fill = self._buffer.histogram(BATCH_FILL, model)
        self.queued_rows = QUEUED_ROWS.labels(model, number)
        self.queued_tokens = QUEUED_TOKENS.labels(model, number)
        self.small_wait = QUEUE_WAIT_SECONDS.labels(model, "small")
        self.large_wait = QUEUE_WAIT_SECONDS.labels(model, "large")
        self.prompt_wait = QUEUE_WAIT_SECONDS.labels(model, "prompt")
        self.running_rows = RUNNING_ROWS.labels(model, number)
        self.comparisons = COMPARISONS.labels(model)
        self.oldest_step_seconds = OLDEST_STEP_SECONDS.labels(model)
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
        self.kv_capacity = KV_CAPACITY.labels(model)
        self.preempted_rows = PREEMPTED_ROWS.labels(model)
        self.asleep = ASLEEP.labels(model, number)
        self.sleeps, self.wakes = SLEEPS.labels(model), WAKES.labels(model)
        self.wake_seconds = WAKE_SECONDS.labels(model)
        self._labels = model, number
        self._published_s = 0.0

    def slept_or_woke(self, report: SleepReport) -> None:
        is_asleep = report.state is EngineSleep.ASLEEP
        self.asleep.set(int(is_asleep))
        if is_asleep:
            self.sleeps.inc()
        else:
            self.wakes.inc()
            self.wake_seconds.observe(report.seconds)

    def step(self, stats: StepStats) -> None:
        self.step_seconds.observe(stats.step_s)
        self.device_seconds.inc(stats.device_s)
        self.step_tokens.observe(stats.tokens)
        self.step_rows.inc(stats.rows)
        self.batch_fill.observe(stats.fill)

    def _publish_speculation(self, core: EngineCore) -> None:
        if core.generation is None or (speculation := core.generation.speculation) is None:
            return
        model, number = self._labels
        DRAFTS.labels(model).set(speculation.counts.num_drafts)
        DRAFT_TOKENS.labels(model).set(speculation.counts.num_draft_tokens)
        DRAFT_SECONDS.labels(model).set(speculation.counts.draft_s)
        for position, accepted in enumerate(speculation.accepted_at.tolist()):
            ACCEPTED_TOKENS.labels(model, str(position)).set(accepted)
        SPECULATIVE_SPEEDUP.labels(model, number).set(speculation.speedup)

    def publish(self, core: EngineCore) -> bool:
        """Write the current values, at most ten times a second. Returns whether they were written."""
        now = core.clock()
        if now < self._published_s + PUBLISH_INTERVAL_S:
            return False
        self._published_s = now
        self._buffer.flush()
        queue, generation = core.scheduler.queue, core.generation
        waiting = core.held.num_rows + (0 if generation is None else generation.waiting)
        self.queued_rows.set(queue.num_rows + waiting)
        self.queued_tokens.set(core.backlog.num_tokens + core.prompt_backlog.num_tokens)
        self.small_wait.set(core.backlog.wait_s(is_large=False))
        self.large_wait.set(core.backlog.wait_s(is_large=True))
        if generation is not None:
            self.prompt_wait.set(core.prompt_backlog.wait_s(is_large=True))
        self.running_rows.set(core.running)
        self.comparisons.set(core.num_comparisons)
        self.oldest_step_seconds.set(now - core.oldest_launch_s if core.oldest_launch_s else 0.0)
        kinds = [getattr(core.runner, name, None) for name in ("graphs", "decode", "mixed")]
        if captures := [each for each in kinds if each is not None]:
            self.graphs.set(sum(len(each.captured) for each in captures))
            self.graph_steps.set(sum(each.replays for each in captures))
        if core.dedup is not None:
            self.shared_rows.set(core.dedup.shared_rows)
        if (vectors := core.scheduler.vector_cache) is not None:
            self.query_hits.set(vectors.query_hits)
            self.query_asked.set(vectors.query_lookups)
            self.document_hits.set(vectors.document_hits)
            self.document_asked.set(vectors.document_lookups)
        if self._shared_memory is not None:
            self.shared_bytes.set(self._shared_memory.used_bytes)
        if generation is not None:
            self.preempted_rows.set(generation.num_preemptions)
            self._publish_speculation(core)
        if (pool := core.pool) is not None:
            self.kv_capacity.set(pool.num_blocks)
            self.held_blocks.set(pool.num_blocks - pool.available)
            self.prefix_hit_tokens.set(pool.hit_tokens)
            self.prefix_asked_tokens.set(pool.lookup_tokens)
        if (adapters := core.adapters) is not None:
            stats = adapters.stats()
            for gauge, value in (
                (MAX_LORAS, adapters.max_adapters),
                (LORA_LOADED, stats.num_loaded),
                (LORA_ON_HOST, stats.num_on_host),
                (LORA_ON_DEVICE, stats.num_on_device),
                (LORA_DISK_LOADS, stats.num_host_loads),
                (LORA_DEVICE_LOADS, stats.num_device_loads),
            ):
                gauge.labels(*self._labels).set(value)
        return True

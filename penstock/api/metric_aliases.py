"""Metrics of TEI and vLLM, computed from Penstock's own at each scrape: their dashboards keep working.

Aliases add no counters. Each has the name, type, unit and labels of the original metric. TEI serves one model
and has no label for it, so its aliases have an additional label `model`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

Labels = tuple[tuple[str, str], ...]  # sorted by name
Series = dict[tuple[str, Labels], float]  # (end of the name, such as _bucket; labels) → value
Kinds = Mapping[str, str]  # model → what TEI would do with it: embed or predict


@dataclass(frozen=True, slots=True)
class Scrape:
    """Penstock's metrics at one moment."""

    samples: Mapping[str, Sequence[Sample]]  # by the name of the metric
    kinds: Kinds

    def of(self, name: str) -> Sequence[Sample]:
        return self.samples.get(name, ())


Compute = Callable[[Scrape], Series]


@dataclass(frozen=True, slots=True)
class Alias:
    """One metric of another server. `meaning` says what it counts here."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    source: str  # Penstock's metric, as the docs show it
    meaning: str
    compute: Compute


Relabel = Callable[[Mapping[str, str]], Mapping[str, str] | None]


def _sum(name: str, labels: Relabel) -> Compute:
    """Sum the samples of a metric by new labels. `labels` returns None to leave a sample out."""

    def compute(scrape: Scrape) -> Series:
        out: Series = defaultdict(float)
        for sample in scrape.of(name):
            if (new := labels(sample.labels)) is not None and not sample.name.endswith("_created"):
                ending = sample.name.removeprefix(name).removesuffix("_total")
                out[ending, tuple(sorted(new.items()))] += sample.value
        return out

    return compute


def _tei(**wanted: str) -> Relabel:
    """Keep only the labels `model` and `le`. Leaves out samples without a model or the `wanted` labels."""

    def labels(old: Mapping[str, str]) -> Mapping[str, str] | None:
        if not old.get("model") or any(old.get(name) != value for name, value in wanted.items()):
            return None
        return {name: old[name] for name in ("model", "le") if name in old}

    return labels


def _vllm(**wanted: str) -> Relabel:
    own = _tei(**wanted)

    def labels(old: Mapping[str, str]) -> Mapping[str, str] | None:
        if (new := own(old)) is None:
            return None
        bucket = {"le": new["le"]} if "le" in new else {}
        return {"model_name": new["model"], "engine": "0", **bucket}

    return labels


def _with_position(old: Mapping[str, str]) -> Mapping[str, str] | None:
    new = _vllm()(old)
    return None if new is None else {**new, "position": old["position"]}


def _succeeded(labels: Relabel) -> Relabel:
    return lambda old: labels(old) if old["status"].startswith("2") else None


_FAILURES = {"429": "overloaded", "499": "dropped"}


def _failed(old: Mapping[str, str]) -> Mapping[str, str] | None:
    status = old["status"]
    if not old["model"] or status[0] not in "45":
        return None
    error = _FAILURES.get(status, "validation" if status[0] == "4" else "inference")
    return {"err": error, "model": old["model"]}


def _rows_of(kind: str) -> Compute:
    def compute(scrape: Scrape) -> Series:
        count = _sum("penstock_rows", lambda old: old if scrape.kinds.get(old["model"]) == kind else None)
        return count(scrape)

    return compute


def _batch_size(scrape: Scrape) -> Series:
    """Rows per step, as a histogram with one bucket: averages are exact, and there are no percentiles."""
    out: Series = {}
    for sample in scrape.of("penstock_step_tokens"):
        if sample.name.endswith("_count"):
            model = ("model", sample.labels["model"])
            out["_bucket", (("le", "+Inf"), model)] = out["_count", (model,)] = sample.value
    rows = _sum("penstock_step_rows", _tei())(scrape)
    return {**out, **{("_sum", labels): value for (_, labels), value in rows.items()}}


def _cache_usage(scrape: Scrape) -> Series:
    used = _sum("penstock_kv_blocks", _vllm())(scrape)
    capacity = _sum("penstock_kv_capacity_blocks", _vllm())(scrape)
    return {key: used.get(key, 0.0) / blocks for key, blocks in capacity.items() if blocks}


def _lora_info(scrape: Scrape) -> Series:
    """One series, whose labels name the adapters with requests in flight. Waiting adapters are not known."""
    limits = [sample.value for sample in scrape.of("penstock_lora_max_adapters")]
    if not limits:
        return {}
    running = sorted(
        {
            sample.labels["adapter"]
            for sample in scrape.of("penstock_lora_requests_in_flight")
            if sample.value > 0
        }
    )
    labels = {
        "max_lora": str(int(max(limits))),
        "running_lora_adapters": ",".join(running),
        "waiting_lora_adapters": "",
    }
    return {("", tuple(sorted(labels.items()))): time.time()}


def _sleep_state(scrape: Scrape) -> Series:
    out: Series = {}
    for (_, labels), value in _sum("penstock_engine_asleep", _vllm())(scrape).items():
        asleep = 1.0 if value else 0.0
        for state, is_on in (("awake", 1 - asleep), ("weights_offloaded", asleep), ("discard_all", 0.0)):
            out["", tuple(sorted((*labels, ("sleep_state", state))))] = is_on
    return out


_REQUESTS, _SECONDS = "penstock_requests", "penstock_request_seconds"
_PHASES, _STEP_TOKENS = "penstock_phase_seconds", "penstock_step_tokens"
ALIASES: dict[str, tuple[Alias, ...]] = {
    "tei": (
        Alias(
            "te_request_count",
            "counter",
            "penstock_requests_total",
            "Requests for a model; without TEI's label method (single, batch)",
            _sum(_REQUESTS, _tei()),
        ),
        Alias(
            "te_request_success",
            "counter",
            "penstock_requests_total",
            "Those with a status from 200 to 299; without the label method",
            _sum(_REQUESTS, _succeeded(_tei())),
        ),
        Alias(
            "te_request_failure",
            "counter",
            "penstock_requests_total",
            "The others, by err: overloaded (429), dropped (499), validation (other 4xx), inference (5xx)",
            _sum(_REQUESTS, _failed),
        ),
        Alias(
            "te_request_duration",
            "histogram",
            "penstock_request_seconds",
            "End-to-end seconds of requests for a model, also of those that failed",
            _sum(_SECONDS, _tei()),
        ),
        Alias(
            "te_request_tokenization_duration",
            "histogram",
            "penstock_phase_seconds",
            "Seconds spent tokenising",
            _sum(_PHASES, _tei(phase="tokenize")),
        ),
        Alias(
            "te_request_queue_duration",
            "histogram",
            "penstock_phase_seconds",
            "Seconds spent in the queue",
            _sum(_PHASES, _tei(phase="queue")),
        ),
        Alias(
            "te_request_inference_duration",
            "histogram",
            "penstock_phase_seconds",
            "Seconds spent on the device",
            _sum(_PHASES, _tei(phase="device")),
        ),
        Alias(
            "te_embed_count",
            "counter",
            "penstock_rows_total",
            "Inputs of models that embed and do not generate",
            _rows_of("embed"),
        ),
        Alias(
            "te_predict_count",
            "counter",
            "penstock_rows_total",
            "Inputs of other models that classify or rerank",
            _rows_of("predict"),
        ),
        Alias(
            "te_queue_size",
            "gauge",
            "penstock_queue_rows",
            "Inputs waiting",
            _sum("penstock_queue_rows", _tei()),
        ),
        Alias(
            "te_batch_next_size",
            "histogram",
            "penstock_step_rows_total",
            "Inputs in a step; sum and count only, without percentiles",
            _batch_size,
        ),
        Alias(
            "te_batch_next_tokens",
            "histogram",
            "penstock_step_tokens",
            "Tokens in a step",
            _sum(_STEP_TOKENS, _tei()),
        ),
    ),
    "vllm": (
        Alias(
            "vllm:num_requests_running",
            "gauge",
            "penstock_running_rows",
            "Rows and sequences in flight",
            _sum("penstock_running_rows", _vllm()),
        ),
        Alias(
            "vllm:lora_requests_info",
            "gauge",
            "penstock_lora_requests_in_flight",
            "Adapters with requests in flight, as labels; the value is the time of the scrape",
            _lora_info,
        ),
        Alias(
            "vllm:num_requests_waiting",
            "gauge",
            "penstock_queue_rows",
            "Rows and prompts waiting",
            _sum("penstock_queue_rows", _vllm()),
        ),
        Alias(
            "vllm:engine_sleep_state",
            "gauge",
            "penstock_engine_asleep",
            "1 for the state of an engine: awake or weights_offloaded",
            _sleep_state,
        ),
        Alias(
            "vllm:kv_cache_usage_perc",
            "gauge",
            "penstock_kv_blocks",
            "Share of the KV cache blocks in use, from 0 to 1",
            _cache_usage,
        ),
        Alias(
            "vllm:prefix_cache_queries_total",
            "counter",
            "penstock_prefix_asked_tokens",
            "Prompt tokens looked up in the prefix cache",
            _sum("penstock_prefix_asked_tokens", _vllm()),
        ),
        Alias(
            "vllm:prefix_cache_hits_total",
            "counter",
            "penstock_prefix_hit_tokens",
            "Prompt tokens found in the prefix cache",
            _sum("penstock_prefix_hit_tokens", _vllm()),
        ),
        Alias(
            "vllm:num_preemptions_total",
            "counter",
            "penstock_preempted_rows",
            "Preemptions of sequences",
            _sum("penstock_preempted_rows", _vllm()),
        ),
        Alias(
            "vllm:spec_decode_num_drafts_total",
            "counter",
            "penstock_speculative_drafts",
            "Proposals of tokens that steps have verified",
            _sum("penstock_speculative_drafts", _vllm()),
        ),
        Alias(
            "vllm:spec_decode_num_draft_tokens_total",
            "counter",
            "penstock_speculative_draft_tokens",
            "Proposed tokens that steps have verified",
            _sum("penstock_speculative_draft_tokens", _vllm()),
        ),
        Alias(
            "vllm:spec_decode_num_accepted_tokens_total",
            "counter",
            "penstock_speculative_accepted_tokens",
            "Proposed tokens that were accepted",
            _sum("penstock_speculative_accepted_tokens", _vllm()),
        ),
        Alias(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "counter",
            "penstock_speculative_accepted_tokens",
            "Proposed tokens that were accepted, by their position in the proposal",
            _sum("penstock_speculative_accepted_tokens", _with_position),
        ),
        Alias(
            "vllm:prompt_tokens_total",
            "counter",
            "penstock_tokens_total",
            "Tokens received, of pooling requests too",
            _sum("penstock_tokens", _vllm()),
        ),
        Alias(
            "vllm:generation_tokens_total",
            "counter",
            "penstock_generated_tokens_total",
            "Tokens generated",
            _sum("penstock_generated_tokens", _vllm()),
        ),
        Alias(
            "vllm:request_success_total",
            "counter",
            "penstock_requests_total",
            "Requests with a status from 200 to 299; without the label finished_reason",
            _sum(_REQUESTS, _succeeded(_vllm())),
        ),
        Alias(
            "vllm:iteration_tokens_total",
            "histogram",
            "penstock_step_tokens",
            "Tokens in a step",
            _sum(_STEP_TOKENS, _vllm()),
        ),
        Alias(
            "vllm:time_to_first_token_seconds",
            "histogram",
            "penstock_first_token_seconds",
            "Seconds from arrival to the first token",
            _sum("penstock_first_token_seconds", _vllm()),
        ),
        Alias(
            "vllm:e2e_request_latency_seconds",
            "histogram",
            "penstock_request_seconds",
            "End-to-end seconds of requests for a model, also of those that failed",
            _sum(_SECONDS, _vllm()),
        ),
        Alias(
            "vllm:request_queue_time_seconds",
            "histogram",
            "penstock_queue_seconds",
            "Seconds spent in the queue",
            _sum("penstock_queue_seconds", _vllm()),
        ),
        Alias(
            "vllm:request_inference_time_seconds",
            "histogram",
            "penstock_phase_seconds",
            "Seconds spent on the device, without the time between steps",
            _sum(_PHASES, _vllm(phase="device")),
        ),
    ),
}
MISSING: dict[str, tuple[str, ...]] = {  # metrics without an equivalent here
    "tei": (
        "te_request_input_length",
        "te_embed_success",
        "te_embed_duration",
        "te_embed_tokenization_duration",
        "te_embed_queue_duration",
        "te_embed_inference_duration",
        "te_predict_success",
        "te_predict_duration",
        "te_predict_tokenization_duration",
        "te_predict_queue_duration",
        "te_predict_inference_duration",
    ),
    "vllm": (
        "vllm:num_requests_waiting_by_reason",
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:request_max_num_generation_tokens",
        "vllm:request_params_n",
        "vllm:request_params_max_tokens",
        "vllm:request_prefill_kv_computed_tokens",
        "vllm:prompt_tokens_by_source_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
        "vllm:mm_cache_queries_total",
        "vllm:mm_cache_hits_total",
        "vllm:cache_config_info",
    ),
}


def alias_text(families: Iterable[Metric], sets: Collection[str], kinds: Kinds) -> bytes:
    """The aliases of these sets in Prometheus' text format. Aliases without samples are left out."""
    scrape = Scrape({family.name: family.samples for family in families}, kinds)
    lines = (
        line for name in sets for alias in ALIASES[name] for line in _lines(alias, alias.compute(scrape))
    )
    return "".join(f"{line}\n" for line in lines).encode()


def _lines(alias: Alias, series: Series) -> Iterator[str]:
    if not series:
        return
    yield f"# HELP {alias.name} {alias.meaning}"
    yield f"# TYPE {alias.name} {alias.type}"
    for (ending, labels), value in series.items():
        shown = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
        yield f"{alias.name}{ending}{{{shown}}} {floatToGoString(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

"""Metrics under the names of TEI and vLLM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from penstock.api.metric_aliases import ALIASES, MISSING, alias_text
from penstock.api.metrics import render
from penstock.cli.flags import metric_aliases
from penstock.config import ALIAS_SETS
from penstock.errors import ConfigError
from tests.api.local_app import local_app
from tests.checkpoints import write_bert

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: bytes) -> Samples:
    """Samples by the names in the text. The prometheus parser would append a suffix to some counters."""
    assert list(text_string_to_metric_families(text.decode()))
    found: Samples = {}
    for line in text.decode().splitlines():
        if sample := re.fullmatch(r"([\w:]+)(?:{(.*)})? (\S+)", line):
            labels = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', sample[2] or "")
            found[sample[1], tuple((name, value.replace('\\"', '"')) for name, value in labels)] = float(
                sample[3]
            )
    return found


def aliased(registry: CollectorRegistry, *sets: str, kinds: dict[str, str] | None = None) -> Samples:
    return parsed(alias_text(registry.collect(), sets, kinds or {}))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def requests(registry: CollectorRegistry) -> Counter:
    return Counter("penstock_requests", "", ["route", "status", "model"], registry=registry)


def test_requests_are_added_up_over_routes_and_split_by_model_and_failure(
    registry: CollectorRegistry,
) -> None:
    counter = requests(registry)
    for route, status, model, count in (
        ("/embed", "200", "a", 3),
        ("/v1/embeddings", "200", "a", 4),
        ("/embed", "429", "a", 2),
        ("/embed", "499", "a", 1),
        ("/embed", "422", "a", 5),
        ("/embed", "503", "b", 6),
        ("/metrics", "200", "", 100),
    ):
        counter.labels(route, status, model).inc(count)
    found = aliased(registry, "tei", "vllm")
    of_a, of_b = (("model", "a"),), (("model", "b"),)
    assert found["te_request_count", of_a] == 15 and found["te_request_count", of_b] == 6
    assert found["te_request_success", of_a] == 7 and ("te_request_success", of_b) not in found
    failures = {
        labels[0][1]: value for (name, labels), value in found.items() if name == "te_request_failure"
    }
    assert failures == {"overloaded": 2, "dropped": 1, "validation": 5, "inference": 6}
    assert found["vllm:request_success_total", (("engine", "0"), ("model_name", "a"))] == 7


def test_a_histogram_keeps_its_buckets_sum_and_count(registry: CollectorRegistry) -> None:
    seconds = Histogram(
        "penstock_request_seconds", "", ["route", "model"], buckets=(0.1, 1.0), registry=registry
    )
    for route, value in (("/embed", 0.05), ("/embed", 0.5), ("/rerank", 5.0)):
        seconds.labels(route, "a").observe(value)
    found = aliased(registry, "vllm")
    labels = (("engine", "0"), ("model_name", "a"))
    name = "vllm:e2e_request_latency_seconds"
    buckets = [
        found[f"{name}_bucket", (labels[0], ("le", bound), labels[1])] for bound in ("0.1", "1.0", "+Inf")
    ]
    assert buckets == [1, 2, 3]
    assert found[f"{name}_count", labels] == 3 and found[f"{name}_sum", labels] == 5.55


def test_rows_are_embedded_or_predicted_by_the_kind_of_their_model(registry: CollectorRegistry) -> None:
    rows = Counter("penstock_rows", "", ["model"], registry=registry)
    rows.labels("a").inc(2)
    rows.labels("b").inc(3)
    rows.labels("c").inc(4)
    found = aliased(registry, "tei", kinds={"a": "embed", "b": "predict"})
    assert found == {("te_embed_count", (("model", "a"),)): 2, ("te_predict_count", (("model", "b"),)): 3}


def test_accepted_proposals_are_counted_by_position(registry: CollectorRegistry) -> None:
    names = ("penstock_speculative_drafts", "penstock_speculative_draft_tokens")
    for name, value in zip(names, (5, 20), strict=True):
        Gauge(name, "", ["model"], registry=registry).labels("a").set(value)
    accepted = Gauge("penstock_speculative_accepted_tokens", "", ["model", "position"], registry=registry)
    accepted.labels("a", "0").set(4)
    accepted.labels("a", "1").set(3)
    found = aliased(registry, "vllm")
    labels = (("engine", "0"), ("model_name", "a"))
    assert found["vllm:spec_decode_num_drafts_total", labels] == 5
    assert found["vllm:spec_decode_num_draft_tokens_total", labels] == 20
    assert found["vllm:spec_decode_num_accepted_tokens_total", labels] == 7
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[name, (*labels, ("position", at))] for at in "01"] == [4, 3]


def test_gauges_of_the_engine_become_vllms(registry: CollectorRegistry) -> None:
    for name, value in (
        ("penstock_kv_blocks", 25),
        ("penstock_kv_capacity_blocks", 100),
        ("penstock_engine_asleep", 1),
        ("penstock_running_rows", 7),
    ):
        Gauge(name, "", ["model"], registry=registry).labels('a"b').set(value)
    found = aliased(registry, "vllm")
    labels = (("engine", "0"), ("model_name", 'a"b'))
    assert found["vllm:kv_cache_usage_perc", labels] == 0.25
    assert found["vllm:num_requests_running", labels] == 7
    assert found["vllm:engine_sleep_state", (*labels, ("sleep_state", "weights_offloaded"))] == 1
    assert found["vllm:engine_sleep_state", (*labels, ("sleep_state", "awake"))] == 0


def test_steps_give_the_mean_size_of_batches(registry: CollectorRegistry) -> None:
    tokens = Histogram("penstock_step_tokens", "", ["model"], buckets=(16, 64), registry=registry)
    tokens.labels("a").observe(10)
    tokens.labels("a").observe(20)
    Counter("penstock_step_rows", "", ["model"], registry=registry).labels("a").inc(6)
    found = aliased(registry, "tei")
    assert found["te_batch_next_size_sum", (("model", "a"),)] == 6
    assert found["te_batch_next_size_count", (("model", "a"),)] == 2
    assert found["te_batch_next_tokens_sum", (("model", "a"),)] == 30


def test_every_alias_is_declared_once_and_none_is_called_missing() -> None:
    assert set(ALIASES) == set(MISSING) == set(ALIAS_SETS)
    for name in ALIAS_SETS:
        names = [alias.name for alias in ALIASES[name]]
        assert len(set(names)) == len(names) and not set(names) & set(MISSING[name])


def test_a_server_shows_aliases_only_where_it_is_told_to(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)

    def scraped(**server: Any) -> str:
        with local_app(folder, server=server) as (http, _):
            http.post("/v1/embeddings", json={"input": "water"})
            return http.get("/metrics").text

    assert not re.search("^(te_|vllm:)", scraped(), re.MULTILINE)
    shown = scraped(metric_aliases=("tei", "vllm"))
    assert re.search('^te_request_success{model="model"} ', shown, re.MULTILINE)
    assert re.search("^# TYPE te_request_count counter$", shown, re.MULTILINE)
    assert re.search('^vllm:prompt_tokens_total{engine="0",model_name="model"} ', shown, re.MULTILINE)


def test_the_engines_that_are_up_are_told_by_model() -> None:
    up = {
        (dict(labels)["model"], dict(labels)["engine"]): value
        for (name, labels), value in parsed(render(0, {"a": [True], "b": [False, True]})).items()
        if name == "penstock_engine_up"
    }
    assert up == {("a", "0"): 1, ("b", "0"): 0, ("b", "1"): 1}


def test_an_unknown_set_of_aliases_is_refused() -> None:
    assert metric_aliases("vllm, tei,vllm") == ("vllm", "tei")
    with pytest.raises(ConfigError, match="use tei and vllm"):
        metric_aliases("triton")

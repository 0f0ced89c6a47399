"""What a server reports about its draft model."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from penstock.serving.engine_metrics import EngineMetrics
from tests.api.local_app import WholeClient, local_app
from tests.generation.families import write


def test_the_server_reports_its_draft_model_and_its_time(tmp_path: Path) -> None:
    model, draft = write("llama", tmp_path / "llama"), write("qwen3", tmp_path / "a-draft")
    with local_app(model, client=WholeClient) as (http, _):
        assert http.get("/server_info").json()["models"][0]["draft_model"] is None
    config = {"model": str(draft), "adaptive": False}
    with local_app(model, client=WholeClient, speculative_config=config) as (http, local):
        assert http.get("/server_info").json()["models"][0]["draft_model"] == "a-draft"
        body = {"model": "model", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 12, answer.text
        core = local.engine.core
        assert EngineMetrics("model").publish(core)  # as the engine process does
        families = text_string_to_metric_families(http.get("/metrics").text)
        found = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "penstock_speculative_draft_seconds" and sample.labels["model"] == "model"
        ]
        assert core.generation is not None and core.generation.speculation is not None
        assert found == [core.generation.speculation.counts.draft_s] and found[0] > 0

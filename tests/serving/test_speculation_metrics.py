"""Metrics of speculative decoding."""

from __future__ import annotations

from prometheus_client import REGISTRY

from penstock.serving.engine_metrics import EngineMetrics
from tests.generation import fakes
from tests.generation.fakes import Answers, Oracle, generation_request, make_core, run

MODEL = "a-model-that-speculates"


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"penstock_speculative_{name}", {"model": MODEL, **labels})


def test_proposed_and_accepted_tokens_and_the_speedup_are_published() -> None:
    core = make_core(depth=2, blocks=60)
    metrics = EngineMetrics(MODEL)
    assert not fakes.SPECULATES and metrics.publish(core)
    assert value("drafts") is None, "an engine that does not speculate says nothing of it"
    assert core.generation is not None
    core.generation.enable_speculation(Oracle, is_adaptive=False)
    core.add(generation_request("a", [[5, 6, 7], [1]], 30))
    run(core, Answers())
    metrics = EngineMetrics(MODEL)
    assert metrics.publish(core)
    assert core.generation.speculation is not None
    counts = core.generation.speculation.counts
    assert value("drafts") == counts.num_drafts > 0
    assert value("draft_tokens") == counts.num_draft_tokens
    accepted = [value("accepted_tokens", position=str(at)) or 0.0 for at in range(Oracle.num_tokens)]
    assert sum(accepted) == counts.num_accepted_tokens > 0
    assert accepted == sorted(accepted, reverse=True)
    assert value("speedup", engine="0") == 1.0, "the clock of this core stands still"

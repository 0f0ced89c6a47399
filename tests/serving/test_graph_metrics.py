"""What an engine publishes about its CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import REGISTRY

from penstock.serving.engine_metrics import EngineMetrics
from tests.generation.fakes import make_core

MODEL = "a-model-with-graphs"


def value(name: str) -> float | None:
    return REGISTRY.get_sample_value(f"penstock_{name}", {"model": MODEL})


def test_graphs_of_all_kinds_of_steps_are_counted() -> None:
    core = make_core(depth=2, blocks=60)
    core.runner = SimpleNamespace(  # type: ignore[assignment]
        graphs=SimpleNamespace(captured=[1, 2], replays=30),
        decode=SimpleNamespace(captured=[1], replays=200),
        mixed=SimpleNamespace(captured=[1, 2, 3], replays=1000),
    )
    assert EngineMetrics(MODEL).publish(core)
    assert value("graphs") == 6
    assert value("graph_steps") == 1230

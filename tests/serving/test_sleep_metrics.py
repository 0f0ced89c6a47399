"""Metrics of an engine that sleeps and wakes."""

from __future__ import annotations

from prometheus_client import REGISTRY

from penstock.engine.sleep import SleepReport
from penstock.serving.engine_metrics import EngineMetrics
from penstock.types import EngineSleep

MODEL = "a-model-that-sleeps"


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model": MODEL, **labels})


def is_asleep(engine: str) -> float | None:
    return value("penstock_engine_asleep", engine=engine)


def test_metrics_tell_whether_a_model_sleeps_how_often_and_how_long_it_takes_to_wake() -> None:
    metrics = EngineMetrics(MODEL)
    metrics.slept_or_woke(SleepReport(EngineSleep.ASLEEP, 0.5, 100))
    assert (is_asleep("0"), value("penstock_sleeps_total")) == (1, 1)
    metrics.slept_or_woke(SleepReport(EngineSleep.AWAKE, 0.25, 100))
    assert (is_asleep("0"), value("penstock_wakes_total")) == (0, 1)
    assert value("penstock_wake_seconds_sum") == 0.25

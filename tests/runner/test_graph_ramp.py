"""Simulates the first seconds of a natural load: graphs captured before it replay nearly every step."""

from __future__ import annotations

import pytest

from benchmarks.graph_ramp_sim import MODELS, Simulation


@pytest.mark.parametrize("connections", [64, 256])
def test_graphs_of_warm_up_serve_a_natural_load_from_its_first_second(connections: int) -> None:
    for second in Simulation(MODELS["bge-base"], connections, capture_s=2.0).run(2):
        kinds = second.kinds
        assert kinds["own"] + kinds["borrowed"] >= 0.97 * kinds.total()
        assert kinds["own"] >= 0.9 * kinds.total()
        assert kinds["captured"] <= 2, "a capture under load stops every request"


def test_without_warm_up_larger_graphs_replay_most_steps_after_a_second() -> None:
    first, second = Simulation(MODELS["bge-base"], 64, capture_s=0.0).run(2)
    assert first.kinds["eager"] > second.kinds["eager"]
    assert second.kinds["own"] + second.kinds["borrowed"] >= 0.95 * second.kinds.total()
    assert second.num_graphs < second.num_buckets, "not every bucket needs a graph of its own"

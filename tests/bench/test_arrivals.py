from __future__ import annotations

import numpy as np
import pytest

from penstock.bench.load.arrivals import arrivals, check, count_for
from penstock.bench.load.plan import Traffic
from penstock.errors import BadValue


def test_the_last_request_is_due_after_count_over_rate_for_every_seed() -> None:
    for burstiness in (0.3, 1.0, 5.0):
        due = arrivals(Traffic(request_rate=50, burstiness=burstiness), 200)
        assert due[-1] == pytest.approx(4.0)
        assert (np.diff(due) >= 0).all()


def test_less_burstiness_means_more_even_gaps() -> None:
    spread = [
        np.diff(arrivals(Traffic(request_rate=100, burstiness=b), 2000)).std() for b in (0.2, 1.0, 10.0)
    ]
    assert spread[0] > spread[1] > spread[2]


def test_poisson_gaps_have_the_spread_of_an_exponential() -> None:
    gaps = np.diff(arrivals(Traffic(request_rate=100), 5000))
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)


def test_infinite_burstiness_spaces_requests_evenly() -> None:
    gaps = np.diff(arrivals(Traffic(request_rate=10, burstiness=float("inf")), 20))
    assert gaps == pytest.approx(np.full(19, 0.1))


def test_the_seed_decides_the_arrivals() -> None:
    one, same, other = (arrivals(Traffic(request_rate=9, seed=seed), 30) for seed in (1, 1, 2))
    assert (one == same).all()
    assert not (one == other).all()


@pytest.mark.parametrize("kind", ["linear", "exponential"])
def test_a_ramp_begins_slowly_and_ends_quickly(kind: str) -> None:
    traffic = Traffic(ramp_up=kind, ramp_start=10, ramp_end=100, burstiness=float("inf"))  # type: ignore[arg-type]
    gaps = np.diff(arrivals(traffic, 500))
    assert gaps[0] == pytest.approx(1 / 10, rel=0.05)
    assert gaps[-1] == pytest.approx(1 / 100, rel=0.05)
    assert (np.diff(gaps) < 0).all()


@pytest.mark.parametrize("kind", ["linear", "exponential", None])
def test_the_duration_sets_the_number_of_requests(kind: str | None) -> None:
    if kind is None:
        traffic = Traffic(request_rate=40, duration_s=5, burstiness=float("inf"))
    else:
        traffic = Traffic(ramp_up=kind, ramp_start=20, ramp_end=80, duration_s=5, burstiness=float("inf"))  # type: ignore[arg-type]
    count = count_for(traffic, requests=3)
    assert arrivals(traffic, count)[-1] == pytest.approx(5.0, rel=0.02)


@pytest.mark.parametrize(
    ("traffic", "said"),
    [
        (Traffic(request_rate=0), "--request-rate"),
        (Traffic(request_rate=float("nan")), "--request-rate"),
        (Traffic(burstiness=0), "--burstiness"),
        (Traffic(max_concurrency=0), "--max-concurrency"),
        (Traffic(duration_s=-1), "--duration"),
        (Traffic(ramp_up="linear"), "--ramp-up-start-rps"),
        (Traffic(ramp_up="linear", ramp_start=9, ramp_end=3), "must not exceed"),
        (Traffic(ramp_up="linear", ramp_start=1, ramp_end=3, request_rate=5), "leave out --request-rate"),
    ],
)
def test_impossible_traffic_is_refused(traffic: Traffic, said: str) -> None:
    with pytest.raises(BadValue, match=said):
        check(traffic)

"""The cost model: the parameters that it recovers, its predictions, and its own error estimates."""

from __future__ import annotations

import statistics
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from penstock.errors import BadValue
from penstock.planning.fit import CostModel, Fit, ModelError, work
from penstock.planning.predict import (
    BETWEEN,
    BEYOND,
    BEYOND_FACTOR,
    ESTIMATE,
    MEASURED,
    fit_of,
    given_rate,
    predicted_rate,
)
from penstock.planning.rates import Point, recorded_rates
from penstock.planning.shape import ModelShape
from tests.planning.shapes import BERT_BASE, MOE

TRUE = np.array([1 / 700e12, 1 / 400e12, 1 / 300e12, 1 / 5e12, 2e-6, 50e-9])
BETWEEN_SIZES = msgspec.structs.replace(
    BERT_BASE, layers=20, hidden=896, heads=14, kv_heads=14, intermediate=3584
)

SMALL = msgspec.structs.replace(BERT_BASE, layers=8, hidden=384, head_dim=32, intermediate=1536)


def points(seconds: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[Point]:
    """Measurements of a machine that follows the cost model exactly."""
    shapes = {f"bert-{layers}": msgspec.structs.replace(BERT_BASE, layers=layers) for layers in (3, 6, 12)}
    wide = msgspec.structs.replace(BERT_BASE, hidden=1024, heads=16, kv_heads=16, intermediate=4096)
    shapes |= {"wide": wide, "gated": msgspec.structs.replace(wide, is_gated=True), "experts": MOE}
    return [
        Point(name, shape, length, 1.0 / float(seconds @ work(shape, length)))
        for name, shape in shapes.items()
        for length in (32, 128, 512)
    ]


def test_a_fit_recovers_the_rates_that_made_its_measurements() -> None:
    assert CostModel.fit(points(TRUE)).seconds == pytest.approx(TRUE, rel=1e-6)
    assert max(abs(error) for _, error in Fit(points(TRUE)).unseen_model) < 1e-6


def test_no_coefficient_is_negative() -> None:
    rng = np.random.default_rng(0)
    noisy = [point._replace(tokens_per_s=point.tokens_per_s * rng.uniform(0.5, 2)) for point in points(TRUE)]
    assert CostModel.fit(noisy).seconds.min() >= 0


def test_a_recorded_model_is_predicted_as_it_was_measured() -> None:
    for measured in recorded_rates().measured:
        for model in measured.model:
            for length, rates in model.tokens_per_s.items():
                rate = predicted_rate(measured.gpu, model.shape, [length], texts=False)
                assert rate.basis == MEASURED
                expected = statistics.geometric_mean(rates)
                assert 1 / rate.seconds_per_token(length) == pytest.approx(expected)


def test_recorded_rates_are_predicted_without_having_been_seen() -> None:
    fit = fit_of("h200")
    error = ModelError.of([error for _, error in fit.unseen_model])
    assert error.median < 0.10
    assert fit.expected(fit.unseen_model, BETWEEN_SIZES, 128).common < 0.25


def test_rows_that_depend_on_the_host_have_a_wider_range() -> None:
    wide, tiny = (predicted_rate("h200", shape, [128]) for shape in (BETWEEN_SIZES, SMALL))
    assert wide.basis == tiny.basis == BETWEEN
    assert tiny.high > wide.high


def test_a_model_between_recorded_ones_is_fitted_with_a_range() -> None:
    rate = predicted_rate("h200", BETWEEN_SIZES, [100, 400])
    assert rate.basis == BETWEEN and not rate.notes
    assert 0.7 < rate.low < 1 < rate.high < 1.5


def larger(shape: ModelShape) -> ModelShape:
    return msgspec.structs.replace(shape, layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128)


@pytest.mark.parametrize(
    ("shape", "lengths", "why"),
    [
        (larger(BERT_BASE), [128], "GFLOP"),
        (BERT_BASE, [100_000], "tokens were measured"),
        (msgspec.structs.replace(MOE, layers=24), [128], "one model with experts"),
        (msgspec.structs.replace(BETWEEN_SIZES, local_layers=4, window=128), [128], "local attention"),
    ],
)
def test_what_goes_beyond_the_records_is_called_an_extrapolation(
    shape: ModelShape, lengths: list[float], why: str
) -> None:
    rate = predicted_rate("h200", shape, lengths)
    assert rate.basis == BEYOND
    assert (rate.low, rate.high) == (1 / BEYOND_FACTOR, BEYOND_FACTOR)
    assert any(why in note for note in rate.notes)


def test_another_gpu_is_an_estimate_by_published_figures() -> None:
    known = 1 / predicted_rate("h200", BETWEEN_SIZES, [128], texts=False).seconds_per_token(128)
    for gpu in recorded_rates().gpu.keys() - {"h200"}:
        rate = predicted_rate(gpu, BETWEEN_SIZES, [128], texts=False)
        assert rate.basis == ESTIMATE
        assert "no rate was measured" in rate.notes[0] and "TFLOP/s" in rate.notes[0]
        assert rate.low < 1 < rate.high
        assert (1 / rate.seconds_per_token(128) > known) == (gpu == "b200")


def test_a_gpu_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(BadValue, match=r"--gpu k80 is not known; use one of .*h200"):
        predicted_rate("k80", BERT_BASE, [128])


def test_more_layers_longer_rows_and_wider_models_take_longer() -> None:
    rate = fit_of("h200").model
    for field, sizes in (
        ("layers", (1, 4, 16)),
        ("hidden", (256, 512, 4096)),
        ("intermediate", (64, 4096, 9999)),
    ):
        costs = [
            rate.seconds_per_token(msgspec.structs.replace(BERT_BASE, **{field: size}), 128) for size in sizes
        ]
        assert all(less < more for less, more in pairwise(costs)), field
    row = [length * rate.seconds_per_token(BERT_BASE, length) for length in (8, 64, 512, 4096)]
    assert all(less < more for less, more in pairwise(row))


def test_the_host_bounds_what_texts_can_reach() -> None:
    tiny = msgspec.structs.replace(BERT_BASE, layers=1)
    host = recorded_rates().host.tokens_per_s
    texts, ids = (predicted_rate("h200", tiny, [128], texts=texts) for texts in (True, False))
    assert texts.is_limited_by_host(128) and 1 / texts.seconds_per_token(128) == pytest.approx(host)
    assert not ids.is_limited_by_host(128) and 1 / ids.seconds_per_token(128) > host
    assert not given_rate(1e9).is_limited_by_host(128)

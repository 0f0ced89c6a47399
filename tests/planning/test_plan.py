"""The arithmetic of a plan, against cases calculated by hand."""

from __future__ import annotations

import pytest

from penstock.errors import BadValue
from penstock.planning.plan import Corpus, Outputs, compute, serving, storage, traffic
from penstock.planning.predict import Rate, given_rate
from penstock.planning.rates import ServingRate

BILLION = Corpus(1_000_000_000, [200], 900.0)


def test_gpu_hours_are_tokens_by_rate() -> None:
    made = compute(BILLION, given_rate(1e6), gpus=8, price=2.0)
    assert made.gpu_hours == pytest.approx(200e9 / 1e6 / 3600)  # 55.6
    assert made.wall_hours == pytest.approx(made.gpu_hours / 8)
    assert made.cost == pytest.approx(2.0 * made.gpu_hours)
    assert [made.gpus_within(hours) for hours in (1, 10, 56, 1000)] == [56, 6, 1, 1]


def test_there_is_no_cost_without_a_price() -> None:
    assert compute(BILLION, given_rate(1e6), gpus=1, price=None).cost is None


def test_a_range_of_the_rate_is_one_of_the_hours() -> None:
    made = compute(BILLION, Rate("fitted", 0.5, 2.0, tokens_per_s=1e6), gpus=1, price=None)
    assert (made.low_hours, made.high_hours) == (made.gpu_hours / 2, made.gpu_hours * 2)


def test_every_length_of_a_sample_counts() -> None:
    corpus = Corpus(4_000, [10, 30, 30, 50], 100.0, from_sample=True)
    assert corpus.mean_tokens == 30
    assert compute(corpus, given_rate(1000), 1, None).gpu_hours == pytest.approx(4_000 * 30 / 1000 / 3600)


def test_vectors_take_their_dimension_in_each_number_format() -> None:
    sizes = {kind.dtype: kind.bytes_per_doc for kind in storage(BILLION, Outputs(dense=768))}
    assert sizes == {"float32": 3072, "float16": 1536, "int8": 768, "binary": 96}


def test_bits_are_packed_into_whole_bytes() -> None:
    assert storage(BILLION, Outputs(dense=100))[-1].bytes_per_doc == 13


def test_token_vectors_are_stored_for_every_token() -> None:
    sizes = {kind.dtype: kind.total(1000) for kind in storage(BILLION, Outputs(token_vector=128))}
    assert sizes["float16"] == 1000 * 200 * 256
    assert sizes["binary"] == 1000 * 200 * 16


def test_sparse_vectors_have_an_index_and_a_weight_for_each_term() -> None:
    (kind,) = storage(BILLION, Outputs(sparse_terms=200))
    assert kind.bytes_per_doc == 200 * 8


def test_traffic_counts_texts_ids_and_vectors() -> None:
    moved = traffic(BILLION, storage(BILLION, Outputs(dense=768)))
    assert moved.text == 900e9
    assert moved.token_ids == 800e9
    assert moved.vectors["bytes"] == 3072e9
    assert moved.vectors["base64"] == 4096e9


def test_queries_need_gpus_for_their_share_of_the_capacity() -> None:
    made = serving(10_000, 16, 0.5, given_rate(100_000), None)  # 6,250 queries/s, at half utilisation
    assert made.qps_per_gpu == pytest.approx(3125)
    assert (made.gpus, made.limit) == (4, "device")
    assert serving(3125, 16, 0.5, given_rate(100_000), None).gpus == 1


def test_the_processes_around_an_engine_bound_its_queries() -> None:
    host = ServingRate(1000.0, 16, "", "")
    made = serving(2500, 16, 1.0, given_rate(1e6), host)
    assert (made.qps_per_gpu, made.gpus, made.limit) == (1000.0, 3, "host")


@pytest.mark.parametrize("share", [0, -1, 1.01, float("nan")])
def test_a_utilization_is_a_share(share: float) -> None:
    with pytest.raises(BadValue, match="--utilization"):
        serving(1, 16, share, given_rate(1e6), None)

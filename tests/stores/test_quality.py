"""overlap@k, nDCG@k and MRR@k against values computed by hand and by scikit-learn."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BadValue
from penstock.stores.quality import compare, ndcg, overlap, read_judgements, reciprocal_rank, table


def test_overlap_counts_what_both_lists_share_within_k() -> None:
    assert overlap(["a", "b", "c"], ["c", "a", "x"], 3) == pytest.approx(2 / 3)
    assert overlap(["a", "b", "c"], ["c", "b", "a"], 1) == 0
    assert overlap(["a"], ["a"], 10) == 1  # for example a store with one row
    assert overlap([], [], 10) == 1


def test_ndcg_is_as_computed_by_hand() -> None:
    gains = {"a": 3, "b": 2, "c": 1}
    got = 2 / math.log2(2) + 0 / math.log2(3) + 3 / math.log2(4)
    best = 3 / math.log2(2) + 2 / math.log2(3) + 1 / math.log2(4)
    assert ndcg(["b", "x", "a"], gains, 3) == pytest.approx(got / best)
    assert ndcg(["a", "b", "c"], gains, 3) == 1
    assert ndcg(["x"], gains, 3) == 0
    assert ndcg(["a"], {}, 3) == 0


@pytest.mark.stores  # importing scikit-learn takes seconds
def test_ndcg_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    for _ in range(20):
        gains = random.integers(0, 4, 12)
        scores = random.permutation(12).astype(float)
        order = np.argsort(-scores)
        found = [str(each) for each in order]
        ours = ndcg(found, {str(each): float(gain) for each, gain in enumerate(gains)}, 5)
        assert ours == pytest.approx(metrics.ndcg_score([gains], [scores], k=5))


def test_mrr_is_one_over_the_first_relevant_rank() -> None:
    assert reciprocal_rank(["x", "a", "b"], {"a": 1, "b": 1}, 10) == 0.5
    assert reciprocal_rank(["x", "y", "a"], {"a": 1}, 2) == 0
    assert reciprocal_rank(["x", "a"], {"x": 0, "a": 1}, 10) == 0.5


def test_a_comparison_is_the_mean_over_queries() -> None:
    old, new = [["a", "b"], ["c", "d"]], [["a", "x"], ["d", "c"]]
    comparison = compare(["1", "2"], old, new, 2, {"1": {"b": 1}, "2": {"d": 1}, "3": {"z": 1}})
    assert comparison.overlap == 0.75
    assert comparison.same_first == 0.5
    assert comparison.num_judged == 2
    assert (comparison.old_mrr, comparison.new_mrr) == (0.5, 0.5)
    assert comparison.old_ndcg == pytest.approx(1 / math.log2(3))
    assert comparison.new_ndcg == pytest.approx(0.5)
    assert comparison.ndcg_ratio == pytest.approx(0.5 * math.log2(3))
    assert "overlap@2" in table(comparison) and "nDCG@2" in table(comparison)
    assert "nDCG" not in table(compare(["1", "2"], old, new, 2))


def test_judgements_that_fit_no_query_are_refused() -> None:
    with pytest.raises(BadValue, match="queries have ids such as '1', judgements such as 'q1'"):
        compare(["1"], [["a"]], [["a"]], 2, {"q1": {"a": 1}})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qrels.tsv", "query-id\tcorpus-id\tscore\nq1\td 1\t2\nq1\td2\t0\n"),
        ("qrels.txt", "q1 0 d_1 2\nq1 0 d2 0\n"),
        (
            "qrels.jsonl",
            '{"query_id": "q1", "id": "d 1", "score": 2}\n{"qid": "q1", "doc_id": "d2", "rel": 0}\n',
        ),
    ],
)
def test_judgements_are_read_in_each_form(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    ((query, gains),) = read_judgements(file).items()
    assert query == "q1"
    assert list(gains.values()) == [2, 0]


@pytest.mark.parametrize("text", ["q1\td1\n", "q1\td1\tgood\n", "q1\td1\tnan\n"])
def test_a_bad_judgement_is_named_by_its_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "qrels.tsv"
    file.write_text("q0\td0\t1\n" + text)
    with pytest.raises(BadValue, match="line 2 is not query id"):
        read_judgements(file)

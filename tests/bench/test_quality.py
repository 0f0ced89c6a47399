from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.bench.mteb import PenstockEncoder
from penstock.bench.quality.bm25 import Bm25
from penstock.bench.quality.data import read_beir, read_pairs
from penstock.bench.quality.judge import candidates, late_interaction, reranking, retrieval, similarity
from penstock.bench.quality.scores import cosines, evaluate, maxsim, ndcg, recall, reciprocal_rank, spearman
from penstock.bench.quality.server import ServerClient
from penstock.cli.main import app
from penstock.errors import BadValue, EngineError
from tests.bench.stub import Stub, stub, vector
from tests.command_line import CliRunner


class WordEmbedder:
    """Embeds by word counts, so that texts with common words are similar."""

    WORDS = ("apple", "pear", "car", "road", "sea", "ship", "tree", "bird")

    def embed(self, texts: Any) -> np.ndarray:
        rows = [[text.lower().split().count(word) for word in self.WORDS] for text in texts]
        return np.array(rows, np.float32) + 0.01


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    documents = {"d1": "apple pear tree", "d2": "car road", "d3": "sea ship bird", "d4": "tree bird"}
    lines = [json.dumps({"_id": key, "title": "", "text": text}) for key, text in documents.items()]
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    queries = {"q1": "apple tree", "q2": "ship on the sea", "q3": "not judged"}
    (tmp_path / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in queries.items())
    )
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td4\t1\nq2\td3\t1\n")
    return tmp_path


def test_spearman_depends_on_ranks_only() -> None:
    left = np.array([1.0, 2.0, 3.0, 4.0])
    assert spearman(left, np.exp(left)) == 1.0
    assert spearman(left, -left) == -1.0


def test_spearman_averages_the_ranks_of_equal_values() -> None:
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5 over √(4.5 · 5).
    found = spearman(np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0]))
    assert found == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_ndcg_weighs_grades_by_rank() -> None:
    judged = {"a": 3, "b": 1, "c": 0}
    assert ndcg(["a", "b", "c"], judged) == 1.0
    ideal = 3 / 1 + 1 / np.log2(3)
    assert ndcg(["c", "a", "b"], judged) == pytest.approx((3 / np.log2(3) + 1 / 2) / ideal)
    assert ndcg(["x"] * 10 + ["a"], judged) == 0.0
    assert ndcg(["a"], {}) == 0.0


def test_the_first_relevant_document_decides_the_reciprocal_rank() -> None:
    assert reciprocal_rank(["x", "y", "a"], {"a": 1, "x": 0}) == pytest.approx(1 / 3)
    assert reciprocal_rank(["x"] * 10 + ["a"], {"a": 1}) == 0.0


def test_recall_counts_the_documents_found() -> None:
    assert recall(["a", "x", "b"], {"a": 1, "b": 1, "c": 2, "x": 0}, 2) == pytest.approx(1 / 3)


def test_queries_without_a_relevant_document_do_not_count() -> None:
    found = evaluate({"q": ["a"], "none": ["a"]}, {"q": {"a": 1}, "none": {"a": 0}})
    assert found == {"ndcg@10": 1.0, "mrr@10": 1.0, "recall@100": 1.0}


def test_the_cosine_of_a_zero_vector_is_zero() -> None:
    assert cosines(np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)).tolist() == [0.0]


def test_maxsim_sums_the_best_match_of_each_query_token() -> None:
    document = np.array([[1, 0], [0.5, 0.5]], np.float32)
    assert maxsim(np.eye(2, dtype=np.float32), document) == 1.5


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ('g\tf\ty\t0\t1.5\tone "quoted\tother\ng\tf\ty\t1\t4\ta\tb\n', None),
        ('score,sentence1,sentence2\n1.5,"one ""quoted",other\n4,a,b\n', None),
        ('one "quoted\tother\t1.5\na\tb\t4\n', None),
        ('text,more,grade\none "quoted,other,1.5\na,b,4\n', "grade,text,more"),
        ('text,more,grade\none "quoted,other,1.5\na,b,4\n', "3,1,2"),
    ],
)
def test_pairs_are_read_from_any_columns(content: str, columns: str | None, tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text(content)
    pairs = read_pairs(str(file), columns)
    assert pairs.scores.tolist() == [1.5, 4.0]
    assert pairs.left == ['one "quoted', "a"]
    assert pairs.right == ["other", "b"]


@pytest.mark.parametrize(
    ("content", "columns", "said"),
    [
        ("", None, "empty"),
        ("a,b\n", None, "--sts-columns"),
        ("score,sentence1,sentence2\n1,a,b\nx,c,d\n", None, "row 3"),
        ("1\ta\tb\n", None, "two pairs"),
        ("1\ta\tb\n", "0,1,2", "--sts-columns"),
    ],
)
def test_errors_name_pairs_that_cannot_be_read(
    content: str, columns: str | None, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text(content)
    with pytest.raises(BadValue, match=said):
        read_pairs(str(file), columns)


def test_a_folder_is_read_with_the_queries_that_have_judgements(folder: Path) -> None:
    judged = read_beir(str(folder))
    assert list(judged.queries) == ["q1", "q2"]
    assert judged.qrels["q1"] == {"d1": 2, "d4": 1}
    assert judged.documents["d2"] == "car road"


def test_the_error_names_what_a_folder_lacks(folder: Path) -> None:
    (folder / "queries.jsonl").rename(folder / "other")
    with pytest.raises(BadValue, match=r"no queries\.jsonl"):
        read_beir(str(folder))
    with pytest.raises(BadValue, match="no such folder"):
        read_beir(str(folder / "nothing"))


def test_errors_name_malformed_judgements(folder: Path) -> None:
    (folder / "qrels/test.tsv").write_text("q1\td1\t1\nq1 d2 1\n")
    with pytest.raises(BadValue, match="line 2"):
        read_beir(str(folder))


def test_retrieval_finds_documents_that_share_words(folder: Path) -> None:
    found = retrieval(WordEmbedder(), read_beir(str(folder)))
    assert found["ndcg@10"] == 1.0
    assert found["recall@100"] == 1.0


def test_similar_pairs_score_higher(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("5\tapple pear\tapple pear\n3\tapple pear\tapple car\n0\tapple\tsea\n")
    assert similarity(WordEmbedder(), read_pairs(str(file)))["spearman"] == 1.0


def test_bm25_offers_documents_that_share_words() -> None:
    index = Bm25({"a": "apple pear", "b": "apple apple apple", "c": "sea"})
    assert index.top("apple", 5) == ["b", "a"]
    assert index.top("pear apple", 1) == ["a"]
    assert index.top("nothing", 5) == []


def test_reranking_through_a_server_beats_the_order_before(folder: Path, server: Stub) -> None:
    client = ServerClient(server.url)
    judged = read_beir(str(folder))
    offered = {"q1": ["d2", "d4", "d1"], "q2": ["d1", "d3"]}
    found = reranking(client, judged, offered)
    client.close()
    assert found["ndcg@10"] > found["ndcg@10 before"]
    assert candidates(judged, "judged", 5) == {"q1": ["d1", "d4"], "q2": ["d3"]}


def test_late_interaction_agrees_with_the_server(folder: Path) -> None:
    with stub(maxsim=True) as server:
        client = ServerClient(server.url)
        judged = read_beir(str(folder))
        found = late_interaction(client, client, judged, candidates(judged, "judged", 5))
        client.close()
    assert found["score difference"] < 1e-5
    assert found["ndcg@10"] == found["ndcg@10 by MaxSim here"]


def test_vectors_come_back_in_order_over_several_requests(server: Stub) -> None:
    client = ServerClient(server.url)
    texts = [f"text {i}" for i in range(150)]
    assert np.allclose(client.embed(texts), [vector(text) for text in texts])
    client.close()
    assert len(server.bodies) == 3


def test_an_error_of_the_server_is_quoted() -> None:
    with stub(fail_every=1) as server:
        client = ServerClient(server.url, "m")
        with pytest.raises(EngineError, match="made to fail"):
            client.embed(["a"])
        client.close()


def quality(*args: object) -> Any:
    return CliRunner().invoke(app, ["bench", "quality", *map(str, args)])


def test_quality_evaluates_a_running_server(folder: Path, server: Stub, tmp_path: Path) -> None:
    result = quality("--base-url", server.url, "--beir", folder, "--output-json", tmp_path / "q.json")
    assert result.exit_code == 0, result.output
    assert "ndcg@10:" in result.stdout
    saved = json.loads((tmp_path / "q.json").read_text())
    assert set(saved["figures"]["retrieval"]) == {"ndcg@10", "mrr@10", "recall@100"}


def test_quality_ranks_through_a_server(folder: Path, server: Stub) -> None:
    result = quality("--base-url", server.url, "--beir", folder, "--task", "rerank", "--min-ndcg", 0.5)
    assert result.exit_code == 0, result.output
    assert server.bodies[-1][0] == "/v1/rerank"


def test_a_limit_that_is_missed_fails(folder: Path, server: Stub) -> None:
    result = quality("--base-url", server.url, "--beir", folder, "--min-ndcg", 1.01)
    assert result.exit_code == 1
    assert "below the limit" in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "--sts FILE or --beir FOLDER"),
        (("--sts", "/nowhere"), "no such file"),
        (("--task", "rerank", "--beir", "FOLDER"), "--base-url"),
    ],
)
def test_tasks_without_data_are_refused(args: tuple[str, ...], said: str, folder: Path) -> None:
    result = quality(*(str(folder) if arg == "FOLDER" else arg for arg in args))
    assert result.exit_code == 2
    assert said in result.stderr


def test_mteb_gets_vectors_of_all_batches_in_order(server: Stub) -> None:
    encoder = PenstockEncoder(server.url, prompt_names={"query": "ask"})
    batches = [{"text": ["a", "b"]}, {"text": ["c"]}]
    found = encoder.encode(
        batches, task_metadata=None, hf_split="test", hf_subset="default", prompt_type="query"
    )
    assert np.allclose(found, [vector(text) for text in "abc"])
    assert server.bodies[-1][1]["prompt_name"] == "ask"
    encoder.encode(batches, task_metadata=None, hf_split="test", hf_subset="default")
    assert "prompt_name" not in server.bodies[-1][1]
    assert np.allclose(encoder.similarity(found, found).diagonal(), 1)
    assert np.allclose(encoder.similarity_pairwise(found, found), 1)
    encoder.close()


def test_mteb_recognises_the_adapter(server: Stub) -> None:
    mteb = pytest.importorskip("mteb")
    encoder = PenstockEncoder(server.url)
    assert isinstance(encoder, mteb.EncoderProtocol)
    assert encoder.mteb_model_meta.name == "penstock/stub-model"
    encoder.close()

"""`penstock rerank` and `penstock score`: the engine's own scores, from files and stdin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import Engine
from penstock.cli.flags import score_template
from tests.checkpoints import write_cross_encoder
from tests.cli.runs import error_of, invoke, read_jsonl, run, write_jsonl

QUERY = "the long water"
DOCUMENTS = ["people write many words", "water", "the oil was long", "find a word in time", "how they look"]
CPU = ("--device", "cpu", "--threads", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("models") / "cross")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", threads=1) as running:
        yield running


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    file = tmp_path / "documents.txt"
    file.write_text("\n".join(DOCUMENTS) + "\n")
    return file


def test_documents_are_sorted_by_score(folder: Path, engine: Engine, documents: Path, tmp_path: Path) -> None:
    expected = engine.rerank(QUERY, DOCUMENTS)
    result = invoke("rerank", QUERY, documents, "-m", folder, *CPU)
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [int(row[1]) for row in rows] == [found.index for found in expected]
    assert [row[2] for row in rows] == [found.document for found in expected]
    assert [float(row[0]) for row in rows] == pytest.approx([found.score for found in expected], abs=1e-5)
    out = tmp_path / "out.jsonl"
    invoke("rerank", QUERY, documents, "-m", folder, "-o", out, "--jsonl", "--top-n", 2, "--raw", *CPU)
    best = engine.rerank(QUERY, DOCUMENTS, top_n=2, use_activation=False)
    assert [(row["index"], row["document"]) for row in read_jsonl(out)] == [
        (b.index, b.document) for b in best
    ]


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_pairs_are_scored_in_the_order_of_the_file(
    folder: Path, engine: Engine, tmp_path: Path, form: str
) -> None:
    queries = [QUERY, "oil", QUERY, "word", "see"]
    rows = [{"query": q, "document": d} for q, d in zip(queries, DOCUMENTS, strict=True)]
    file = tmp_path / f"pairs.{form}"
    if form == "jsonl":
        write_jsonl(file, rows)
    elif form == "csv":
        file.write_text("query,document\n" + "".join(f"{r['query']},{r['document']}\n" for r in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    result = invoke("score", file, "-m", folder, "--jsonl", *CPU)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["index"] for row in found] == list(range(5))
    assert [row["score"] for row in found] == pytest.approx(
        engine.score(queries, DOCUMENTS).tolist(), abs=1e-5
    )


def test_documents_come_from_stdin_and_the_template_from_a_flag(tmp_path: Path) -> None:
    folder = write_cross_encoder(tmp_path / "two", labels=2)
    template, labels = "Query: {query}\nSentence: {document}", {"score_labels": [1, 0]}
    options = {"score_template": template, "pooler_config": labels, "device": "cpu", "threads": 1}
    with Engine(str(folder), **options) as engine:
        expected = engine.rerank(QUERY, DOCUMENTS)
    flags = ("--score-template", template.replace("\n", "\\n"), "--pooler-config", json.dumps(labels))
    words = "\n".join(DOCUMENTS).encode()
    done = run("rerank", QUERY, "-", "--format", "text", "-m", folder, *flags, *CPU, stdin=words)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    assert [int(row[1]) for row in rows] == [found.index for found in expected]


def test_a_score_template_is_a_text_a_file_or_a_name(tmp_path: Path) -> None:
    file = tmp_path / "template.txt"
    file.write_text("a {query}\nb {document}\n")
    assert score_template(str(file)) == "a {query}\nb {document}"
    assert score_template("a {query}\\nb {document}") == "a {query}\nb {document}"
    assert score_template("qwen3-reranker") == "qwen3-reranker"


def test_errors_are_one_line(folder: Path, documents: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "no documents" in error_of("rerank", QUERY, empty, "-m", folder, *CPU)
    assert "no column 'query'" in error_of(
        "score", documents, "-m", folder, "--document-column", "text", *CPU
    )
    wrong = write_jsonl(tmp_path / "pairs.jsonl", [{"query": 3, "document": "a"}])
    assert "row 0: 'query' is not a text" in error_of("score", wrong, "-m", folder, *CPU)
    long = tmp_path / "long.txt"
    long.write_text("water " * 100)
    assert "64" in error_of("rerank", QUERY, long, "-m", folder, "--no-truncate", *CPU)
    three = write_cross_encoder(tmp_path / "three", labels=3)
    assert "cannot score pairs" in error_of("rerank", QUERY, documents, "-m", three, *CPU)
    labels = json.dumps({"score_labels": [0, 3]})
    assert "0 to 2" in error_of("rerank", QUERY, documents, "-m", three, "--pooler-config", labels, *CPU)

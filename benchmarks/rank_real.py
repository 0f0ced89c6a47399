"""Compare rankings of real models with the reference libraries: nDCG@10 to three digits.

    python benchmarks/rank_real.py DL19 --cross RERANKER_MINI --bi MINILM

DL19 is a folder in BEIR's layout (corpus, queries, qrels). For each query with judgements, its 100 best
passages by BM25 are ranked, or all passages that have a judgement. RERANKER_MINI reads `Query: …` and
`Sentence: …` as one text and scores by the difference of its two labels; the reference is transformers.
MINILM compares vectors; the reference is sentence-transformers. `--vectors` compares Penstock's vectors in
NumPy instead of in the engine. Results go to benchmarks/results/rank_real.md.

Needs: pip install -e '.[bench]'
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.parity_real import machine  # noqa: E402
from penstock import Engine, __version__  # noqa: E402
from penstock.bench.quality.data import read_beir  # noqa: E402
from penstock.bench.quality.judge import candidates  # noqa: E402
from penstock.bench.quality.scores import cosines, evaluate  # noqa: E402

Scores = NDArray[np.float64]
Score = Callable[[list[str], list[str]], Scores]
TEMPLATE = "Query: {query}\nSentence: {document}"
PACKAGES = ("torch", "transformers", "sentence-transformers", "tokenizers")


@dataclass(frozen=True)
class Row:
    model: str
    reference: str
    pairs: int
    difference: float  # largest difference of a score
    ndcg: tuple[float, float]  # (reference, Penstock)

    @property
    def passed(self) -> bool:
        return f"{self.ndcg[0]:.3f}" == f"{self.ndcg[1]:.3f}"


class Ranker:
    """The candidates of each query, sorted by score."""

    def __init__(self, folder: Path, queries: int | None, kind: str) -> None:
        data = read_beir(str(folder))
        names = list(data.queries)[:queries]
        self.qrels = {name: data.qrels[name] for name in names}
        offered = candidates(data, kind, 100)
        self.pairs = [(name, doc) for name in names for doc in offered[name]]
        self.queries = [data.queries[name] for name, _ in self.pairs]
        self.documents = [data.documents[doc] for _, doc in self.pairs]

    def ndcg(self, scores: Scores) -> float:
        found: dict[str, list[tuple[float, str]]] = {}
        for (name, doc), value in zip(self.pairs, scores, strict=True):
            found.setdefault(name, []).append((-float(value), doc))
        rankings = {name: [doc for _, doc in sorted(rows)] for name, rows in found.items()}
        return evaluate(rankings, self.qrels)["ndcg@10"]

    def compare(self, model: Path, reference: str, theirs: Score, ours: Score) -> Row:
        expected, got = theirs(self.queries, self.documents), ours(self.queries, self.documents)
        row = Row(
            model.resolve().name,
            reference,
            len(self.pairs),
            float(np.abs(expected - got).max()),
            (self.ndcg(expected), self.ndcg(got)),
        )
        print(row, flush=True)
        return row


def cross_reference(folder: Path) -> Score:
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]", model_max_length=512
    )

    def score(queries: list[str], documents: list[str]) -> Scores:
        texts = [
            TEMPLATE.replace("{query}", query).replace("{document}", document)
            for query, document in zip(queries, documents, strict=True)
        ]
        found = []
        for first in range(0, len(texts), 32):
            inputs = tokenizer(
                texts[first : first + 32], truncation=True, max_length=512, padding=True, return_tensors="pt"
            )
            with torch.inference_mode():
                logits = model(**inputs).logits
            found.append((logits[:, 1] - logits[:, 0]).numpy())
        return np.concatenate(found).astype(np.float64)

    return score


def cross(folder: Path, ranker: Ranker) -> Row:
    options = {"score_template": TEMPLATE, "pooler_config": {"score_labels": [1, 0]}}
    with Engine(str(folder), device="cpu", dtype="float32", **options) as engine:

        def ours(queries: list[str], documents: list[str]) -> Scores:
            scores = engine.score(queries, documents, use_activation=False, truncate_prompt_tokens=-1)
            return scores.astype(np.float64)

        return ranker.compare(folder, "transformers", cross_reference(folder), ours)


def bi(folder: Path, ranker: Ranker, in_numpy: bool) -> Row:
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(folder), device="cpu")

    def compared(embed: Callable[[list[str]], NDArray[np.float32]]) -> Score:
        def score(queries: list[str], documents: list[str]) -> Scores:
            texts = list(dict.fromkeys(queries + documents))
            place = {text: at for at, text in enumerate(texts)}
            vectors = embed(texts)
            rows = [vectors[[place[text] for text in side]] for side in (queries, documents)]
            return cosines(*rows)

        return score

    theirs = compared(lambda texts: reference.encode(texts, batch_size=32, show_progress_bar=False))
    with Engine(str(folder), device="cpu", dtype="float32") as engine:

        def in_engine(queries: list[str], documents: list[str]) -> Scores:
            return engine.score(queries, documents, truncate_prompt_tokens=-1).astype(np.float64)

        here = compared(lambda texts: engine.embed(texts, truncate_prompt_tokens=-1, progress=False))
        return ranker.compare(folder, "sentence-transformers", theirs, here if in_numpy else in_engine)


def markdown(rows: list[Row], queries: int, in_numpy: bool, candidates: str) -> str:
    offered = "its 100 best by BM25" if candidates == "bm25" else "the passages judged for it"
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    lines = [
        "# Rankings with real weights",
        "",
        f"{datetime.now(UTC).date().isoformat()} · {machine()} · fp32 on the CPU · Python "
        f"{platform.python_version()}, penstock {__version__}, {versions}",
        "",
        f"TREC DL19 passage sample, {queries} judged queries, each ranking {offered}.",
        "Measured with `benchmarks/rank_real.py`. The promise: nDCG@10 equal to the reference's to three",
        "digits.",
        *(["Vectors of the embedder were compared in NumPy."] if in_numpy else []),
        "",
        "| model | reference | pairs | largest difference | nDCG@10 (reference / Penstock) | equal |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        both = f"{row.ndcg[0]:.4f} / {row.ndcg[1]:.4f}"
        cells = (row.model, row.reference, str(row.pairs), f"{row.difference:.1e}", both)
        lines.append(f"| {' | '.join(cells)} | {'yes' if row.passed else 'NO'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, help="DL19 in BEIR's layout")
    parser.add_argument("--cross", type=Path, help="folder of reranker-mini")
    parser.add_argument("--bi", type=Path, help="folder of an embedder, for example MiniLM")
    parser.add_argument("--vectors", action="store_true", help="compare the embedder's vectors in NumPy")
    parser.add_argument("--candidates", choices=("bm25", "judged"), default="bm25")
    parser.add_argument("--queries", type=int, help="use only the first N queries")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    ranker = Ranker(options.data, options.queries, options.candidates)
    rows = [cross(options.cross, ranker)] if options.cross else []
    if options.bi:
        rows.append(bi(options.bi, ranker, options.vectors))
    table = markdown(rows, len(ranker.qrels), options.vectors, options.candidates)
    (options.out / "rank_real.md").write_text(table)
    print(table)
    return 0 if rows and all(row.passed for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

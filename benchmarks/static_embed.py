"""Static embeddings: short texts per second with the offline engine, model2vec and sentence-transformers.

    python benchmarks/static_embed.py MODEL [--texts 200000] [--save]

All three read the same folder and take turns on the same texts in one run. Texts are ten consecutive words of
the corpus (`--corpus`, one document per line; without it, words of the vocabulary drawn by Zipf's law).
model2vec is left out if it is not installed. Each figure is the best of `--rounds`; Penstock's first round,
in which no word is cached yet, is shown separately.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock import Engine

Embed = Callable[[list[str]], Any]


def make_texts(model: Path, corpus: Path | None, count: int) -> list[str]:
    draw = np.random.default_rng(0)
    if corpus is not None:
        words = corpus.read_text(encoding="utf-8").split()
        starts = draw.integers(0, len(words) - 10, count)
        return [" ".join(words[start : start + 10]) for start in starts.tolist()]
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    known = sorted(word for word in vocabulary if word.isalpha() and len(word) > 1)
    ranks = np.minimum(draw.zipf(1.2, (count, 10)), len(known)) - 1
    order = draw.permutation(len(known))
    return [" ".join(known[order[rank]] for rank in row) for row in ranks.tolist()]


def contenders(folder: str) -> dict[str, Embed]:
    engine = Engine(folder, device="cpu")
    found: dict[str, Embed] = {"penstock": engine.embed}
    try:
        from model2vec import StaticModel

        found["model2vec"] = StaticModel.from_pretrained(folder).encode
    except ImportError:
        print("model2vec is not installed")
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(folder, device="cpu")
    found["sentence-transformers"] = lambda texts: reference.encode(texts, batch_size=2048)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--texts", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/static_embed.md")
    options = parser.parse_args()
    texts = make_texts(options.model, options.corpus, options.texts)
    load = os.getloadavg()[0]
    rates: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    answers: dict[str, Any] = {}
    for name, embed in contenders(str(options.model)).items():
        for _ in range(options.rounds):
            began, cpu = time.perf_counter(), time.process_time()
            answers[name] = embed(texts)
            rates.setdefault(name, []).append(len(texts) / (time.perf_counter() - began))
            busy.setdefault(name, []).append((time.process_time() - cpu) / len(texts) * 1e6)
    ours = answers["penstock"]
    lines = [
        f"{len(texts):,} texts of 10 words ({sum(map(len, texts)) / len(texts):.0f} characters), "
        f"{'from a corpus' if options.corpus else 'drawn by Zipf’s law'}; {os.cpu_count()} cores; "
        f"load average before the run {load:.1f}.",
        "",
        "| engine | texts/s, first round | texts/s, best | CPU µs a text, best | largest difference |",
        "|---|---|---|---|---|",
    ]
    for name in rates:
        difference = float(np.abs(np.asarray(answers[name]) - ours).max())
        first, best = rates[name][0], max(rates[name])
        lines.append(f"| {name} | {first:,.0f} | {best:,.0f} | {min(busy[name]):.1f} | {difference:.1e} |")
    table = "\n".join(lines)
    print(table)
    if options.save:
        out = Path(__file__).parent / "results" / "static_embed.md"
        head = "# Static embeddings\n\nBy `python benchmarks/static_embed.py MODEL --save`.\n\n"
        out.write_text(f"{head}Model: {options.model.name}. {table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

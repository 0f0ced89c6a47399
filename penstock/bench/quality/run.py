"""`penstock bench quality`: runs the evaluations, prints them, and fails if a limit is missed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.bench.console import print_note, print_result
from penstock.bench.offline.embedders import Embedder, open_embedder
from penstock.bench.options import EmbedderName, EngineOptions, QualityOptions, QualityTask
from penstock.bench.quality.data import Pairs, RetrievalData, read_beir, read_pairs
from penstock.bench.quality.judge import (
    Figures,
    agreement,
    candidates,
    late_interaction,
    reranking,
    retrieval,
    similarity,
)
from penstock.bench.quality.server import ServerClient
from penstock.bench.report.save import save_figures
from penstock.errors import BadValue

_REFERENCE_TEXTS = 1000


def bench_quality(backend: EmbedderName, engine: EngineOptions, options: QualityOptions) -> int:
    pairs = read_pairs(options.sts, options.sts_columns) if options.sts else None
    judged = _limited(read_beir(options.beir), options.num_queries) if options.beir else None
    if pairs is None and judged is None:
        raise BadValue("give --sts FILE or --beir FOLDER, or both")
    results: dict[str, Figures] = {}
    if options.task is QualityTask.EMBED:
        with _subject(backend, engine, options) as subject:
            _embedding(results, subject, engine, options, pairs, judged)
    else:
        _ranking(results, engine, options, judged)
    print_result(_table(results))
    save_figures(options.output_json, {"task": options.task.value, "figures": results})
    missed = _missed(results, options)
    for line in missed:
        print_note(line)
    return 1 if missed else 0


def _embedding(
    results: dict[str, Figures],
    subject: Embedder | ServerClient,
    engine: EngineOptions,
    options: QualityOptions,
    pairs: Pairs | None,
    judged: RetrievalData | None,
) -> None:
    if options.reference is not None:
        texts = [*(pairs.left if pairs else []), *(judged.documents.values() if judged else [])]
        reference = open_embedder(options.reference, engine.unquantized())
        results[f"against {options.reference}"] = agreement(subject, reference, texts[:_REFERENCE_TEXTS])
        reference.close()
    if pairs is not None:
        results["similarity"] = similarity(subject, pairs)
    if judged is not None:
        results["retrieval"] = retrieval(subject, judged, options.query_prompt, options.document_prompt)


def _ranking(
    results: dict[str, Figures], engine: EngineOptions, options: QualityOptions, judged: RetrievalData | None
) -> None:
    if judged is None or options.base_url is None:
        raise BadValue(f"--task {options.task} needs --beir FOLDER and --base-url URL of a server")
    if options.candidates not in ("bm25", "judged"):
        raise BadValue(f"--candidates {options.candidates!r} is unknown; use bm25 or judged")
    offered = candidates(judged, options.candidates, options.top_k)
    server = ServerClient(options.base_url, next(iter(engine.config.model_names), None), options.header)
    try:
        if options.task is QualityTask.RERANK:
            results["reranking"] = reranking(server, judged, offered)
        else:
            results["late interaction"] = late_interaction(server, server, judged, offered)
    finally:
        server.close()


@contextmanager
def _subject(
    backend: EmbedderName, engine: EngineOptions, options: QualityOptions
) -> Iterator[Embedder | ServerClient]:
    """The server at --base-url, if given, otherwise an engine in this process."""
    subject: Embedder | ServerClient
    if options.base_url is not None:
        subject = ServerClient(options.base_url, next(iter(engine.config.model_names), None), options.header)
    else:
        subject = open_embedder(backend, engine)
    try:
        yield subject
    finally:
        subject.close()


def _limited(judged: RetrievalData, count: int | None) -> RetrievalData:
    if count is None:
        return judged
    queries = dict(list(judged.queries.items())[:count])
    return RetrievalData(judged.documents, queries, {name: judged.qrels[name] for name in queries})


def _table(results: dict[str, Figures]) -> str:
    lines = [" Quality ".center(50, "=")]
    for title, figures in results.items():
        lines.append(title.center(50, "-"))
        lines += [f"{name + ':':<40} {value:.4f}" for name, value in figures.items()]
    lines.append("=" * 50)
    return "\n".join(lines)


def _missed(results: dict[str, Figures], options: QualityOptions) -> list[str]:
    limits = {
        "cosine min": options.min_cosine,
        "spearman": options.min_spearman,
        "ndcg@10": options.min_ndcg,
    }
    found = {name: value for figures in results.values() for name, value in figures.items()}
    lines = []
    for name, limit in limits.items():
        if limit is None:
            continue
        if name not in found:
            raise BadValue(f"there is a limit for {name}, but no data to measure it with")
        if not found[name] >= limit:
            lines.append(f"{name} is {found[name]:.4f}, below the limit of {limit:g}")
    return lines

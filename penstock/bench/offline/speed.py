"""`penstock bench throughput` and `bench latency`: engines in this process, in turn, over several rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from penstock.bench.console import note_if_busy, print_note, print_result
from penstock.bench.datasets.item import Item
from penstock.bench.datasets.load import count_tokens, load_items
from penstock.bench.datasets.tokens import BenchTokenizer, load_tokenizer
from penstock.bench.offline.embedders import Embedder, open_embedder
from penstock.bench.options import DataOptions, EmbedderName, EngineOptions, TextOptions
from penstock.bench.report.save import save_figures
from penstock.errors import BadValue


@dataclass(slots=True)
class Timed:
    """Times of one engine, one entry for each round or iteration."""

    name: str
    load_s: float
    seconds: list[float] = field(default_factory=list)


def texts_for(options: TextOptions, model: str | None) -> tuple[list[str], BenchTokenizer]:
    """The texts of a data set; a request may have several texts."""
    fields = {name: getattr(options, name) for name in options.__struct_fields__}
    tokenizer = load_tokenizer(model)
    items = load_items(DataOptions(**fields, skip_chat_template=True), lambda: tokenizer)
    texts = [text for item in items for text in item.texts]
    if not texts:
        raise BadValue("the data set holds no texts", param="dataset_path")
    return texts, tokenizer


def bench_throughput(
    names: Sequence[EmbedderName],
    engine: EngineOptions,
    texts: TextOptions,
    rounds: int,
    num_warmups: int,
    output_json: str | None,
) -> int:
    found, tokenizer = texts_for(texts, engine.config.model)
    tokens = sum(count_tokens([Item(text) for text in found], tokenizer))

    timed = take_turns(
        names, engine, rounds, partial(_seconds_for, found), lambda e: e.embed(found[:num_warmups])
    )
    print_result(_throughput_table(timed, len(found), tokens))
    save_figures(output_json, {"texts": len(found), "tokens": tokens, **_seconds(timed)})
    return 0


def bench_latency(
    names: Sequence[EmbedderName],
    engine: EngineOptions,
    input_len: int,
    num_iters_warmup: int,
    num_iters: int,
    output_json: str | None,
) -> int:
    """Measure one batch of `batch_size` texts repeatedly."""
    options = TextOptions(num_prompts=engine.batch_size, random_input_len=input_len)
    found, _ = texts_for(options, engine.config.model)

    def warm(embedder: Embedder) -> None:
        for _ in range(num_iters_warmup):
            embedder.embed(found)

    timed = take_turns(names, engine, num_iters, partial(_seconds_for, found), warm)
    print_result(_latency_table(timed, engine.batch_size, input_len))
    save_figures(output_json, {"batch_size": engine.batch_size, "input_len": input_len, **_seconds(timed)})
    return 0


def _seconds_for(texts: Sequence[str], embedder: Embedder) -> float:
    began = time.perf_counter()
    embedder.embed(texts)
    return time.perf_counter() - began


def take_turns(
    names: Sequence[EmbedderName],
    engine: EngineOptions,
    rounds: int,
    once: Callable[[Embedder], float],
    warm: Callable[[Embedder], object],
) -> list[Timed]:
    if rounds < 1:
        raise BadValue("at least one round is needed")
    if len(set(names)) < len(names):
        raise BadValue("--backend names an engine twice")
    note_if_busy()
    open_ones: list[tuple[Timed, Embedder]] = []
    try:
        for name in names:
            began = time.perf_counter()
            embedder = open_embedder(name, _options_for(name, engine, names))
            open_ones.append((Timed(name.value, time.perf_counter() - began), embedder))
            warm(embedder)
        for number in range(rounds):
            for timed, embedder in open_ones if number % 2 == 0 else open_ones[::-1]:
                timed.seconds.append(once(embedder))
    except KeyboardInterrupt:
        print_note("interrupted: the figures cover the rounds before")
        if not all(timed.seconds for timed, _ in open_ones) or len(open_ones) < len(names):
            raise
    finally:
        for _, embedder in open_ones:
            embedder.close()
    return [timed for timed, _ in open_ones]


def _options_for(name: EmbedderName, engine: EngineOptions, names: Sequence[EmbedderName]) -> EngineOptions:
    """Options for one engine: in a comparison, peers without support for quantization run unquantized."""
    if engine.config.quantization is None or len(names) == 1:
        return engine
    if name in (EmbedderName.PENSTOCK, EmbedderName.ONNXRUNTIME):
        return engine
    return engine.unquantized()


def _throughput_table(timed: Sequence[Timed], texts: int, tokens: int) -> str:
    lines = [" Offline Throughput ".center(78, "="), f"{texts} texts, {tokens} tokens"]
    lines.append(f"{'':<24}{'texts/s':>10}{'tok/s':>12}{'load s':>9}   ratio (from – to)")
    for one in timed:
        seconds = median(one.seconds)
        lines.append(
            f"{one.name:<24}{texts / seconds:>10.1f}{tokens / seconds:>12.0f}{one.load_s:>9.1f}   "
            + _ratio(timed[0], one)
        )
    lines.append("=" * 78)
    return "\n".join(lines)


def _latency_table(timed: Sequence[Timed], batch: int, length: int) -> str:
    lines = [" Offline Latency ".center(78, "="), f"batches of {batch} × {length} tokens, milliseconds"]
    lines.append(f"{'':<24}{'mean':>9}{'p10':>9}{'p50':>9}{'p90':>9}{'p99':>9}")
    for one in timed:
        values = np.array(one.seconds) * 1000
        shown = [float(values.mean()), *(float(v) for v in np.percentile(values, (10, 50, 90, 99)))]
        lines.append(f"{one.name:<24}" + "".join(f"{value:>9.2f}" for value in shown))
    lines.append("=" * 78)
    return "\n".join(lines)


def _ratio(first: Timed, one: Timed) -> str:
    """The speed of `one` relative to the first, by round."""
    ratios = [base / own for base, own in zip(first.seconds, one.seconds, strict=False)]
    return f"{median(ratios):.3f} × ({min(ratios):.3f} – {max(ratios):.3f})"


def _seconds(timed: Sequence[Timed]) -> dict[str, Any]:
    return {"engines": {one.name: {"load_s": one.load_s, "seconds": one.seconds} for one in timed}}

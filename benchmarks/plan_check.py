"""The accuracy of `penstock plan`: for a job on this machine, and for recorded rates of held-out models.

    python benchmarks/plan_check.py [--texts 20000] [--rounds 10] [--seconds 4] [--threads 2] [--save PATH]

Each round of the job does what `penstock plan --measure` does, on a sample of the texts, and then runs a part
of the job itself. They alternate because other programs use the machine too.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from texts import natural_texts

from penstock import Engine
from penstock.offline.throughput import measure
from penstock.planning.fit import ModelError
from penstock.planning.plan import Corpus, compute
from penstock.planning.predict import MEASURED_HERE, Rate, fit_of

SAMPLE_ROWS = 1000


def short_texts(count: int) -> Iterator[str]:
    """Pieces of natural paragraphs, 4 to 24 words each. No two are equal."""
    rng = random.Random(0)
    words = [word for text in natural_texts(4000) for word in text.split()]
    for number in range(count):
        begin = rng.randrange(len(words) - 24)
        yield f"{number} " + " ".join(words[begin : begin + rng.randrange(4, 25)])


def check_job(options: argparse.Namespace) -> list[str]:
    texts = list(short_texts(options.texts))
    sample = texts[:: max(1, len(texts) // SAMPLE_ROWS)]
    part = -(-len(texts) // options.rounds)
    rates, taken = [], []
    with Engine(device="cpu", threads=options.threads, share_identical=False) as engine:
        lengths = [len(row) for row in engine.tokenize(sample)]
        for begin in range(0, len(texts), part):
            rates.append(measure(engine, sample, lengths, options.seconds).tokens_per_s)
            began = time.perf_counter()
            engine.embed(texts[begin : begin + part], truncate_prompt_tokens=-1, progress=False)
            taken.append(time.perf_counter() - began)
            print(f"{rates[-1]:,.0f} tokens/s measured; {part} texts took {taken[-1]:.1f} s", flush=True)
    corpus = Corpus(len(texts), lengths, 0.0)
    # The harmonic mean, because each round's measurement predicts equally many texts.
    rate = Rate(MEASURED_HERE, tokens_per_s=statistics.harmonic_mean(rates))
    predicted_s, first_s = (
        3600 * compute(corpus, each, 1, None).gpu_hours
        for each in (rate, Rate(MEASURED_HERE, tokens_per_s=rates[0]))
    )
    taken_s = sum(taken)
    return [
        f"{len(texts):,} texts of {corpus.mean_tokens:.1f} tokens on average, all-MiniLM-L6-v2, "
        f"{options.threads} threads, {options.rounds} rounds; load average {os.getloadavg()[0]:.1f}.",
        "",
        "| prediction by | predicted | the job took | error |",
        "|---|---|---|---|",
        f"| the measurements of all rounds | {predicted_s:.0f} s | {taken_s:.0f} s | "
        f"{predicted_s / taken_s - 1:+.1%} |",
        f"| the first measurement alone | {first_s:.0f} s | {taken_s:.0f} s | {first_s / taken_s - 1:+.1%} |",
    ]


def check_recorded(gpu: str) -> list[str]:
    fit = fit_of(gpu)
    kinds = (
        ("a machine, by the mean of all machines on the same rows", fit.between_machines),
        ("the fit's own measurements", fit.fitted),
        ("a row length of a model that was left out", fit.unseen_row),
        ("a model that was left out", fit.unseen_model),
    )
    lines = ["| prediction of | median error | 90 % of errors | largest |", "|---|---|---|---|"]
    for name, errors in kinds:
        lines.append(f"| {name} | {_shown(ModelError.of([error for _, error in errors]))} |")
        for where, depends in (("decided by the GPU", False), ("decided in part by the host", True)):
            some = [
                e for point, e in errors if fit.model.depends_on_host(point.shape, point.length) == depends
            ]
            lines.append(f"| – rows {where} | {_shown(ModelError.of(some))} |")
    lines += [
        "",
        "| model that was left out | median error | 90 % of errors | largest |",
        "|---|---|---|---|",
    ]
    for model in dict.fromkeys(point.model for point, _ in fit.unseen_model):
        own = [error for point, error in fit.unseen_model if point.model == model]
        lines.append(f"| {model} | {_shown(ModelError.of(own))} |")
    return lines


def _shown(error: ModelError) -> str:
    return f"{error.median:.1%} | {error.common:.1%} | {error.largest:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    head = f"{datetime.now():%Y-%m-%d %H:%M} · {os.cpu_count()} cores"
    sections = [head, "", *check_job(options), "", "Recorded rates of the H200:", "", *check_recorded("h200")]
    print("\n".join(sections))
    if options.save:
        options.save.write_text("\n".join(sections) + "\n")


if __name__ == "__main__":
    main()

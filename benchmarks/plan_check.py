"""How well `penstock plan` predicts: a job on this machine, and recorded rates of models that a fit has not seen.

    python benchmarks/plan_check.py [--texts 20000] [--seconds 10] [--flags "--threads 2"] [--save PATH]

The job: `penstock plan --measure` on a sample of the texts, `penstock embed` on all of them, and the plan again,
since other programs use the machine too. What starting takes is measured on one text and subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from texts import natural_texts

from penstock.planning.fit import ModelError
from penstock.planning.predict import fit_of

SAMPLE_ROWS = 1000


def short_texts(count: int) -> Iterator[str]:
    """Pieces of natural paragraphs, 4 to 24 words each. No two are equal."""
    rng = random.Random(0)
    words = [word for text in natural_texts(4000) for word in text.split()]
    for number in range(count):
        begin = rng.randrange(len(words) - 24)
        yield f"{number} " + " ".join(words[begin : begin + rng.randrange(4, 25)])


def penstock(*words: str) -> str:
    command = [sys.executable, "-m", "penstock", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def predicted_s(file: Path, count: int, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds and tokens/s that the planner names."""
    flags = ("--docs", str(count), "--sample", str(file), "--sample-rows", str(SAMPLE_ROWS), "--json")
    measure = ("--gpu", "cpu", "--measure", "--seconds", str(options.seconds))
    plan = json.loads(penstock("plan", *flags, *measure, *shlex.split(options.flags)))
    return plan["wall_hours"] * 3600, plan["rate"]["tokens_per_s"]


def embed_s(file: Path, options: argparse.Namespace) -> float:
    began = time.perf_counter()
    output = str(file.with_suffix(".parquet"))
    penstock("embed", str(file), "-o", output, "--overwrite", "--device", "cpu", *shlex.split(options.flags))
    return time.perf_counter() - began


def write(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def check_job(options: argparse.Namespace) -> list[str]:
    texts = list(short_texts(options.texts))
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder) / "texts.jsonl", texts)
        one = write(Path(folder) / "one.jsonl", texts[:1])
        start_s = min(embed_s(one, options) for _ in range(2))
        before_s, _ = predicted_s(file, options.texts, options)
        load = os.getloadavg()[0]
        taken_s = embed_s(file, options) - start_s
        after_s, rate = predicted_s(file, options.texts, options)
    mean_s = statistics.mean((before_s, after_s))
    return [
        f"{options.texts:,} texts, {rate * after_s / options.texts:.1f} tokens on average, all-MiniLM-L6-v2, "
        f"`{options.flags or 'default flags'}`; load average {load:.1f}.",
        "",
        "| predicted before | predicted after | mean | the job took | error of the mean |",
        "|---|---|---|---|---|",
        f"| {before_s:.0f} s | {after_s:.0f} s | {mean_s:.0f} s | {taken_s:.0f} s | "
        f"{mean_s / taken_s - 1:+.1%} |",
        "",
        f"Starting took {start_s:.1f} s more, which a plan does not count.",
    ]


def check_recorded(gpu: str) -> list[str]:
    fit = fit_of(gpu)
    lines = ["| prediction of | median error | 90 % of errors | largest |", "|---|---|---|---|"]
    for name, error in (
        ("the fit's own measurements", fit.fitted),
        ("a measurement that was left out", fit.unseen_point),
        ("a model that was left out", fit.unseen_model),
    ):
        lines.append(f"| {name} | {error.median:.1%} | {error.common:.1%} | {error.largest:.1%} |")
    lines += ["", "| model that was left out | median error | largest |", "|---|---|---|"]
    for model, errors in fit.errors_by_model().items():
        of_model = ModelError.of(errors)
        lines.append(f"| {model} | {of_model.median:.1%} | {of_model.largest:.1%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--flags", default="", help="of both commands, such as '--threads 2'")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    head = f"{datetime.now():%Y-%m-%d %H:%M} · {os.cpu_count()} cores"
    sections = [head, "", *check_job(options), "", "Recorded rates of the H200:", "", *check_recorded("h200")]
    print("\n".join(sections))
    if options.save:
        options.save.write_text("\n".join(sections) + "\n")


if __name__ == "__main__":
    main()

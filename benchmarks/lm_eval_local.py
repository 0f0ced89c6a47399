"""Compare `lm_eval` on a server with `lm_eval` on transformers, item by item.

    python benchmarks/lm_eval_local.py MODEL [--save]

MODEL is the folder of a model that generates. The script starts a server on loopback. `lm_eval` uses it
through `local-completions` (every kind of request: multiple choice, log-likelihoods, rolling log-likelihoods,
and texts up to a stop string) and through `local-chat-completions`. Then it runs the same tasks on the model
itself (`hf`). Tasks and items are in benchmarks/lm_eval_tasks. Exit code 1 if a log-likelihood differs by
more than 1e-3 or a text differs.

Needs: pip install 'lm_eval[api,hf]'
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from penstock import __version__  # noqa: E402
from tests.e2e.server import serving  # noqa: E402

TASKS = ROOT / "benchmarks" / "lm_eval_tasks"
SCORED = ("penstock_choices", "penstock_cloze", "penstock_passages")
TEXTS = "penstock_sums"
TOLERANCE = 1e-3
PACKAGES = ("lm_eval", "transformers", "torch", "tokenizers")
Samples = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Run:
    """The result of one lm_eval run: figures and items by task."""

    figures: dict[str, dict[str, float]]
    samples: Samples


def evaluate(model: str, arguments: dict[str, Any], tasks: tuple[str, ...], *flags: str) -> Run:
    """Run lm_eval in the tasks' folder, because the tasks name their item files by relative paths."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "lm_eval", "--model", model, "--tasks", ",".join(tasks)]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
        command += ["--include_path", str(TASKS), "--output_path", out, "--log_samples", *flags]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": out}
        done = subprocess.run(command, cwd=TASKS, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"lm_eval --model {model} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        return _read(Path(out))


def _read(folder: Path) -> Run:
    results = json.loads(next(folder.rglob("results_*.json")).read_text())["results"]
    samples: Samples = {}
    for file in folder.rglob("samples_*.jsonl"):
        task = next(name for name in results if file.name.startswith(f"samples_{name}_"))
        samples[task] = sorted(
            map(json.loads, file.read_text().splitlines()), key=lambda item: item["doc_id"]
        )
    figures = {
        task: {
            name: value for name, value in row.items() if isinstance(value, float) and "stderr" not in name
        }
        for task, row in results.items()
    }
    return Run(figures, samples)


def likelihoods(item: dict[str, Any]) -> list[float]:
    """The log-likelihoods of all texts that were scored for an item."""
    return [float(answer[0] if isinstance(answer, list) else answer) for (answer,) in item["resps"]]


def greedy(item: dict[str, Any]) -> list[str]:
    return [str(answer[1]) for (answer,) in item["resps"] if isinstance(answer, list)]


def difference(ours: Run, theirs: Run, task: str) -> tuple[int, float, int]:
    """The number of texts, the largest log-likelihood difference, and the number of `is_greedy`
    differences."""
    pairs = list(zip(ours.samples[task], theirs.samples[task], strict=True))
    values = [abs(a - b) for x, y in pairs for a, b in zip(likelihoods(x), likelihoods(y), strict=True)]
    return len(values), max(values), sum(greedy(x) != greedy(y) for x, y in pairs)


def differing_texts(ours: Run, theirs: Run) -> tuple[int, int]:
    pairs = list(zip(ours.samples[TEXTS], theirs.samples[TEXTS], strict=True))
    return len(pairs), sum(x["resps"] != y["resps"] for x, y in pairs)


def table(ours: Run, theirs: Run, chat: Run, their_chat: Run) -> tuple[list[str], bool]:
    lines = [
        "| task | kind | texts | figures: server | figures: `hf` | difference |",
        "|---|---|---|---|---|---|",
    ]
    kinds = dict(zip(SCORED, ("multiple_choice", "loglikelihood", "loglikelihood_rolling"), strict=True))
    fine = True
    for task, kind in kinds.items():
        count, most, other = difference(ours, theirs, task)
        fine &= most <= TOLERANCE and not other
        said = f"log-likelihoods by at most {most:.1e}, greedy or not: {other}"
        lines.append(f"| {task} | {kind} | {count} | {_told(ours, task)} | {_told(theirs, task)} | {said} |")
    for kind, mine, other in (
        ("generate_until", ours, theirs),
        ("generate_until, `local-chat-completions`", chat, their_chat),
    ):
        count, differing = differing_texts(mine, other)
        fine &= not differing
        figures = f"{_told(mine, TEXTS)} | {_told(other, TEXTS)}"
        lines.append(f"| {TEXTS} | {kind} | {count} | {figures} | {differing} texts |")
    return lines, fine


def _told(run: Run, task: str) -> str:
    return ", ".join(f"{name.split(',')[0]} {value:.4f}" for name, value in run.figures[task].items())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a model that generates")
    parser.add_argument("--batch", type=int, default=8, help="rows per request")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/lm_eval.md")
    args = parser.parse_args()
    folder = args.model.resolve()
    with serving(
        str(folder), "--device", "cpu", "--dtype", "float32", "--served-model-name", "served"
    ) as server:
        told = {
            "model": "served",
            "tokenizer": folder,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
        }
        asked = (*SCORED, TEXTS)
        completions = told | {"base_url": f"{server.url}/v1/completions", "max_length": 1024}
        ours = evaluate("local-completions", completions, asked, "--batch_size", str(args.batch))
        chats = {"model": "served", "base_url": f"{server.url}/v1/chat/completions", "num_concurrent": 2}
        chat = evaluate("local-chat-completions", chats, (TEXTS,), "--apply_chat_template")
    reference = {"pretrained": folder, "dtype": "float32", "max_length": 1024}
    theirs = evaluate("hf", reference, asked, "--device", "cpu", "--batch_size", str(args.batch))
    their_chat = evaluate("hf", reference, (TEXTS,), "--device", "cpu", "--apply_chat_template")
    lines, fine = table(ours, theirs, chat, their_chat)
    print("\n".join(lines))
    if args.save:
        _save(folder.name, lines)
    print("equal" if fine else "NOT equal", file=sys.stderr)
    return not fine


def _save(name: str, lines: list[str]) -> None:
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    head = [
        "# lm_eval against a server",
        "",
        f"`python benchmarks/lm_eval_local.py {name} --save`: Penstock {__version__}, {versions}, Python "
        f"{platform.python_version()}, fp32 on a CPU. Items are few and easy: they compare two ways of "
        "asking the same model, and say nothing of its worth.",
        "",
    ]
    (ROOT / "benchmarks" / "results" / "lm_eval.md").write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    sys.exit(main())

"""Documents per second on a CPU: Penstock, sentence-transformers and ONNX Runtime in one run.

    python benchmarks/cpu_embed.py [--texts 2000] [--rounds 3] [--threads 2] [--http] [--save]

Every backend runs in its own process and loads its model once. The backends take turns embedding the same
texts, so that a noisy machine affects all of them equally. The medians of the rounds are compared. ONNX
Runtime gets its fused transformer graph and batches sorted by length.

Needs: pip install -e '.[bench]' onnx
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
from texts import natural_texts

Embed = Callable[[list[str]], np.ndarray]
BACKENDS = ("penstock", "sentence-transformers", "onnxruntime", "penstock-int8", "onnxruntime-int8")
BATCH = 32


def penstock(threads: int, **options: object) -> Embed:
    from penstock import Engine

    engine = Engine(device="cpu", threads=threads, **options)
    return lambda texts: engine.embed(texts, truncate_prompt_tokens=-1, progress=False)


def sentence_transformers(threads: int) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    from penstock.checkpoint.find import default_folder

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(default_folder()), device="cpu")
    return lambda texts: model.encode(texts, batch_size=BATCH, show_progress_bar=False)


def onnxruntime(threads: int, int8: bool = False) -> Embed:
    import onnxruntime as ort
    from tokenizers import Tokenizer

    from penstock.checkpoint.find import default_folder

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(onnx_file(int8)), options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(default_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def embed(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out = np.empty((len(texts), 384), dtype=np.float32)
        for first in range(0, len(texts), BATCH):
            rows = order[first : first + BATCH]
            encoded = tokenizer.encode_batch([texts[i] for i in rows])
            ids = np.array([e.ids for e in encoded], dtype=np.int64)
            mask = np.array([e.attention_mask for e in encoded], dtype=np.int64)
            (hidden,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
            weights = mask[:, :, None].astype(np.float32)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
            out[rows] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return out

    return embed


def onnx_file(int8: bool) -> Path:
    """The default model as an ONNX graph with fused attention, exported once into the temporary folder."""
    folder = Path(tempfile.gettempdir()) / "penstock-bench-onnx"
    folder.mkdir(exist_ok=True)
    plain, fused, quantised = folder / "plain.onnx", folder / "fused.onnx", folder / "int8.onnx"
    if not fused.is_file():
        _export(plain)
        from onnxruntime.transformers.optimizer import optimize_model

        optimize_model(str(plain), "bert", num_heads=12, hidden_size=384).save_model_to_file(str(fused))
    if int8 and not quantised.is_file():
        from onnx import TensorProto
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(
            fused,
            quantised,
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"DefaultTensorType": TensorProto.FLOAT},
        )
    return quantised if int8 else fused


def _export(file: Path) -> None:
    import torch
    from transformers import AutoModel

    from penstock.checkpoint.find import default_folder

    model = AutoModel.from_pretrained(default_folder(), attn_implementation="eager").eval()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    ids = torch.ones(2, 16, dtype=torch.long)
    axes = {0: "rows", 1: "length"}
    torch.onnx.export(
        Hidden(),
        (ids, ids),
        str(file),
        input_names=["input_ids", "attention_mask"],
        output_names=["hidden"],
        dynamic_axes={"input_ids": axes, "attention_mask": axes, "hidden": axes},
        opset_version=17,
        dynamo=False,
    )


def build(name: str, threads: int) -> Embed:
    match name:
        case "penstock":
            return penstock(threads)
        case "penstock-int8":
            return penstock(threads, quantization="int8")
        case "sentence-transformers":
            return sentence_transformers(threads)
        case "onnxruntime":
            return onnxruntime(threads)
        case "onnxruntime-int8":
            return onnxruntime(threads, int8=True)
    raise SystemExit(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}")


def worker(name: str, count: int, threads: int) -> None:
    """Embed the texts once for each line on standard input, and report the seconds."""
    texts = natural_texts(count)
    embed = build(name, threads)
    embed(texts[:64])
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        vectors = embed(texts)
        seconds = time.perf_counter() - began
        if path := line.strip():
            np.save(path, vectors)
        print(json.dumps({"seconds": seconds}), flush=True)


class Worker:
    def __init__(self, name: str, count: int, threads: int) -> None:
        self.name = name
        self.seconds: list[float] = []
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", name, "--texts", str(count), "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._read()

    def run(self, save_to: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(save_to + "\n")
        self.process.stdin.flush()
        self.seconds.append(self._read()["seconds"])

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; run with --worker {self.name} to see why")
        return json.loads(line)


def compare(names: list[str], count: int, rounds: int, threads: int) -> dict:
    workers = [Worker(name, count, threads) for name in names]
    vectors = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for member in workers:
                path = str(Path(folder) / f"{member.name}.npy") if turn == 0 else ""
                member.run(path)
                if path:
                    vectors[member.name] = np.load(path)
    for member in workers:
        member.end()
    reference = vectors.get("sentence-transformers", vectors[names[0]])
    return {
        member.name: {
            "docs_per_s": [count / s for s in member.seconds],
            "median": statistics.median(count / s for s in member.seconds),
            "min_cosine": float((vectors[member.name] * reference).sum(1).min()),
        }
        for member in workers
    }


def over_http(count: int, threads: int, clients: int, rounds: int) -> dict:
    """Embed the same texts through the server, one text per request, `clients` requests at a time."""
    from http_load import run_load, start

    texts = natural_texts(count)
    with start(["--device", "cpu", "--threads", str(threads)]) as server:
        run_load(server.port, texts[:64], clients)
        rates = [count / run_load(server.port, texts, clients) for _ in range(rounds)]
    return {"docs_per_s": rates, "median": statistics.median(rates)}


def table(results: dict) -> str:
    lines = ["| backend | docs/s (median) | rounds | least cosine |", "|---|---|---|---|"]
    for name, row in results.items():
        rounds = ", ".join(f"{rate:.1f}" for rate in row["docs_per_s"])
        cosine = f"{row['min_cosine']:.6f}" if "min_cosine" in row else ""
        lines.append(f"| {name} | {row['median']:.1f} | {rounds} | {cosine} |")
    median = {name: row["median"] for name, row in results.items()}
    pairs = (
        ("penstock", "sentence-transformers"),
        ("penstock", "onnxruntime"),
        ("penstock-int8", "onnxruntime-int8"),
        ("penstock over HTTP", "penstock"),
    )
    lines += ["", "| ratio | |", "|---|---|"]
    for ours, theirs in pairs:
        if ours in median and theirs in median:
            lines.append(f"| {ours} / {theirs} | {median[ours] / median[theirs]:.2f} |")
    return "\n".join(lines)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--http", action="store_true", help="also measure 32 clients over HTTP")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cpu_embed.md")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.texts, options.threads)
    if "onnxruntime" in options.backends:
        onnx_file("onnxruntime-int8" in options.backends)
    results = compare(options.backends.split(","), options.texts, options.rounds, options.threads)
    if options.http:
        results["penstock over HTTP"] = over_http(options.texts, options.threads, 32, options.rounds)
    text = table(results)
    print(text)
    if options.save:
        packages = ("torch", "sentence-transformers", "onnxruntime", "tokenizers", "numpy")
        head = [
            "# CPU embedding, all-MiniLM-L6-v2",
            "",
            f"{date.today()} · {cpu_name()}, {options.threads} threads · "
            f"Python {platform.python_version()} · "
            + ", ".join(f"{name} {version(name)}" for name in packages),
            "",
            f"`python benchmarks/cpu_embed.py --texts {options.texts} --rounds {options.rounds}"
            + (" --http" if options.http else "")
            + " --save`",
            "",
            "",
        ]
        target = Path(__file__).parent / "results" / "cpu_embed.md"
        target.write_text("\n".join(head) + text + "\n")
    return None


if __name__ == "__main__":
    main()

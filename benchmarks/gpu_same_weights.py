"""Compare full-size models on a GPU with transformers on the same seeded files; put load on a ModernBERT.

    python benchmarks/gpu_same_weights.py --models build/models [--save PATH]

MODELS holds a folder of configuration and tokenizer for each scenario; transformers draws the weights and
writes them as a checkpoint. Each model answers texts of mixed length, one at a time and all in one call, in
fp32 and bf16. The reference is transformers in fp32, one text at a time. Exit code 1 if a limit was missed or
a part failed. `--tiny --device cpu` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch
import transformers
from http_load import start
from numpy.typing import NDArray
from texts import natural_texts as english_texts
from tokenizers import Tokenizer
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from penstock import Engine  # noqa: E402
from tests.parity.texts import natural_texts as texts_of_the_world  # noqa: E402

Vectors = NDArray[np.float32]
BARS = {"float32": 0.9999, "bfloat16": 0.999}
LONGEST = 300  # tokens per row
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 180, 200, 255, 256, 290)
SPREAD = 0.02  # spread of norms and biases around their initial value, so that a missing tensor is noticed
COPIED = ("*.json", "*.txt", "1_Pooling")
LOAD_TOKENS, LOAD_CLIENTS = 256, 64
S2 = {"enable_chunked_prefill": True, "max_num_batched_tokens": 512, "long_prefill_token_threshold": 128}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "initializer_range": 0.07,  # makes a layer as strong as 0.02 does at full width
}


@dataclass(frozen=True)
class Subject:
    """A transformers class that writes the checkpoint, and how its hidden states become a vector."""

    folder: str  # contains the configuration, or only the tokenizer
    kind: str  # class of the checkpoint
    pool: Callable[[Vectors], Vectors]
    config: dict[str, Any] = field(default_factory=dict)  # overrides of the configuration in the folder
    tiny: dict[str, Any] = field(default_factory=dict)
    full: bool = False  # the reference must use bidirectional attention
    flags: dict[str, dict[str, Any]] = field(default_factory=dict)  # further bf16 runs: name → engine options

    @property
    def backbone(self) -> Any:
        return getattr(transformers, self.kind.replace("ForCausalLM", "Model"))


def cls(states: Vectors) -> Vectors:
    return states[0]


def last(states: Vectors) -> Vectors:
    return states[-1]


def mean(states: Vectors) -> Vectors:
    return states.mean(0)


def mean_behind_start(states: Vectors) -> Vectors:
    """The mean of all tokens except the start token: GritLM without an instruction."""
    return states[1:].mean(0) if len(states) > 1 else states[0]


MODERNBERT = {
    "architectures": ["ModernBertModel"],
    "model_type": "modernbert",
    "vocab_size": 50_368,
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "max_position_embeddings": 8192,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "pad_token_id": 0,
    "cls_token_id": 101,
    "bos_token_id": 101,
    "sep_token_id": 102,
    "eos_token_id": 102,
    "torch_dtype": "float32",
}
GROUPED = {"num_key_value_heads": 2}
SUBJECTS = {
    "gritlm-7b, 4 layers": Subject(
        "gritlm-7b",
        "MistralForCausalLM",
        mean_behind_start,
        {"num_hidden_layers": 4},
        GROUPED,
        full=True,
    ),
    "qwen3-embed-0.6b": Subject(
        "qwen3-embed-0.6b",
        "Qwen3ForCausalLM",
        last,
        tiny=GROUPED | {"head_dim": 16},
        flags={"S2's chunks": S2},
    ),
    "modernbert-base": Subject("bge-base", "ModernBertModel", mean, MODERNBERT, {"local_attention": 32}),
    "bge-base": Subject("bge-base", "BertModel", cls),
    "xlmr-large": Subject("xlmr-large", "XLMRobertaModel", cls),
}
SERVED = "modernbert-base"


@dataclass
class Row:
    """Results of one configuration of a model. Cosines are the smallest over all texts or tokens."""

    model: str
    way: str
    embed: float
    token_embed: float
    alone: float  # largest difference of a component between a text run alone and in the batch
    tokens_alone: float
    bar: float

    @property
    def passed(self) -> bool:
        return min(self.embed, self.token_embed) >= self.bar

    def cells(self) -> str:
        verdict = "yes" if self.passed else "NO"
        return (
            f"| {self.model} | {self.way} | {self.embed:.7f} | {self.token_embed:.7f} "
            f"| {self.alone:.1e} | {self.tokens_alone:.1e} | ≥ {self.bar} {verdict} |"
        )


@dataclass
class Report:
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    load: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Report a failed part and continue with the next."""
        began = time.perf_counter()
        try:
            yield
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
        print(f"[{name}: {time.perf_counter() - began:.1f} s]", flush=True)

    def note(self, line: str) -> None:
        self.notes.append(line)
        print(line, flush=True)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row.cells(), flush=True)


# The checkpoint.


def write_checkpoint(subject: Subject, models: Path, folder: Path, device: str, tiny: bool) -> None:
    """Write seeded weights of the class, with the tokenizer and pooling of the scenario's folder."""
    source = models / subject.folder
    folder.mkdir(parents=True)
    for file in chain.from_iterable(source.glob(pattern) for pattern in COPIED):
        (shutil.copytree if file.is_dir() else shutil.copy)(file, folder / file.name)
    told = {} if "model_type" in subject.config else json.loads((source / "config.json").read_text())
    config = told | subject.config | (TINY | subject.tiny if tiny else {})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    torch.manual_seed(0)
    with torch.device(device):
        kind = getattr(transformers, subject.kind)
        model = kind(kind.config_class.from_pretrained(folder)).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += SPREAD * torch.randn_like(parameter)
    model.to(getattr(torch, config["torch_dtype"])).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # the class would write other keys
    if subject.pool is mean:
        pooling = folder / "1_Pooling" / "config.json"
        said = json.loads(pooling.read_text())
        cut = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
        width = {"word_embedding_dimension": config["hidden_size"]}
        pooling.write_text(json.dumps(said | cut | width))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8192}))


def make_texts(folder: Path, count: int) -> tuple[list[str], list[list[int]]]:
    """English texts truncated to given numbers of tokens, texts in other scripts, and the token rows of all
    texts."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    found: list[str] = []
    for tokens, text in zip(LENGTHS, stretched(english_texts(400)), strict=False):
        cut = tokenizer.encode(text, add_special_tokens=False).offsets[tokens - 1][1]
        found.append(text[:cut])
    found += [text for text in texts_of_the_world(200)[35:] if text.strip()]
    rows = {text: tokenizer.encode(text).ids for text in found}
    rows = {text: row for text, row in rows.items() if len(row) <= LONGEST}
    chosen = list(rows)[:count]
    return chosen, [rows[text] for text in chosen]


def stretched(paragraphs: list[str]) -> Iterator[str]:
    """Join paragraphs until each text has enough words for the longest row."""
    text = ""
    for paragraph in paragraphs:
        text += paragraph + " "
        if len(text.split()) > LONGEST:
            yield text
            text = ""


# The answers.


@torch.inference_mode()
def reference_states(
    subject: Subject, folder: Path, rows: list[list[int]], device: str, dtype: torch.dtype
) -> list[Vectors]:
    """Run each row alone, so that nothing is padded."""
    model: nn.Module = subject.backbone.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model = model.to(device).eval()
    found = []
    for row in rows:
        mask = torch.ones(1, len(row), dtype=torch.long, device=device)
        if subject.full:
            mask = torch.zeros(1, 1, len(row), len(row), dtype=dtype, device=device)
        states = model(input_ids=torch.tensor([row], device=device), attention_mask=mask).last_hidden_state
        found.append(states[0].float().cpu().numpy())
    return found


def cosines(found: Vectors, wanted: Vectors) -> NDArray[np.float64]:
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def worst(found: Vectors, wanted: Vectors) -> float:
    """The smallest cosine; NaN, which fails every limit, if shapes differ or a value is not finite."""
    return float(cosines(found, wanted).min()) if found.shape == wanted.shape else float("nan")


def difference(batch: list[Vectors], alone: list[Vectors]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(batch, alone, strict=True))


def ask(
    name: str, way: str, engine: Engine, texts: list[str], vectors: Vectors, states: list[Vectors], bar: float
) -> Row:
    together = engine.embed(texts, progress=False)
    tokens = engine.token_embed(texts, normalize=True, progress=False)
    alone = [engine.embed([text])[0] for text in texts]
    tokens_alone = [engine.token_embed([text], normalize=True)[0] for text in texts]
    return Row(
        name,
        way,
        min(worst(together, vectors), worst(np.stack(alone), vectors)),
        min(worst(np.concatenate(found), np.concatenate(states)) for found in (tokens, tokens_alone)),
        difference(list(together), alone),
        difference(tokens, tokens_alone),
        bar,
    )


def compare(name: str, subject: Subject, folder: Path, options: argparse.Namespace, report: Report) -> None:
    texts, rows = make_texts(folder, options.texts)
    lengths = [len(row) for row in rows]
    states = reference_states(subject, folder, rows, options.device, torch.float32)
    vectors = np.stack([subject.pool(each) for each in states])
    apart = cosines(vectors[1:], vectors[:-1])
    report.note(
        f"{name}: {len(texts)} texts of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all; "
        f"a text's vector against the next one's has a median cosine of {np.median(apart):.4f}."
    )
    if not np.median(apart) < BARS["bfloat16"]:
        report.failures.append(f"{name}: texts are so alike that their cosines say nothing")
    with report.part(f"{name}, transformers bf16"):
        rough = reference_states(subject, folder, rows, options.device, torch.bfloat16)
        pooled = np.stack([subject.pool(each) for each in rough])
        report.note(
            f"{name}: transformers in bf16 has a worst cosine of {worst(pooled, vectors):.7f} (embed) and "
            f"{worst(np.concatenate(rough), np.concatenate(states)):.7f} (token_embed)."
        )
    ways: list[tuple[str, str, dict[str, Any]]] = [(dtype, dtype, {}) for dtype in BARS]
    ways += [(f"bfloat16, {way}", "bfloat16", flags) for way, flags in subject.flags.items()]
    for way, dtype, flags in ways:
        with (
            report.part(f"{name}, {way}"),
            Engine(str(folder), device=options.device, dtype=dtype, **flags) as engine,
        ):
            report.add(ask(name, way, engine, texts, vectors, states, BARS[dtype]))


# The load.


def serve(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Check answers to known texts while `penstock bench serve` keeps the server busy."""
    subject = SUBJECTS[SERVED]
    texts, rows = make_texts(folder, options.texts)
    states = reference_states(subject, folder, rows, options.device, torch.float32)
    vectors = np.stack([subject.pool(each) for each in states])
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    began = time.perf_counter()
    with start([str(folder), "--device", options.device, "--dtype", dtype]) as server:
        ready_s = time.perf_counter() - began
        load = bench_command(server.port, folder, options.seconds)
        lowest, asked = 1.0, 0
        with subprocess.Popen(load, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as bench:
            draw = np.random.default_rng(0)
            while bench.poll() is None:
                chosen = draw.integers(0, len(texts), 4)
                answers = request(server.port, [texts[i] for i in chosen])
                lowest = float(np.minimum(lowest, worst(answers, vectors[chosen])))  # keeps NaN, unlike min()
                asked += len(chosen)
                time.sleep(0.05)
            assert bench.stdout is not None
            print(bench.stdout.read(), flush=True)
        if bench.returncode:
            raise RuntimeError(f"penstock bench serve ended with {bench.returncode}")
    result = json.loads((folder.parent / "load.json").read_text())
    passed = lowest >= BARS[dtype]
    report.load += [
        f"`penstock serve {SERVED} --dtype {dtype}`, ready after {ready_s:.1f} s; "
        f"`penstock bench serve --backend openai-embeddings …`, random texts of {LOAD_TOKENS} tokens, "
        f"{LOAD_CLIENTS} at a time, {options.seconds:g} s.",
        "",
        "| req/s | tok/s | p50 ms | p99 ms | completed | failed | answers checked meanwhile | worst cosine |",
        "|---|---|---|---|---|---|---|---|",
        f"| {result['request_throughput']:,.0f} | {result['total_token_throughput']:,.0f} "
        f"| {result['p50_e2el_ms']:.1f} | {result['p99_e2el_ms']:.1f} | {result['completed']:,} "
        f"| {result['failed']} | {asked} | {lowest:.7f} (≥ {BARS[dtype]} {'yes' if passed else 'NO'}) |",
    ]
    print("\n".join(report.load), flush=True)
    if not passed or result["failed"]:
        report.failures.append(f"load: worst cosine {lowest:.7f}, {result['failed']} failed requests")


def bench_command(port: int, folder: Path, seconds: float) -> list[str]:
    flags = {
        "--backend": "openai-embeddings",
        "--base-url": f"http://127.0.0.1:{port}",
        "--tokenizer": folder,
        "--dataset-name": "random",
        "--random-input-len": LOAD_TOKENS,
        "--num-prompts": 1000,
        "--num-warmups": LOAD_CLIENTS,
        "--max-concurrency": LOAD_CLIENTS,
        "--duration": seconds,
        "--metric-percentiles": "50,99",
        "--percentile-metrics": "e2el",
        "--result-dir": folder.parent,
        "--result-filename": "load.json",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    return [sys.executable, "-m", "penstock", "bench", "serve", *words, "--save-result"]


def request(port: int, texts: list[str]) -> Vectors:
    body = json.dumps({"input": texts}).encode()
    told = Request(f"http://127.0.0.1:{port}/v1/embeddings", body, {"Content-Type": "application/json"})
    with urlopen(told, timeout=30) as response:
        answer = json.load(response)
    return np.array([each["embedding"] for each in answer["data"]], dtype=np.float32)


# The table.


def markdown(report: Report, options: argparse.Namespace, seconds: float) -> str:
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    packages = ("torch", "transformers", "tokenizers", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    lines = [
        "# Full-size shapes against transformers on the same files",
        "",
        f"{date.today()} · {device} · Python {platform.python_version()}, {versions} · {seconds:.0f} s",
        "",
        f"`python {shlex.join(['benchmarks/gpu_same_weights.py', *sys.argv[1:]])}`",
        "",
        "Seeded random weights, written by transformers; the reference is transformers in fp32 on the same",
        "files and device, eager attention, one text at a time, no TF32. A worst cosine is over all texts",
        "(or tokens), each both alone and in one call with all others; differences are of unit vectors,",
        "alone against in the batch.",
        "",
        "| model | run in | worst cosine, embed | worst cosine, token_embed | alone vs batch, embed "
        "| alone vs batch, token_embed | bar |",
        "|---|---|---|---|---|---|---|",
        *(row.cells() for row in report.rows),
        "",
        *(f"- {note}" for note in report.notes),
    ]
    if report.load:
        lines += ["", "## ModernBERT under load", "", *report.load]
    if report.failures:
        lines += ["", "## Failed", "", *(f"- {failure}" for failure in report.failures)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of the scenarios' model folders")
    parser.add_argument("--only", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS), metavar="NAME")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=8, help="duration of the load; 0: no load")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--save", type=Path, help="write the table to this file")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    report, began = Report(), time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.only:
            folder = Path(temporary) / name.split(",")[0]
            with report.part(name):
                write_checkpoint(SUBJECTS[name], options.models, folder, options.device, options.tiny)
                compare(name, SUBJECTS[name], folder, options, report)
            if name != SERVED:
                shutil.rmtree(folder, ignore_errors=True)
        if options.seconds and SERVED in options.only:
            with report.part("load"):
                serve(Path(temporary) / SERVED, options, report)
    text = markdown(report, options, time.perf_counter() - began)
    print("\n" + text)
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(text)
    return 0 if all(row.passed for row in report.rows) and not report.failures else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""The H200 loads over HTTP: one server per model, with `penstock bench` as the client on the same machine.

    python benchmarks/gpu_loads.py --models DIR [--rounds 3] [--only PATTERN] [--save PATH]

DIR holds model folders (configuration and tokenizer; weights are random). Every load runs for a few seconds
after a discarded warm-up. A load that fails is reported with the end of the server's log, and the others
continue. `--list` names the loads. `--serve-flags "--device null"` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from http.client import HTTPConnection
from importlib import metadata
from pathlib import Path
from typing import Any

from model_shapes import DERIVED, derive
from process_cores import keep_cores
from process_profile import Profile
from texts import mixed_texts

HERE = Path(__file__).resolve().parent
CLIENTS = 6  # load processes
WARM_UP_S = 1.5
MEMORY_BYTES_S = 4.3e12  # memory bandwidth of an H200 in practice
PRODUCTS_S = {1: 1400e12, 2: 790e12}  # floating-point operations of its products, by bytes of a weight
NUM_NATURAL = 36_000  # distinct texts: more than a round sends, so no cache answers
CHAT_S = 10.0  # least length of a round of conversations, each of which takes a second or more


@dataclass(frozen=True)
class Load:
    """One row of the table: the requests for a server, and the figures that the result is compared with."""

    name: str
    title: str
    kind: str  # ids | natural | rerank | file | s2 | latency; gen, chat, both generate tokens
    tokens: int = 0  # per text, or per answer in loads that generate
    concurrency: int | None = None
    documents: int = 1  # documents per request
    goal: float | None = None  # req/s; for latency ms, for gen tok/s
    floor: float | None = None  # req/s that the GEMMs alone allow; for gen computed from the model
    vllm: str = "–"  # vLLM's figure; "A beside B": measured in the same run as Penstock's B
    sampling: tuple[str, ...] = ("--temperature", "0")
    prompt_tokens: int = 2  # per request, in loads that generate

    @property
    def generates(self) -> bool:
        return self.kind in ("gen", "chat", "both")


@dataclass(frozen=True)
class Setup:
    """A server and the loads that run on it one after another."""

    name: str
    model: str
    loads: tuple[Load, ...]
    flags: tuple[str, ...] = ()
    apis: int | None = None  # None: --api-server-count
    default: bool = True
    show_processes: bool = False
    engine_cores: int = 0  # cores reserved for each engine; 0: the system decides


S4_FLAGS = ("--enforce-eager", "--max-model-len", "4096", "--max-num-batched-tokens", "4096")
S2_FLAGS = (
    *("--enable-chunked-prefill", "--max-num-batched-tokens", "512"),
    *("--long-prefill-token-threshold", "128"),
)


def _s4(name: str, title: str, goal: float, floor: float) -> Load:
    return Load(name, f"S4 ColBERT 24 × 1024, {title}", "rerank", 2048, 64, 1, goal, floor, "150")


def _natural(name: str, title: str, concurrency: int, goal: float, floor: float, vllm: str) -> Load:
    title = f"{title}, natural texts, {concurrency} at a time"
    return Load(name, title, "natural", 110, concurrency, 1, goal, floor, vllm)


def _chat(name: str, title: str, concurrency: int, goal: float, vllm: str = "–") -> Load:
    title = f"Qwen3-8B {title}, 1,024 → 128 tokens, {concurrency} at a time"
    return Load(name, title, "chat", 128, concurrency, goal=goal, vllm=vllm, prompt_tokens=1024)


# Rounds repeat their prompts. Without a prefix cache, each prompt is computed like a new one.
CHAT_FLAGS = ("--max-model-len", "2048", "--no-enable-prefix-caching")
FP8_FLAGS = ("--quantization", "fp8", "--kv-cache-dtype", "fp8")

SETUPS = (
    Setup(
        "natural-bge",
        "bge-base",
        (
            _natural("natural-bge-64", "bge-base", 64, 12_000, 31_800, "1,772 beside 7,660"),
            _natural("natural-bge-256", "bge-base", 256, 20_000, 31_800, "3,125 beside 12,597"),
        ),
        default=False,
    ),
    Setup(
        "natural-bge2",
        "bge-base",
        (
            _natural("natural-bge2-64", "bge-base, 2 engines", 64, 12_000, 31_800, "1,772"),
            _natural("natural-bge2-256", "bge-base, 2 engines", 256, 20_000, 31_800, "3,125"),
        ),
        ("--engines-per-gpu", "2"),
        default=False,
    ),
    Setup(
        "natural-cores",
        "bge-base",
        (
            _natural("natural-cores-64", "bge-base, 2 cores for the engine", 64, 12_000, 31_800, "1,772"),
            _natural("natural-cores-256", "bge-base, 2 cores for the engine", 256, 20_000, 31_800, "3,125"),
        ),
        default=False,
        engine_cores=2,
    ),
    Setup(
        "natural-qwen3",
        "qwen3-embed-0.6b",
        (
            _natural("natural-qwen3-64", "Qwen3-0.6B", 64, 4000, 5950, "1,238 beside 3,078"),
            _natural("natural-qwen3-256", "Qwen3-0.6B", 256, 5200, 5950, "2,034 beside 3,913"),
        ),
        default=False,
    ),
    Setup(
        "chat",
        "qwen3-8b",
        (
            _chat("chat-16", "bf16", 16, 2150, "1,889 beside 1,958"),
            _chat("chat-64", "bf16", 64, 3700, "3,289 beside 3,330"),
        ),
        CHAT_FLAGS,
        default=False,
    ),
    Setup(
        "chat-turns",
        "qwen3-8b",
        (
            _chat("chat-turns-16", "bf16, prompts and decodes take turns", 16, 2150),
            _chat("chat-turns-64", "the same", 64, 3700),
        ),
        (*CHAT_FLAGS, "--target-itl-ms", "0"),
        default=False,
    ),
    Setup(
        "chat-fp8",
        "qwen3-8b",
        (_chat("chat-fp8-64", "FP8 weights and KV", 64, 5500),),
        (*CHAT_FLAGS, *FP8_FLAGS),
        default=False,
    ),
    Setup(
        "chat-fp8-turns",
        "qwen3-8b",
        (_chat("chat-fp8-turns-64", "FP8 weights and KV, taking turns", 64, 5500),),
        (*CHAT_FLAGS, *FP8_FLAGS, "--target-itl-ms", "0"),
        default=False,
    ),
    Setup(
        "bge",
        "bge-base",
        (
            Load("bge-latency", "bge-base, 32 tokens, one at a time", "latency", 32, 1, goal=2.5),
            Load(
                "bge-32x64",
                "bge-base, 32 tokens, 64 at a time",
                "ids",
                32,
                64,
                1,
                7000,
                113_000,
                "2,116 beside 11,504",
            ),
            Load("bge-32x256", "bge-base, 32 tokens, 256", "ids", 32, 256, 1, 10_000, 113_000, "2,772"),
            Load("bge-256x256", "bge-base, 256 tokens, 256", "ids", 256, 256, 1, 6000, 12_500, "1,496"),
            Load("bge-500x64", "bge-base, 500 tokens, 64", "ids", 500, 64, 1, 3000, 5200, "788"),
        ),
    ),
    Setup(
        "e5",
        "e5-base",
        (Load("e5-500x64", "e5-base, 500 tokens, 64", "ids", 500, 64, 1, 3000, 5200, "788"),),
        default=False,
    ),
    Setup(
        "xlmr",
        "xlmr-large",
        (Load("xlmr-256x256", "XLM-R-large, 256 tokens, 256", "ids", 256, 256, 1, 2800, 3700, "1,239"),),
    ),
    Setup(
        "cross",
        "cross-bert-base",
        (Load("cross", "cross-encoder, 32 × 200 tokens, 64", "rerank", 200, 64, 32, 250, 469, "31"),),
    ),
    Setup(
        "s4-given",
        "colbert-large",
        (_s4("s4-given-1", "as given, 1 API process", 260, 496),),
        S4_FLAGS,
        apis=1,
        show_processes=True,
    ),
    Setup(
        "s4-given-4",
        "colbert-large",
        (_s4("s4-given-4", "as given, 4 API processes", 260, 496),),
        S4_FLAGS,
        apis=4,
        show_processes=True,
    ),
    Setup(
        "s4-own",
        "colbert-large",
        (_s4("s4-own", "own defaults", 330, 583),),
        ("--max-model-len", "4096"),  # otherwise documents are truncated to the limit of the model
        apis=4,
        show_processes=True,
    ),
    Setup(
        "s2-given",
        "qwen3-embed-0.6b",
        (Load("s2-given", "S2 token vectors, 512-token steps", "s2", 0, 4, 16, 30, 51, "3.3"),),
        S2_FLAGS,
        apis=1,
    ),
    Setup(
        "s2-own",
        "qwen3-embed-0.6b",
        (Load("s2-own", "S2 token vectors, own step size", "s2", 0, 4, 16, 60, 160, "–"),),
        apis=4,
    ),
    Setup(
        "s1",
        "gritlm-7b",
        (
            Load(
                "s1", "S1 GritLM-7B, 2,000 at once, bf16", "file", 45, None, 1, 1000, 1280, "900 beside 1,016"
            ),
        ),
        ("--max-model-len", "4000"),
    ),
    Setup(
        "s1-fp8",
        "gritlm-7b",
        (Load("s1-fp8", "S1 GritLM-7B, 2,000 at once, FP8", "file", 45, None, 1, 1600, 2250, "–"),),
        ("--max-model-len", "4000", "--quantization", "fp8"),
    ),
    Setup(
        "gen",
        "qwen3-4b",
        (
            Load("gen-greedy", "Qwen3-4B, 128 × 512 tokens, greedy", "gen", 512, 128, goal=24_000),
            Load(
                "gen-sampled",
                "Qwen3-4B, 128 × 512, top-p 0.95, top-k 50",
                "gen",
                512,
                128,
                goal=23_500,
                sampling=("--temperature", "0.8", "--top-p", "0.95", "--top-k", "50"),
            ),
        ),
    ),
    Setup(
        "gen-moe",
        "qwen3-30b-a3b",
        (
            Load(
                "gen-moe",
                "S3 Qwen3-30B-A3B FP8, 128 × 512 tokens",
                "gen",
                512,
                128,
                vllm="9,831 beside 10,402",
            ),
        ),
        ("--quantization", "fp8", "--enable-expert-parallel"),
    ),
    Setup(
        "gritlm-both",
        "gritlm-7b",
        (Load("gritlm-both", "GritLM-7B, 32 streams beside embeddings of S1", "both", 256, 32),),
        ("--max-model-len", "4000"),
    ),
)


@dataclass(frozen=True)
class Figures:
    """The result of one run of a load."""

    rate: float  # req/s
    p50_ms: float
    p99_ms: float
    token_rate: float
    failed: int = 0
    tpot_ms: float = 0.0  # for loads that generate; their rate is in tokens
    ttft_ms: float = 0.0
    itl_p99_ms: float = 0.0
    beside: float = 0.0  # embeddings/s measured at the same time
    busy: float = 0.0  # share of the run in which the device ran a step; 0: unknown


@dataclass
class Row:
    load: Load
    floor_ms: float = 0.0  # minimum time of a step that generates one token per row
    start_s: float = 0.0
    apis: int = 0
    memory_mib: int = 0
    runs: list[Figures] = field(default_factory=list)
    problem: str | None = None


class Failed(Exception):
    """A server or a client failed."""


class Memory(threading.Thread):
    """The peak device memory in use while a setup runs, as reported by the driver."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mib = 0
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
            self._process = subprocess.Popen(
                query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self.start()

    def run(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdigit():
                self.peak_mib = max(self.peak_mib, int(line))

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


class Server:
    """`penstock serve` in its own process, with its log in a file."""

    def __init__(
        self, setup: Setup, options: argparse.Namespace, logs: Path, more: tuple[str, ...] = ()
    ) -> None:
        self.name = setup.model
        self.port = options.port or _free_port()
        self.apis = _apis(setup, options)
        self.log = logs / f"{setup.name}.log"
        self.command = [sys.executable, "-m", "penstock", "serve", str(folder_of(setup.model, options))]
        runner = "generate" if any(load.generates for load in setup.loads) else "pooling"
        self.command += ["--load-format", "dummy", "--runner", runner, "--port", str(self.port)]
        self.command += ["--served-model-name", setup.model, "--api-server-count", str(self.apis)]
        self.command += ["--drain", "2", *setup.flags, *shlex.split(options.serve_flags), *more]
        if setup.name.startswith(("s2", "s4")) and not options.share:
            self.command.append(
                "--no-share-identical"
            )  # requests repeat one body or query: compute it each time
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, patience_s: float) -> float:
        """Seconds from the command to the first `200` of /ready."""
        began = time.perf_counter()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        while not self._ready():
            if self._process.poll() is not None:
                raise Failed(f"the server ended with status {self._process.returncode}")
            if time.perf_counter() - began > patience_s:
                raise Failed(f"the server was not ready after {patience_s:g} s")
            time.sleep(0.02)
        return time.perf_counter() - began

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its child processes end with it
            self._process.wait()
        self._process = None

    def loaded(self) -> str:
        """The start-up time that the engine reports."""
        said = [line.split("loaded in ")[1] for line in self.tail(200) if "loaded in " in line]
        return f"; the engine {said[-1]}" if said else ""

    def tail(self, lines: int = 12) -> list[str]:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines() if line.strip()][-lines:]

    def processes(self) -> list[tuple[int, str]]:
        """(pid, module) of the supervisor and all its child processes."""
        assert self._process is not None
        return list(_tree(self._process.pid))

    def device_s(self) -> float:
        """Seconds that steps have spent on the device so far."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        except OSError:
            return 0.0
        finally:
            connection.close()
        found = re.findall(r"^penstock_device_seconds_total\S* (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def _ready(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=1.0)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def folder_of(model: str, options: argparse.Namespace) -> Path:
    """The model's folder. Some missing folders are written with the tokenizer of another one."""
    folder = Path(options.models) / model
    if folder.is_dir() or model not in DERIVED:
        return folder
    source, changes = DERIVED[model]
    if not (Path(options.models) / source).is_dir():
        return folder
    return derive(Path(options.models) / source, Path(options.work) / model, changes)


def run_load(load: Load, server: Server, options: argparse.Namespace, seconds: float) -> Figures:
    """Run one load once, with its own client processes."""
    if load.kind == "s2":
        return _run_s2(load, server, seconds)
    if load.kind == "both":
        return _run_both(load, server, options, seconds)
    before = server.device_s()
    found = _bench(load, server, options, seconds)
    if load.generates:
        return _generated(found)
    counted = load.kind != "file"  # "file" has its warm-up requests in the same run
    return Figures(
        found["request_throughput"],
        found["median_e2el_ms"],
        found["p99_e2el_ms"],
        found["total_token_throughput"],
        found["failed"],
        busy=(server.device_s() - before) / found["duration"] if counted else 0.0,
    )


def _generated(found: dict[str, Any], beside: float = 0.0) -> Figures:
    return Figures(
        found["output_throughput"],
        found["median_e2el_ms"],
        found["p99_e2el_ms"],
        found["total_token_throughput"],
        found["failed"],
        found["median_tpot_ms"],
        found["median_ttft_ms"],
        found["p99_itl_ms"],
        beside,
    )


def _bench(load: Load, server: Server, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What `penstock bench serve` saves for a load."""
    result = Path(options.work) / f"{load.name}-{load.kind}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "penstock", "bench", "serve", "--base-url", server.url]
    command += ["--model", str(folder_of(server.name, options)), "--served-model-name", server.name]
    command += _data_flags(load, options, seconds)
    shown = "ttft,tpot,itl,e2el" if load.generates else "e2el"
    command += ["--percentile-metrics", shown, "--metric-percentiles", "50,95,99", "--save-result"]
    command += ["--result-dir", str(result.parent), "--result-filename", result.name]
    command += shlex.split(options.bench_flags)
    text = _client(command, seconds)
    if not result.exists():
        raise Failed("the client gave no result: " + " / ".join(text.strip().splitlines()[-3:]))
    found: dict[str, Any] = json.loads(result.read_text())
    if not found["completed"]:
        raise Failed(f"no request succeeded: {next((e for e in found['errors'] if e), 'no reason given')}")
    return found


def _run_both(load: Load, server: Server, options: argparse.Namespace, seconds: float) -> Figures:
    """Run streams for some seconds, and embed S1's texts at the same time."""
    texts = replace(load, kind="texts", concurrency=64)
    with ThreadPoolExecutor(1) as pool:
        embedded = pool.submit(_bench, texts, server, options, seconds)
        found = _bench(load, server, options, seconds)
        return _generated(found, embedded.result()["request_throughput"])


def _data_flags(load: Load, options: argparse.Namespace, seconds: float) -> list[str]:
    length = ["--random-input-len", str(load.tokens)]
    if load.kind == "latency":
        data = ["--backend", "openai-embeddings", "--dataset-name", "random", "--send-token-ids", *length]
        return [*data, "--num-prompts", "500", "--max-concurrency", "1", "--num-processes", "1"]
    clients = ["--num-processes", str(options.clients)]
    if load.concurrency is not None:
        clients += ["--max-concurrency", str(load.concurrency)]
    if load.kind in ("file", "texts"):
        data = ["--backend", "openai-embeddings", "--dataset-name", "custom", "--skip-chat-template"]
        data += ["--dataset-path", options.s1_file, "--custom-output-len", "1"]
        timed = ["--num-warmups", "100"] if load.kind == "file" else ["--duration", str(seconds)]
        return [*data, *clients, "--num-prompts", "2000", *timed]
    if load.kind == "natural":
        data = ["--backend", "openai-embeddings", "--dataset-name", "custom", "--skip-chat-template"]
        data += ["--dataset-path", str(_natural_file(options)), "--custom-output-len", "1"]
        data += ["--extra-body", '{"truncate_prompt_tokens": -1}']
        return [*data, *clients, "--num-prompts", str(NUM_NATURAL), "--duration", str(seconds)]
    if load.generates:
        made = load.tokens if seconds > WARM_UP_S else min(load.tokens, 32)
        data = ["--backend", "openai", "--dataset-name", "random", *load.sampling]
        data += ["--random-input-len", str(load.prompt_tokens), "--random-output-len"]
        data.append(str(options.output_len or made))
        if load.kind == "chat":
            wait = max(seconds, CHAT_S) if seconds > WARM_UP_S and not options.output_len else seconds
            return [*data, *clients, "--num-prompts", "1024", "--duration", str(wait)]
        data += ["--num-prompts", str(load.concurrency)]
        if load.kind == "both":
            return [*data, *clients, "--duration", str(seconds)]
        clients = ["--num-processes", str(options.clients)]  # all connections at once, as S3 demands
        return [*data, *clients, "--request-rate", "inf", "--num-warmups", "16"]
    if load.kind == "rerank":
        data = ["--backend", "vllm-rerank", "--dataset-name", "random-rerank", "--seed", "0", *length]
        if load.documents > 1:
            data += ["--random-batch-size", str(load.documents)]
        else:
            data += ["--random-range-ratio", "0.5"]
        if options.full and load.documents == 1:
            return [*data, *clients, "--num-prompts", "2000"]
        prompts = 256 * load.documents if load.documents > 1 else 512
        return [*data, *clients, "--num-prompts", str(prompts), "--duration", str(seconds)]
    data = ["--backend", "openai-embeddings", "--dataset-name", "random", "--send-token-ids", *length]
    return [*data, *clients, "--num-prompts", "4096", "--duration", str(seconds)]


def _natural_file(options: argparse.Namespace) -> Path:
    """Write a data set of texts whose lengths vary like those of stored paragraphs."""
    file = Path(options.work) / "natural.jsonl"
    if not file.exists():
        lines = [json.dumps({"prompt": text}) for text in mixed_texts(NUM_NATURAL)]
        file.write_text("\n".join(lines) + "\n")
    return file


def _run_s2(load: Load, server: Server, seconds: float) -> Figures:
    command = [sys.executable, str(HERE / "scenario_s2.py"), "--base-url", server.url]
    command += ["--model", server.name, "--seconds", str(seconds), "--clients", str(load.concurrency)]
    before = server.device_s()
    text = _client(command, seconds)
    spent = server.device_s() - before
    number = r"([\d,.]+)"
    pattern = rf"errors {number}, {number} req/s, {number} input tokens/s.*p50 {number}.*p99 {number}"
    found = re.search(pattern, text, re.DOTALL)
    if found is None:
        raise Failed("the client gave no result: " + " / ".join(text.strip().splitlines()[-3:]))
    failed, rate, tokens, p50, p99 = (float(value.rstrip(",.").replace(",", "")) for value in found.groups())
    return Figures(rate, p50, p99, tokens, int(failed), busy=spent / seconds)


def _client(command: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90 + 3 * seconds, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"the client did not end within {90 + 3 * seconds:g} s") from None
    return done.stdout + done.stderr


def _tree(pid: int) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        yield pid, words[words.index("-m") + 1] if "-m" in words else words[0]
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def gpu_report(server: Server) -> list[str]:
    """The processes that use device memory: the driver's list, and the server's processes that opened a
    device.

    In a container the driver may report other process ids, so both are shown.
    """
    lines = []
    for pid, name in server.processes():
        opened = set()
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(link.readlink())
                    if re.match(r"/dev/nvidia(\d+|-uvm)", target):
                        opened.add(target)
        lines.append(
            f"  {pid} {name}: {'opened ' + ', '.join(sorted(opened)) if opened else 'no device open'}"
        )
        if opened and name == "penstock.api.process":
            lines.append("  WRONG: an API process must not open the device")
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        found = [line for line in done.stdout.splitlines() if line.strip()]
        lines.append(f"  nvidia-smi, processes with memory: {'; '.join(found) or 'none listed'}")
    return lines


def run_setup(setup: Setup, loads: list[Load], options: argparse.Namespace, all_rows: list[Row]) -> None:
    """Add a row for each load, filled as far as the run gets."""
    server = Server(setup, options, Path(options.work))
    rows = [Row(load, floor_ms=floor_ms(setup, load, options), apis=server.apis) for load in loads]
    all_rows += rows
    if not folder_of(setup.model, options).is_dir():
        for row in rows:
            row.problem = f"there is no {setup.model} under --models"
        return
    memory = Memory()
    try:
        start_s = server.start(options.start_timeout)
        _say(f"{setup.name}: ready after {start_s:.1f} s, {server.apis} API processes{server.loaded()}")
        with keep_cores(server.processes(), setup.engine_cores):
            for row in rows:
                row.start_s = start_s
                _measure(row, server, options)
                if options.profile:
                    _profile(row.load, server, options)
                row.memory_mib = memory.peak_mib
        if setup.show_processes:
            _say("\n".join(gpu_report(server)))
    except Failed as error:
        unknown = next(
            (line for line in server.tail(40) if "--quantization" in line and "Usage" not in line), None
        )
        why = f"skipped: {unknown.strip(' │|')}" if unknown else f"failed: {error}"
        for row in rows:
            row.problem = row.problem or (why if not row.runs else None)
        _say(f"{setup.name}: {why}\n  " + "\n  ".join(server.tail()))
    finally:
        server.stop()
        memory.stop()


def _measure(row: Row, server: Server, options: argparse.Namespace) -> None:
    try:
        run_load(row.load, server, options, WARM_UP_S)
        for _ in range(options.rounds):
            row.runs.append(run_load(row.load, server, options, options.seconds))
            run = row.runs[-1]
            if row.load.generates:
                beside = f", beside {run.beside:,.1f} embeddings/s" if run.beside else ""
                times = f"TPOT {run.tpot_ms:.2f}, ITL p99 {run.itl_p99_ms:.1f}, TTFT {run.ttft_ms:.1f} ms"
                _say(f"  {row.load.name}: {run.rate:,.0f} tok/s, {times}{beside}")
                continue
            _say(f"  {row.load.name}: {run.rate:,.1f} req/s, p50 {run.p50_ms:.2f}, p99 {run.p99_ms:.2f} ms")
    except Failed as error:
        row.problem = f"failed: {error}"
        _say(f"  {row.load.name}: {error}\n    " + "\n    ".join(server.tail()))


def _profile(load: Load, server: Server, options: argparse.Namespace) -> None:
    """Repeat a load while the server's processes are sampled."""
    folder = Path(options.profile) / load.name
    seconds = max(options.seconds, 5.0)
    profile = Profile(server.processes(), folder, seconds - 2, server.port)
    timer = threading.Timer(2.5, profile.start)  # by then the client is running
    timer.start()
    with contextlib.suppress(Failed):
        run_load(load, server, options, seconds)
    timer.join()
    (folder / "profile.md").write_text("\n".join(profile.finish()) + "\n")


def table(rows: list[Row]) -> list[str]:
    """Medians over the rounds; shares are computed from the medians."""
    pooled = [row for row in rows if not row.load.generates]
    generated = [row for row in rows if row.load.generates]
    parts = [_pooled(pooled) if pooled else [], _written(generated) if generated else []]
    return [*parts[0], *([""] if all(parts) else []), *parts[1]]


def _written(rows: list[Row]) -> list[str]:
    lines = [
        "| load | tok/s median (min–max) | TPOT p50 ms | TTFT p50 ms | ITL p99 ms | floor of TPOT ms "
        "| share of floor | goal | vLLM | embeddings/s beside | start s | API processes | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        load = row.load
        if not row.runs:
            lines.append(f"| {load.title} | {row.problem} | | | | | | | | | | | |")
            continue
        rates = [run.rate for run in row.runs]
        spread = f" ({_short(min(rates))}–{_short(max(rates))})" if len(rates) > 1 else ""
        failed = sum(run.failed for run in row.runs)
        short = f"; {failed} failed" if failed else ""
        rate, tpot, ttft, itl, beside = (
            statistics.median(getattr(run, name) for run in row.runs)
            for name in ("rate", "tpot_ms", "ttft_ms", "itl_p99_ms", "beside")
        )
        share = f"{row.floor_ms / tpot:.0%}" if row.floor_ms and tpot else ""
        lines.append(
            f"| {load.title} | {_short(rate)}{spread}{short} | {tpot:.2f} | {ttft:.1f} | {itl:.1f} "
            f"| {f'{row.floor_ms:.2f}' if row.floor_ms else ''} | {share} | {_goal(load, rate, 0.0)} "
            f"| {load.vllm} | {_short(beside) if beside else ''} | {row.start_s:.1f} | {row.apis} "
            f"| {row.memory_mib or ''} |"
        )
    return lines


def floor_ms(setup: Setup, load: Load, options: argparse.Namespace) -> float:
    """The minimum time of a step: reading its weights and all keys and values once, or its products. In a
    load of conversations, each answer also needs the prefill of a prompt, which is spread over the answer's
    steps."""
    file = folder_of(setup.model, options) / "config.json"
    if load.kind not in ("gen", "chat") or not file.exists():
        return 0.0
    config = json.loads(file.read_text())
    width, layers, rows = config["hidden_size"], config["num_hidden_layers"], load.concurrency or 1
    head = config.get("head_dim") or width // config["num_attention_heads"]
    keys = 2 * head * config.get("num_key_value_heads", config["num_attention_heads"])
    attention = width * (2 * head * config["num_attention_heads"] + keys)
    used = 1.0  # share of the expert weights that a token uses
    if experts := config.get("num_experts"):
        used = config["num_experts_per_tok"] / experts
        missed = (1 - used) ** rows  # probability that no row chooses an expert
        feed = 3 * width * config["moe_intermediate_size"] * experts
        read_feed = feed * (1 - missed)
    else:
        feed = read_feed = 3 * width * config["intermediate_size"]
    weight = 1 if "--quantization" in setup.flags else 2  # bytes
    kv_bytes = 1 if "--kv-cache-dtype" in setup.flags else 2
    made = options.output_len or load.tokens
    length = load.prompt_tokens + made / 2  # mean tokens per row
    read = layers * (attention + read_feed) * weight + config["vocab_size"] * width * 2
    read += rows * length * keys * layers * kv_bytes
    tokens = rows * (1 + load.prompt_tokens / made)  # mean tokens per step
    products = 2 * tokens * layers * (attention + feed * used)
    return 1000 * max(read / MEMORY_BYTES_S, products / PRODUCTS_S[weight])


def _pooled(rows: list[Row]) -> list[str]:
    lines = [
        "| load | req/s median (min–max) | p50 ms | p99 ms | tok/s | goal | vLLM | share of floor "
        "| device busy | start s | API processes | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        load = row.load
        if not row.runs:
            lines.append(f"| {load.title} | {row.problem} | | | | | | | | | | |")
            continue
        rates = [run.rate for run in row.runs]
        rate = statistics.median(rates)
        spread = f" ({_short(min(rates))}–{_short(max(rates))})" if len(rates) > 1 else ""
        pairs = f" = {rate * load.documents:,.0f} pairs/s" if load.name == "cross" else ""
        failed = sum(run.failed for run in row.runs)
        short = f"; {failed} failed" if failed else ""
        p50, p99 = (statistics.median(getattr(r, name) for r in row.runs) for name in ("p50_ms", "p99_ms"))
        tokens = statistics.median(run.token_rate for run in row.runs)
        share = f"{rate / load.floor:.0%}" if load.floor else ""
        worked = statistics.median(run.busy for run in row.runs)
        busy = f"{worked:.0%}" if worked else ""
        lines.append(
            f"| {load.title} | {_short(rate)}{spread}{pairs}{short} | {p50:.2f} | {p99:.2f} | {tokens:,.0f} "
            f"| {_goal(load, rate, p50)} | {load.vllm} | {share} | {busy} | {row.start_s:.1f} | {row.apis} "
            f"| {row.memory_mib or ''} |"
        )
    return lines


def _goal(load: Load, rate: float, p50: float) -> str:
    if load.goal is None:
        return ""
    if load.kind == "latency":
        return f"p50 ≤ {load.goal} ms {'✓' if p50 <= load.goal else '✗'}"
    return f"≥ {load.goal:,.0f} {'✓' if rate >= load.goal else '✗'}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _short(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _apis(setup: Setup, options: argparse.Namespace) -> int:
    chosen = dict(pair.split("=") for pair in options.api)
    return int(chosen.get(setup.name, setup.apis or options.api_server_count))


def _say(text: str) -> None:
    print(text, flush=True)


def _versions() -> str:
    found = []
    for package in ("penstock", "torch", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    device = "no GPU"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        device = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or device
    cores = len(os.sched_getaffinity(0))
    return f"{device} · {cores} cores · Python {platform.python_version()} · {' · '.join(found)}"


def selected(options: argparse.Namespace) -> list[tuple[Setup, list[Load]]]:
    """Loads whose name matches --only; without it, all loads of the default run."""
    if options.only is None:
        return [(setup, list(setup.loads)) for setup in SETUPS if setup.default]
    pattern = re.compile(options.only)
    chosen = [(setup, [load for load in setup.loads if pattern.search(load.name)]) for setup in SETUPS]
    return [(setup, loads) for setup, loads in chosen if loads]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that select the loads and how they run."""
    parser.add_argument("--models", help="directory of the model folders")
    parser.add_argument("--s1-file", help="prompts of S1; by default gritlm_bench.jsonl in or beside DIR")
    parser.add_argument("--only", metavar="PATTERN", help="regular expression over the loads' names")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of a load with a time limit")
    parser.add_argument("--output-len", type=int, help="tokens per answer, instead of the load's")
    parser.add_argument("--full", action="store_true", help="S4 with all its 2,000 requests")
    parser.add_argument(
        "--api-server-count", type=int, default=8, help="API processes, for setups without their own number"
    )
    parser.add_argument(
        "--api", action="append", default=[], metavar="SETUP=N", help="API processes for one setup"
    )
    parser.add_argument("--clients", type=int, default=CLIENTS, help="load processes")
    parser.add_argument("--share", action="store_true", help="S2 and S4 with identical rows deduplicated")
    parser.add_argument("--serve-flags", default="", help="more flags for every server")
    parser.add_argument("--bench-flags", default="", help="more flags for every client except S2's")
    parser.add_argument("--profile", metavar="DIR", help="repeat each load once and sample its processes")
    parser.add_argument("--start-timeout", type=float, default=90.0)
    parser.add_argument("--port", type=int, default=0, help="port; by default a free one")
    parser.add_argument("--save", metavar="PATH", help="write the table as Markdown")


def complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.models is None:
        parser.error("--models is needed")
    if options.s1_file is None:
        places = [Path(options.models), Path(options.models).resolve().parent]
        found = next((p for place in places if (p := place / "gritlm_bench.jsonl").exists()), None)
        options.s1_file = str(found or "gritlm_bench.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--logs", help="directory for logs and results of the runs")
    parser.add_argument("--list", action="store_true", help="list the loads and exit")
    options = parser.parse_args()
    if options.list:
        for setup in SETUPS:
            for load in setup.loads:
                _say(
                    f"{load.name:<14} {setup.name:<11} {load.title}{'' if setup.default else ' (by --only)'}"
                )
        return
    complete(parser, options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # print the results so far
    began = time.perf_counter()
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        options.work = options.logs or stack.enter_context(tempfile.TemporaryDirectory(prefix="loads-"))
        Path(options.work).mkdir(parents=True, exist_ok=True)
        try:
            for setup, loads in selected(options):
                run_setup(setup, loads, options, rows)
        except KeyboardInterrupt:
            _say("stopped; the table holds what was measured")
        finally:
            lines = table(rows)
            seconds = time.perf_counter() - began
            _say("\n" + "\n".join(lines) + f"\n\n{seconds:.0f} s in all")
            if options.save:
                _save(Path(options.save), lines, options)


def _save(path: Path, lines: list[str], options: argparse.Namespace) -> None:
    places = {options.models: "DIR", options.s1_file: "FILE", options.logs: "DIR", options.save: "PATH"}
    own = [places.get(word, word) for word in sys.argv[1:]]
    head = f"# Loads through HTTP\n\n{datetime.now():%Y-%m-%d %H:%M} · {_versions()}\n\n"
    head += f"`python benchmarks/gpu_loads.py {shlex.join(own)}`\n\n"
    notes = (
        f"{options.rounds} rounds of {options.seconds:g} s, {options.clients} load processes beside the "
        "server, dummy weights; rows of `random` loads are token ids, one in a request. S2 computes every row"
        f"{' once for all clients' if options.share else ', though its clients send the same ones'}. "
        "The floor is the matrix products alone; of generation, weights, keys and values read once, or the "
        "products of prompts and answers, whichever takes longer. Where several engines share a device, the "
        "time of their steps is added up.\n\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + notes + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

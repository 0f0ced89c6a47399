"""The cost of generation outside the model: each stage, for a step of many sequences.

The first part needs neither sockets nor a model: engine and API process run in one thread and exchange the
messages that would cross the wire, and the load client reads what the API wrote. Figures are CPU time, means
over the steps.

The second part runs end to end over HTTP: an engine whose steps take `--step-ms` and compute nothing, API
processes, and `penstock bench serve` as the client, with the CPU time of all three.

python benchmarks/generation_path.py FOLDER [--step-ms 10] [--save FILE.json] [--against FILE.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp(prefix="penstock-bench-"))

import msgspec
import numpy as np
import zmq
from http_load import free_port, is_ready
from request_path import Figures, table

from penstock.api.app import build_app
from penstock.api.state import ServedModel, ServerState
from penstock.bench.load.sse import TokenStream
from penstock.checkpoint.describe import describe
from penstock.checkpoint.spec import with_max_model_len
from penstock.config import EngineConfig, ModelConfig, ServerConfig
from penstock.engine.build import build_core
from penstock.engine.loop import EngineCore
from penstock.inputs.tokenizer import Tokenizer
from penstock.runner.load import settle
from penstock.serving.engine_metrics import EngineMetrics
from penstock.serving.launch import ApiLaunch, EngineLaunch, ModelLaunch
from penstock.tasks.model import TextModel
from penstock.types import GeneratePlan, SampledResult, StepPlan, StepResult
from penstock.wire.client import EngineClient
from penstock.wire.messages import Ready, Submit, decode_to_engine
from penstock.wire.server import EngineServer

PROMPT = 2  # tokens per prompt


class WordRunner:
    """A runner that samples the words of a vocabulary in turn, immediately or after `step_s`."""

    def __init__(self, words: np.ndarray, step_s: float = 0.0) -> None:
        self.words = words
        self.step_s = step_s
        self._at = 0
        self._due_s = 0.0
        self._waiting: deque[tuple[float, Future[StepResult], StepResult]] = deque()
        self._bell = threading.Semaphore(0)
        if step_s:
            threading.Thread(target=self._complete, daemon=True).start()

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        assert isinstance(plan, GeneratePlan)
        count = len(plan.sample.sampled_rows)
        self._at += 7
        ids = self.words[(np.arange(count) * 31 + self._at) % len(self.words)]
        future: Future[StepResult] = Future()
        result = SampledResult(ids, device_s=self.step_s)
        if not self.step_s:
            future.set_result(result)
            return future
        self._due_s = max(self._due_s, time.monotonic()) + self.step_s
        self._waiting.append((self._due_s, future, result))
        self._bell.release()
        return future

    def _complete(self) -> None:
        while True:
            self._bell.acquire()
            due_s, future, result = self._waiting.popleft()
            time.sleep(max(0.0, due_s - time.monotonic()))
            future.set_result(result)

    def close(self) -> None:
        return None


def words_of(folder: str) -> np.ndarray:
    """The ids of tokens that are complete text by themselves, as most tokens are."""
    tokenizer = Tokenizer(Path(folder))
    drawn = np.random.default_rng(0).integers(256, min(tokenizer.vocab_size, 30_000), 4096)
    fine = [
        int(i)
        for i in drawn
        if "\ufffd" not in tokenizer.decode([int(i)], True) and tokenizer.decode([int(i)])
    ]
    return np.array(fine, dtype=np.int32)


class Wire:
    """Replaces both ends of a socket: keeps sent messages until they are read."""

    def __init__(self) -> None:
        self.sent: deque[list[Any]] = deque()
        self.inbox: deque[list[Any]] = deque()

    def send_multipart(self, frames: list[Any], *_: Any, **__: Any) -> None:
        self.sent.append([bytes(memoryview(frame).cast("B")) if len(frame) else b"" for frame in frames])

    def getsockopt(self, option: int) -> int:
        return zmq.POLLIN if self.inbox else 0

    def recv_multipart(self, *_: Any, **__: Any) -> list[Any]:
        return [zmq.Frame(data) for data in self.inbox.popleft()]


class Spent:
    """CPU time of this thread by stage."""

    def __init__(self) -> None:
        self.turns: dict[str, list[float]] = {}

    def timed(self, name: str, work: Callable[..., Any], *given: Any) -> Any:
        began = time.thread_time()
        out = work(*given)
        self.turns.setdefault(name, []).append(time.thread_time() - began)
        return out

    def wrapped(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: self.timed(name, work, *given)


def engine_config(folder: str, rows: int, tokens: int) -> EngineConfig:
    return EngineConfig(
        model=folder,
        device="null",
        load_format="dummy",
        max_model_len=rows
        * (PROMPT + tokens + 32)
        // 4,  # the null device has memory for four sequences of maximum length
        max_num_seqs=max(256, rows),
    )


def make_engine(
    config: EngineConfig, step_s: float, server: EngineServer, metrics: EngineMetrics
) -> EngineCore:
    spec = describe(config)
    settings = settle(config, spec)
    core = build_core(with_max_model_len(spec, settings.max_model_len), settings, server.wake, metrics.step)
    core.runner = WordRunner(words_of(config.model), step_s)  # type: ignore[assignment]
    return core


def make_app(config: EngineConfig, client: EngineClient) -> Any:
    spec = describe(config)
    text = TextModel(with_max_model_len(spec, config.max_model_len or spec.max_model_len))
    model = ServedModel(text, client, created_s=0)
    return build_app(ServerState(ServerConfig(max_rows=4096), {spec.name: model}))


async def post(app: Any, path: str, body: bytes, chunks: list[bytes]) -> None:
    """Send one request, as uvicorn passes it to the application."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    read, gone = False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal read
        if not read:
            read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise SystemExit(f"{path} answered {message['status']}")
        if message.get("body"):
            chunks.append(message["body"])

    await app(scope, receive, send)


async def stages(folder: str, rows: int, tokens: int) -> dict[str, float]:
    """Microseconds per step of `rows` sequences, by stage."""
    config = engine_config(folder, rows, tokens)
    spent, metrics = Spent(), EngineMetrics("bench")
    server = EngineServer("inproc://unused")
    core = make_engine(config, 0.0, server, metrics)
    generation: Any = core.generation
    generation.schedule = spent.wrapped("generation.schedule", generation.schedule)
    generation.collect = spent.wrapped("generation.collect", generation.collect)
    down, up = Wire(), Wire()
    server._socket, server._core = down, core  # type: ignore[assignment]
    client = EngineClient("inproc://unused")
    client._socket, client._loop = up, asyncio.get_running_loop()  # type: ignore[assignment]
    client._engine = Ready(1, {}, engine=server._number)
    app = make_app(config, client)
    body = {"prompt": [785, 3974], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    raw = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    streams: list[list[bytes]] = [[] for _ in range(rows)]
    tasks = [asyncio.create_task(post(app, "/v1/completions", raw, chunks)) for chunks in streams]
    taken = 0
    while taken < rows:  # the first step starts all sequences
        await asyncio.sleep(0.001)
        while up.sent:
            header, frame = up.sent.popleft()
            message = decode_to_engine(header)
            assert isinstance(message, Submit)
            assert not server._submit(b"api", message, header, [frame])
            taken += len(message.requests)

    steps = 0
    while not all(task.done() for task in tasks):
        outcomes = spent.timed("core.step, all of it", core.step)
        if outcomes:
            spent.timed("answer (route, pack)", server._send_outcomes, outcomes)
        spent.timed("metrics", metrics.publish, core)
        while down.sent:
            _, *frames = down.sent.popleft()
            up.inbox.append(frames)
        if outcomes and core.busy:
            began = time.thread_time()
            client._on_readable()
            middle = time.thread_time()
            for _ in range(8):
                await asyncio.sleep(0)
            spent.turns.setdefault("API: read and unpack", []).append(middle - began)
            spent.turns.setdefault("API: write events", []).append(time.thread_time() - middle)
            steps += 1
        else:
            client._on_readable()
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    events = 0
    began = time.thread_time()
    for chunks in streams:
        reader = TokenStream()
        for chunk in chunks:
            reader.feed(chunk, time.monotonic())
        assert reader.tokens == tokens, f"{reader.tokens} tokens, not {tokens}"
        events += len(reader.gaps) + 1
    read_s = time.thread_time() - began
    out = {name: statistics.fmean(each) * 1e6 for name, each in spent.turns.items()}
    out["load client: read events"] = read_s / (rows * tokens) * rows * 1e6
    assert events > 0.95 * rows * tokens, f"{events} events for {rows * tokens} tokens"
    return out


def engine_process() -> None:
    """The engine process of the end-to-end part. Reads its launch order and step time from standard input."""
    order = json.loads(sys.stdin.buffer.read())
    launch = msgspec.convert(order["launch"], EngineLaunch)
    server, metrics = EngineServer(launch.address), EngineMetrics("bench")
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    core = make_engine(launch.engine, order["step_s"], server, metrics)
    server.serve(core, Ready(os.getpid(), {}), metrics.publish)


@contextmanager
def served(
    folder: str, rows: int, tokens: int, step_s: float, apis: int
) -> Iterator[tuple[int, dict[str, int]]]:
    """Start engine and API processes on a free port; yield the port and their process ids."""
    config = engine_config(folder, rows, tokens)
    spec, port = describe(config), free_port()
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    with tempfile.TemporaryDirectory() as work:
        address = f"ipc://{work}/engine"
        launch = msgspec.to_builtins(EngineLaunch(config, spec, address))
        orders = [
            (
                [sys.executable, str(Path(__file__).resolve()), "--engine"],
                json.dumps({"launch": launch, "step_s": step_s}).encode(),
            )
        ]
        for _ in range(apis):
            server = ServerConfig(api_server_count=apis, log_level="warning")
            model = ModelLaunch(0, ModelConfig(engine=config), spec, address, f"{work}/state")
            own = ApiLaunch(server, (model,), listener.fileno())
            orders.append(([sys.executable, "-m", "penstock.api.process"], msgspec.json.encode(own)))
        started = []
        try:
            for command, order in orders:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(listener.fileno(),))
                assert process.stdin is not None
                process.stdin.write(order)
                process.stdin.close()
                started.append(process)
            until = time.monotonic() + 60
            while not is_ready(port):
                if time.monotonic() > until or any(process.poll() is not None for process in started):
                    raise SystemExit("the server did not start")
                time.sleep(0.05)
            time.sleep(0.5)  # wait for the other API processes
            names = ["engine", *(f"api {index}" for index in range(apis))]
            yield port, dict(zip(names, (process.pid for process in started), strict=True))
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(20)
            listener.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def end_to_end(
    folder: str, rows: int, tokens: int, step_s: float, apis: int, clients: int
) -> dict[str, float]:
    with served(folder, rows, tokens, step_s, apis) as (port, pids), tempfile.TemporaryDirectory() as work:
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        command = [
            sys.executable,
            "-m",
            "penstock",
            "bench",
            "serve",
            "--backend",
            "openai",
            "--model",
            folder,
        ]
        command += ["--base-url", f"http://127.0.0.1:{port}", "--dataset-name", "random"]
        command += ["--served-model-name", Path(folder).name, "--send-token-ids"]
        command += ["--random-input-len", str(PROMPT), "--random-output-len", str(tokens)]
        command += ["--num-prompts", str(rows), "--request-rate", "inf", "--num-processes", str(clients)]
        command += ["--save-result", "--result-dir", work, "--result-filename", "result.json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found: dict[str, Any] = json.loads((Path(work) / "result.json").read_text())
        after = {name: cpu_s(pid) for name, pid in pids.items()}
    made = found["total_output_tokens"] + tokens  # includes the trial request
    assert found["total_output_tokens"] == rows * tokens, found["total_output_tokens"]
    each = {name: (after[name] - before[name]) / made * 1e6 for name in pids}
    return {
        "tokens a ms": found["output_throughput"] / 1000,
        "µs a token, by the clock": 1e6 / found["output_throughput"],
        "TPOT ms": found["mean_tpot_ms"],
        "TTFT ms": found["mean_ttft_ms"],
        "engine µs a token": each.pop("engine"),
        "API µs a token": sum(each.values()),
        "client µs a token": found["client"]["cpu_s"] / made * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", help="a generating model: configuration and tokenizer")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of a step in the end-to-end part")
    parser.add_argument("--apis", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--clients", type=int, default=2, help="load processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--against", type=Path, help="show the figures of this file too")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine_process()
        return
    if options.folder is None:
        parser.error("a model's folder is needed")
    import uvloop

    rounds = [uvloop.run(stages(options.folder, options.rows, options.tokens)) for _ in range(options.rounds)]
    steps: Figures = {
        name: {
            "µs a step": (value := statistics.median(each[name] for each in rounds)),
            "a row": value / options.rows,
        }
        for name in rounds[0]
    }
    ends: Figures = {}
    for apis in options.apis:
        given = (options.folder, options.rows, options.tokens, options.step_ms / 1000, apis, options.clients)
        for name, value in end_to_end(*given).items():
            ends.setdefault(name, {})[f"{apis} API"] = value
    figures = {
        f"Steps of {options.rows} rows": steps,
        f"Through HTTP, steps of {options.step_ms:g} ms": ends,
    }
    before = json.loads(options.against.read_text()) if options.against else {}
    for title, part in figures.items():
        if part:
            old = {name: row for name, row in before.get(title, {}).items() if name != "tokens a ms"}
            print("\n".join(table(title, part, old)))
    if options.save:
        options.save.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The cost of the request path outside the model: each stage, for a request of one row, in microseconds.

There is no socket and no model: the engine runs in this process on the null runner, and the API is called as
an ASGI application whose engine answers immediately. Figures are CPU time, medians over many requests.

Two parts use sockets. One measures a load process of `penstock bench` against a server that computes nothing.
The other runs a real server on the null device and measures the CPU time of its processes. Their figures are
minima over several rounds.

python benchmarks/request_path.py [--only TITLE] [--save FILE.json] [--against FILE.json]

To measure another checkout, run this script there, with PYTHONPATH set to that checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp(prefix="penstock-bench-"))

import numpy as np
import zmq

from penstock.api.app import build_app
from penstock.api.process import http_config
from penstock.api.state import ServedModel, ServerState
from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig, ServerConfig
from penstock.engine.loop import EngineCore
from penstock.runner.null import NullRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import Budget, Scheduler
from penstock.serving.engine_metrics import EngineMetrics
from penstock.tasks.model import TextModel
from penstock.types import PooledOutput, PoolingParams, Request, Task, Timings
from penstock.wire.messages import (
    Hello,
    Ready,
    decode_from_engine,
    decode_to_engine,
    encode,
    pack_outcomes,
    pack_requests,
    unpack_outcomes,
    unpack_requests,
)
from penstock.wire.server import EngineServer

SIZES = (1, 16, 64, 256)
TOKENS = 32
WIDTH = 768
BUDGET = Budget(16384, 1024, 1 << 24)
Figures = dict[str, dict[str, float]]


def requests_of(count: int, rng: np.random.Generator, turn: int) -> list[Request]:
    ids = rng.integers(0, 30000, (count, TOKENS), dtype=np.int32)
    lengths = np.array([TOKENS], dtype=np.int32)
    return [
        Request(f"0-{turn}-{i}", row, lengths, PoolingParams(), arrival_s=time.monotonic())
        for i, row in enumerate(ids)
    ]


def engine_stages(count: int, turns: int) -> dict[str, float]:
    """Microseconds per request of each stage, and of a whole iteration of the engine's loop."""
    rng = np.random.default_rng(0)
    metrics = EngineMetrics("bench")
    core = EngineCore(NullRunner({Task.EMBED: WIDTH}), Scheduler(BUDGET), observe=metrics.step)
    apart = Scheduler(BUDGET)
    spent: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        out = work()
        spent.setdefault(name, []).append(time.thread_time() - began)
        return out

    def add_all(requests: list[Request]) -> None:
        for request in requests:
            core.add(request)

    def whole(frames: list[Any]) -> None:
        message: Any = decode_to_engine(frames[0])
        add_all(unpack_requests(message.requests, frames[1]))
        core.step()
        outcomes = core.step()
        pack_outcomes(outcomes)
        metrics.publish(core)
        assert len(outcomes) == count

    for turn in range(turns):
        header, bulk = pack_requests(requests_of(count, rng, turn))
        frame = bytes(bulk)
        message: Any = timed("receive: decode the header", lambda header=header: decode_to_engine(header))
        requests = timed("receive: unpack", lambda m=message, f=frame: unpack_requests(m.requests, f))
        timed("take on", lambda r=requests: add_all(r))
        for request in requests:
            apart.add(request)
        shares = timed("schedule", apart.schedule)
        timed("plan", lambda s=shares: build_plan(s))
        timed("launch turn (schedule, plan, null step)", core.step)
        outcomes = timed("collect turn (hand out)", core.step)
        timed("answer: pack", lambda o=outcomes: pack_outcomes(o))
        timed("metrics of a turn", lambda: metrics.publish(core))
        header, bulk = pack_requests(requests_of(count, rng, turn))
        timed("whole turn", lambda f=[header, bytes(bulk)]: whole(f))
    return {name: statistics.median(each) / count * 1e6 for name, each in spent.items()}


def engine_parts(turns: int) -> Figures:
    out: Figures = {}
    for size in SIZES:
        for name, value in engine_stages(size, turns).items():
            out.setdefault(name, {})[str(size)] = value
    return out


class EngineLoad:
    """Simulates the API processes of an engine server on the thread of its loop. They submit all requests of
    a step together, each in its own message, and receive the answers.

    The loop calls `publish` at the end of each iteration, so the work of this class is not measured. The
    requests of a step do not depend on time.
    """

    SENDERS = 8

    def __init__(self, num_requests: int, num_steps: int) -> None:
        self._num_requests, self._num_steps = num_requests, num_steps
        self._metrics = EngineMetrics("bench")
        self.server = EngineServer("inproc://engine")
        self._sockets = [self.server._context.socket(zmq.DEALER) for _ in range(self.SENDERS)]
        for name, socket in enumerate(self._sockets):
            socket.connect("inproc://engine")
            socket.send_multipart([encode(Hello(str(name), os.getpid()))])
        self._rng = np.random.default_rng(0)
        self._num_waiting, self._num_sent = (
            self.SENDERS,
            0,
        )  # first, each process gets a message that the engine is ready
        self._since_s = 0.0
        self._spent_s = 0.0
        self.step_us: list[float] = []  # CPU time of the engine's thread per request, for each step

    def run(self) -> None:
        scheduler = Scheduler(Budget(32768, 1024, 1 << 24, max_output_bytes=16 << 20, is_shared=True))
        core = EngineCore(
            NullRunner({Task.EMBED: WIDTH}),
            scheduler,
            depth=2,
            wake=self.server.wake,
            observe=self._metrics.step,
        )
        core.max_queue_s = 5.0
        self._since_s = time.thread_time()
        self.server.serve(core, Ready(os.getpid(), {}), self._turned)

    def _turned(self, core: EngineCore) -> bool:
        self._metrics.publish(core)
        self._spent_s += time.thread_time() - self._since_s
        for socket in self._sockets:
            while socket.get(zmq.EVENTS) & zmq.POLLIN:
                message: Any = decode_from_engine(socket.recv_multipart()[0])
                self._num_waiting -= 1 if isinstance(message, Ready) else num_answers(message)
        if not self._num_waiting:
            self.step_us.append(self._spent_s / self._num_requests * 1e6)
            self._spent_s = 0.0
            if len(self.step_us) > self._num_steps:
                self.server.stop()
            else:
                self._submit()
        self._since_s = time.thread_time()
        return True

    def _submit(self) -> None:
        lengths = self._rng.lognormal(np.log(70), 0.9, self._num_requests).clip(4, 512).astype(np.int32)
        requests = []
        for length in lengths[:, None]:
            ids = self._rng.integers(0, 30000, length[0], dtype=np.int32)
            request = Request(
                f"{self._num_sent}", ids, length, arrival_s=time.monotonic(), client="127.0.0.1"
            )
            requests.append(request)
            self._num_sent += 1
        for sender, socket in enumerate(self._sockets):
            if theirs := requests[sender :: self.SENDERS]:
                socket.send_multipart(pack_requests(theirs))
        self._num_waiting = self._num_requests


def num_answers(message: Any) -> int:
    """The number of answered requests. An item of a message answers one request, or one per id in it."""
    return sum(len(getattr(item, "ids", (None,))) for item in message.items)


def engine_process(num_steps: int) -> Figures:
    """The engine's thread without a model: socket, loop, scheduler, plan, answers, metrics."""
    out: Figures = {}
    for size in (16, 64, 256):
        load = EngineLoad(size, num_steps)
        gc.collect()
        gc.freeze()  # like an engine process before it serves
        load.run()
        measured = sorted(load.step_us[num_steps // 4 :])
        out.setdefault("CPU µs, 10th percentile", {})[str(size)] = measured[len(measured) // 10]
        out.setdefault("CPU µs, median", {})[str(size)] = statistics.median(measured)
        counted = EngineLoad(size, 20)
        with cProfile.Profile(builtins=False) as profile:
            counted.run()
        out.setdefault("calls of Python functions", {})[str(size)] = own_calls(profile) / 20 / size
    return out


def own_calls(profile: cProfile.Profile) -> int:
    """Number of calls of Penstock's own functions."""
    files = ((str(getattr(entry.code, "co_filename", "")), entry.callcount) for entry in profile.getstats())
    return sum(count for file, count in files if "/penstock/" in file)


class NullClient:
    """An engine client that answers immediately. Messages are encoded and decoded as on the wire."""

    ready = True

    def __init__(self, rows: int, width: int) -> None:
        self.values = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)

    def start(self) -> None: ...

    def close(self) -> None: ...

    async def run(self, request: Request) -> PooledOutput:
        per_token = request.params.per_token
        values = self.values[: request.num_tokens if per_token else request.num_rows]
        future: asyncio.Future[PooledOutput] = asyncio.get_running_loop().create_future()
        answer = PooledOutput(request.id, values, Timings(0.001, 0.001))
        asyncio.get_running_loop().call_soon(future.set_result, answer)
        return await future


def make_app(client: NullClient) -> Any:
    spec = describe(EngineConfig(device="null"))
    model = ServedModel(TextModel(spec), client, created_s=0)  # type: ignore[arg-type]
    return build_app(ServerState(ServerConfig(), {spec.name: model}))


async def post(app: Any, path: str, body: bytes) -> int:
    """Send one request as uvicorn does; return the number of bytes in the response."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }
    state = {"read": False, "bytes": 0, "status": 0}
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not state["read"]:
            state["read"] = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            state["status"] = message["status"]
        else:
            state["bytes"] += len(message["body"])

    await app(scope, receive, send)
    if state["status"] != 200:
        raise SystemExit(f"{path} answered {state['status']}")
    return state["bytes"]


async def api_load(app: Any, bodies: list[bytes], concurrent: int) -> float:
    """CPU microseconds per request, of all threads of this process."""
    waiting = iter(bodies)

    async def client() -> None:
        for body in waiting:
            await post(app, "/v1/embeddings", body)

    began = time.process_time()
    await asyncio.gather(*(client() for _ in range(concurrent)))
    return (time.process_time() - began) / len(bodies) * 1e6


def api_stages(rounds: int) -> Figures:
    """CPU time of an API process per request of one row, without HTTP parser and socket."""
    import uvloop

    rng = np.random.default_rng(0)
    words = ["water", "stone", "gate", "mill", "turbine", "river", "lake", "field", "wheel", "north"]
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "text, float": lambda: {"input": " ".join(rng.choice(words, 28))},
        "text, base64": lambda: {"input": " ".join(rng.choice(words, 28)), "encoding_format": "base64"},
        "token ids, base64": lambda: {
            "input": rng.integers(1000, 20000, TOKENS).tolist(),
            "encoding_format": "base64",
        },
    }
    out: Figures = {}
    for name, make in kinds.items():
        for concurrent in SIZES:
            bodies = [json.dumps(make()).encode() for _ in range(max(256, 2 * concurrent))]

            async def measure(bodies: list[bytes] = bodies, concurrent: int = concurrent) -> float:
                app = make_app(NullClient(64, 384))
                await api_load(app, bodies, concurrent)
                return statistics.median([await api_load(app, bodies, concurrent) for _ in range(rounds)])

            out.setdefault(name, {})[str(concurrent)] = uvloop.run(measure())
    return out


class NullTransport:
    """Replaces the socket of a connection: receives an answer and signals when it is complete."""

    def __init__(self) -> None:
        self.complete: asyncio.Future[None] | None = None
        self._received = b""

    def get_extra_info(self, name: str) -> Any:
        return {"peername": ("127.0.0.1", 40000 + id(self) % 10000), "sockname": ("127.0.0.1", 1)}.get(name)

    def write(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if found and length and len(body) >= int(length):
            if not head.startswith(b"HTTP/1.1 200 "):
                raise SystemExit(head.decode())
            self._received = b""
            if self.complete is not None:
                self.complete.set_result(None)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...


async def http_load(make: Callable[[], Any], requests: list[bytes], concurrent: int) -> float:
    """CPU microseconds per request, from its bytes to the bytes of the answer."""
    waiting, loop = iter(requests), asyncio.get_running_loop()

    async def client() -> None:
        connection, transport = make(), NullTransport()
        connection.connection_made(transport)
        for request in waiting:
            transport.complete = loop.create_future()
            connection.data_received(request)
            await transport.complete
        connection.connection_lost(None)

    began = time.process_time()
    await asyncio.gather(*(client() for _ in range(concurrent)))
    return (time.process_time() - began) / len(requests) * 1e6


def http_maker(client: NullClient) -> Callable[[], Any]:
    """A factory of connections to an API process that serves the default model."""
    from uvicorn.server import ServerState as UvicornState

    spec = describe(EngineConfig(device="null"))
    text = TextModel(spec)
    text.tokenizer.encode([""])  # like an API process before it serves
    model = ServedModel(text, client, created_s=0)  # type: ignore[arg-type]
    config = http_config(ServerState(ServerConfig(), {spec.name: model}))
    config.load()
    state = UvicornState()
    return lambda: config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]


def natural_requests(count: int) -> dict[str, list[bytes]]:
    """Requests of one input in the bytes of a client: natural texts of 110 tokens, and token ids."""
    from texts import mixed_texts

    rng = np.random.default_rng(0)
    texts = [{"input": text, "truncate_prompt_tokens": -1} for text in mixed_texts(count)]
    ids = [rng.integers(1000, 20000, TOKENS).tolist() for _ in range(count)]
    kinds: dict[str, list[dict[str, Any]]] = {
        "natural text, float": texts,
        "natural text, base64": [{**each, "encoding_format": "base64"} for each in texts],
        "token ids, base64": [{"input": each, "encoding_format": "base64"} for each in ids],
    }
    return {
        name: [http_request(json.dumps(body).encode()) for body in bodies] for name, bodies in kinds.items()
    }


def http_request(body: bytes) -> bytes:
    lines = (
        "POST /v1/embeddings HTTP/1.1",
        "Host: 127.0.0.1:8000",
        "User-Agent: bench",
        "Accept: */*",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


def http_stages(rounds: int) -> Figures:
    """Cost of a request of one input in an API process, with its HTTP parser but without a socket: CPU time,
    calls of Penstock's functions, and objects that are left to the garbage collector."""
    import uvloop

    out: Figures = {}
    for name, requests in natural_requests(1280).items():
        for concurrent in (1, 64):

            async def measure(
                requests: list[bytes] = requests, concurrent: int = concurrent
            ) -> dict[str, float]:
                make = http_maker(NullClient(64, WIDTH))
                await http_load(make, requests, concurrent)
                gc.collect()
                gc.freeze()  # like an API process before it serves
                spent = [await http_load(make, requests, concurrent) for _ in range(rounds)]
                gc.collect()
                gc.disable()
                with cProfile.Profile(builtins=False) as profile:
                    await http_load(make, requests, concurrent)
                num_left = gc.collect()
                gc.enable()
                return {
                    "": statistics.median(spent),
                    ": calls": own_calls(profile) / len(requests),
                    ": objects left to the garbage collector": num_left / len(requests),
                }

            for kind, value in uvloop.run(measure()).items():
                out.setdefault(name + kind, {})[str(concurrent)] = value
    return out


def first_requests() -> Figures:
    """CPU time per request in an API process that has just started, by the number of requests before it.
    Texts and order are the same, so later requests are cheaper only by what the process has cached or
    loaded."""
    import uvloop

    ends = (20, 100, 500, 1000, 2000, 4000, 8000)
    requests = natural_requests(ends[-1])["natural text, float"]

    async def measure() -> dict[str, float]:
        make, begin, spent = http_maker(NullClient(64, WIDTH)), 0, {}
        gc.collect()
        gc.freeze()  # like an API process before it serves
        for end in ends:
            spent[f"to {end}"] = await http_load(make, requests[begin:end], 8)
            begin = end
        return spent

    return {"natural text, float": uvloop.run(measure())}


def client_stages(turns: int) -> Figures:
    """The API's side of the wire: packs requests and unpacks results."""
    rng = np.random.default_rng(0)
    out: Figures = {}
    for count in SIZES:
        pack, unpack = [], []
        answers = [PooledOutput(f"0-{i}", np.ones((1, WIDTH), np.float32), Timings()) for i in range(count)]
        header, *frames = pack_outcomes(answers)
        for turn in range(turns):
            requests = requests_of(count, rng, turn)
            began = time.thread_time()
            pack_requests(requests)
            pack.append(time.thread_time() - began)
            began = time.thread_time()
            message: Any = decode_from_engine(header)
            unpack_outcomes(message.items, frames)
            unpack.append(time.thread_time() - began)
        out.setdefault("pack requests", {})[str(count)] = statistics.median(pack) / count * 1e6
        out.setdefault("unpack answers", {})[str(count)] = statistics.median(unpack) / count * 1e6
    return out


def big_answer(rounds: int) -> Figures:
    """Token vectors of 16 texts, about 22 MB of base64.

    Measures the milliseconds from the result to the last part, and the longest time that the event loop was
    blocked.
    """
    import uvloop

    text = "retrieval benchmark sentence " * 80
    body = json.dumps(
        {
            "input": [text] * 16,
            "task": "token_embed",
            "encoding_format": "base64",
            "truncate_prompt_tokens": -1,
        }
    ).encode()

    async def measure() -> tuple[float, float, float]:
        app = make_app(NullClient(16 * 512, 1024))
        await post(app, "/pooling", body)
        stall = 0.0

        async def watch() -> None:
            nonlocal stall
            while True:
                began = time.perf_counter()
                await asyncio.sleep(0)
                stall = max(stall, time.perf_counter() - began)

        walls, size = [], 0
        for _ in range(rounds):
            began = time.perf_counter()
            size = await post(app, "/pooling", body)
            walls.append(time.perf_counter() - began)
        watcher = asyncio.create_task(watch())
        stalls = []
        for _ in range(rounds):
            stall = 0.0
            await post(app, "/pooling", body)
            stalls.append(stall)
        watcher.cancel()
        return statistics.median(walls) * 1e3, min(stalls) * 1e3, size / 1e6

    wall_ms, stall_ms, size_mb = uvloop.run(measure())
    return {
        "one answer": {"MB": size_mb, "ms": wall_ms, "GB/s": size_mb / wall_ms},
        "event loop held": {"ms": stall_ms},
    }


def served(count: int, rounds: int) -> Figures:
    """CPU time per request of a real server on the null device, and of the `penstock bench` process that
    loads it. Includes sockets and all threads; the minimum of several rounds."""
    from http_load import start

    from penstock.bench.load.fleet import run_load
    from penstock.bench.load.plan import Address, Traffic

    kinds = natural_requests(count)
    out: Figures = {}
    with start(["--device", "null", "--api-server-count", "1"]) as server:
        address = Address("127.0.0.1", server.port)
        for kind, requests in kinds.items():
            run_load(requests, address, "body", Traffic(max_concurrency=64), 1)
            for clients in (1, 64, 256):
                costs: dict[str, list[float]] = {}
                for _ in range(rounds):
                    before = cpu_of_children(server.pid)
                    outcome = run_load(requests, address, "body", Traffic(max_concurrency=clients), 1)
                    after = cpu_of_children(server.pid)
                    if int(outcome.samples.ok.sum()) != count:
                        raise SystemExit(f"not all requests succeeded: {outcome.samples.errors()}")
                    costs.setdefault("load process", []).append(outcome.costs[0].cpu_s)
                    for name in ("engine", "api"):
                        costs.setdefault(f"{name} process", []).append(after[name] - before[name])
                for name, seconds in costs.items():
                    row = out.setdefault(f"{name}, {kind}", {})
                    row[str(clients)] = min(seconds) / count * 1e6
    return out


def load_client(rounds: int) -> Figures:
    """CPU time per request of a `penstock bench serve` process against a server that computes nothing. The
    requests are natural texts, the answers have 768 numbers. Includes system calls; the minimum of several
    rounds."""
    from penstock.bench.load.fleet import run_load
    from penstock.bench.load.plan import Address, Traffic
    from penstock.bench.nullserver import null_server

    vector = np.random.default_rng(0).standard_normal(WIDTH, dtype=np.float32)
    usage = {"prompt_tokens": 100, "total_tokens": 100}
    answers = {
        "floats": {"data": [{"index": 0, "embedding": (vector / 30).tolist()}], "usage": usage},
        "base64": {"data": [{"index": 0, "embedding": "a" * (WIDTH * 4 * 4 // 3)}], "usage": usage},
    }
    requests = natural_requests(2000)["natural text, float"]
    out: Figures = {}
    for name, answer in answers.items():
        with null_server([json.dumps(answer).encode()]) as port:
            for connections in (1, 64, 256):
                traffic = Traffic(max_concurrency=connections, duration_s=2.0)
                costs = []
                for _ in range(rounds):
                    (cost,) = run_load(requests, Address("127.0.0.1", port), "body", traffic, 1).costs
                    costs.append(cost.cpu_s / cost.completed * 1e6)
                out.setdefault(name, {})[str(connections)] = min(costs)
    return out


def cpu_of_children(pid: int) -> dict[str, float]:
    """Seconds of CPU that the engine and API processes of a server have used."""
    spent: dict[str, float] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid:
            name = "engine" if b"engine_process" in command or b"penstock.engine" in command else "api"
            threads = [each.read_text().split() for each in folder.glob("task/*/schedstat")]
            spent[name] = spent.get(name, 0.0) + sum(int(each[0]) for each in threads) / 1e9
    return spent


def table(title: str, figures: Figures, before: Figures) -> list[str]:
    columns = list(dict.fromkeys(name for row in figures.values() for name in row))
    lines = [f"### {title}", "", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in figures.items():
        cells = []
        for column in columns:
            cell = f"{row[column]:.1f}" if column in row else ""
            if (old := before.get(name, {}).get(column)) is not None and column != "MB" and row[column]:
                better = row[column] / old if column == "GB/s" else old / row[column]
                cell = f"{old:.1f} → {cell} ({better:.1f}×)"
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=3000, help="number of requests to the real server")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--against", type=Path, help="show the figures of this file too")
    parser.add_argument("--only", default="", help="measure only parts whose title contains this")
    options = parser.parse_args()
    parts: dict[str, Callable[[], Figures]] = {
        "The first requests of an API process with HTTP, CPU µs a request": first_requests,
        "Engine process, µs a request, by requests in a turn": lambda: engine_parts(options.turns),
        "Engine process with its socket, for a request, by requests in a step": lambda: engine_process(
            options.turns
        ),
        "Wire in the API process, µs a request, by requests in a message": lambda: client_stages(
            options.turns
        ),
        "API process, CPU µs a request, by concurrent requests": lambda: api_stages(options.rounds),
        "API process with HTTP, CPU µs a request, by connections": lambda: http_stages(options.rounds),
        "A load process of penstock bench, CPU µs a request, by connections": lambda: load_client(
            options.rounds
        ),
        "A large answer": lambda: big_answer(options.rounds),
        "A server on the null device, CPU µs a request, by connections": lambda: served(
            options.requests, options.rounds
        ),
    }
    figures = {title: measure() for title, measure in parts.items() if options.only in title}
    before = json.loads(options.against.read_text()) if options.against else {}
    for title, part in figures.items():
        print("\n".join(table(title, part, before.get(title, {}))))
    if options.save:
        options.save.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Faults injected during the load: killed and stopped processes, hostile clients, poisoned rows."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.load import REFUSALS, Load, Tally
from tests.chaos.model import POISON
from tests.e2e.server import API, ENGINE, Server

HANG_TIMEOUT_S = 2.0  # the server's --engine-hang-timeout
MAX_RECOVERY_S = 5.0  # until the next right answer, after a kill or after the hang time-out
Fault = Callable[[], Awaitable[None]]


@dataclass
class Recovery:
    """The time without a right answer after a fault."""

    fault: str
    seconds: float
    allowed_s: float


@dataclass
class Faults:
    """Injects one random fault after another. The server must be able to serve again after each."""

    server: Server
    load: Load
    tally: Tally
    seed: int
    recoveries: list[Recovery] = field(default_factory=list)
    injected: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._weights: dict[Fault, int] = {
            self.kill_engine: 2,
            self.hang_engine: 1,
            self.stop_engine_briefly: 1,
            self.kill_api: 3,
            self.stop_api: 1,
            self.kill_everything: 1,
            self.bombs: 4,
            self.grammars: 2,
            self.poison: 3,
            self.disconnects: 3,
            self.slow_readers: 1,
            self.slow_senders: 1,
        }

    async def run(self, until_s: float) -> None:
        first = list(self._weights)  # each kind once, then by weight
        self._draw.shuffle(first)
        while time.monotonic() < until_s:
            fault = first.pop() if first else self._draw.choices(*zip(*self._weights.items(), strict=True))[0]
            self.injected[fault.__name__] = self.injected.get(fault.__name__, 0) + 1
            with contextlib.suppress(httpx.TransportError, OSError):  # an API process is being restarted
                await fault()
            await asyncio.sleep(self._draw.uniform(0.5, 3.0))

    # Processes.

    async def kill_engine(self) -> None:
        self._signal(ENGINE, signal.SIGKILL)
        await self._recovers("kill -9 of the engine", MAX_RECOVERY_S)

    async def hang_engine(self) -> None:
        """Stop the engine and do not continue it: the supervisor has to replace it."""
        self._signal(ENGINE, signal.SIGSTOP)
        await self._recovers("SIGSTOP of the engine", HANG_TIMEOUT_S + MAX_RECOVERY_S)

    async def stop_engine_briefly(self) -> None:
        stopped = self._signal(ENGINE, signal.SIGSTOP)
        await asyncio.sleep(0.5)
        _continue(stopped)
        await self._recovers("SIGSTOP of the engine for 0.5 s", MAX_RECOVERY_S)

    async def kill_api(self) -> None:
        self._signal(API, signal.SIGKILL)
        await self._recovers("kill -9 of an API process", MAX_RECOVERY_S)

    async def stop_api(self) -> None:
        stopped = self._signal(API, signal.SIGSTOP)
        await asyncio.sleep(self._draw.uniform(0.5, 2.0))
        _continue(stopped)
        await self._recovers("SIGSTOP of an API process", MAX_RECOVERY_S)

    async def kill_everything(self) -> None:
        for pid in (*self.server.engines(), *self.server.children(API)):
            _send_signal(pid, signal.SIGKILL)
        await self._recovers("kill -9 of the engine and all API processes", MAX_RECOVERY_S)

    def _signal(self, module: str, number: signal.Signals) -> int:
        if not (pids := self.server.engines() if module == ENGINE else self.server.children(module)):
            return 0
        pid = self._draw.choice(pids)
        _send_signal(pid, number)
        return pid

    async def _recovers(self, fault: str, allowed_s: float) -> None:
        """Measure the time to the next right answer; the checking clients keep running."""
        began = time.monotonic()
        draw = random.Random(0)
        while True:
            try:
                async with httpx.AsyncClient(base_url=self.server.url, timeout=2.0) as http:
                    await self.load.embed(http, draw)
                    break
            except Exception:
                if time.monotonic() - began > 120:
                    self.tally.violated("recovery", f"no right answer 120 s after {fault}")
                    return
                await asyncio.sleep(0.02)
        seconds = time.monotonic() - began
        self.recoveries.append(Recovery(fault, seconds, allowed_s))
        if seconds > allowed_s:
            self.tally.violated("recovery", f"{seconds:.1f} s after {fault}; allowed are {allowed_s:g} s")

    # Requests.

    async def bombs(self) -> None:
        """Requests that would take much memory or time if they ran as requested. None may get a 5xx."""
        vectors = base64.b64encode(bytes(4 * 30_000)).decode()
        bodies: list[tuple[str, Any]] = [
            ("/v1/embeddings", {"input": ["x"] * 2048, "prompt": "the water " * 5000}),
            ("/v1/embeddings", {"input": "water " * 5_000_000}),
            ("/v1/embeddings", {"input": ["a b c d e f"] * 2048}),
            ("/rerank", {"query": "water " * 8000, "documents": ["river"] * 2048}),
            ("/v1/completions", {"prompt": "x", "top_k": 2**64}),
            ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 3_000_000}),
            ("/v1/completions", {"prompt": "x", "stop_token_ids": list(range(400)), "max_tokens": 4}),
            ("/v1/completions", {"prompt": ["water"] * 2048, "n": 128}),
            ("/v1/completions", {"prompt": "x", "logit_bias": {"9" * 5000: 1}}),
            ("/v1/completions", {"prompt": "x", "repetition_penalty": 1e308}),
            ("/v1/maxsim", {"queries": [vectors], "documents": [vectors], "dim": 1}),
            ("/v1/maxsim", {"queries": [vectors], "documents": [vectors], "dim": 2**62}),
            ("/detokenize", {"tokens": [5] * 4_000_000}),
            ("/v1/embeddings", {"input": "x", "request_id": "a\r\nb\u0000"}),
        ]
        raw = [(path, json.dumps(body).encode()) for path, body in bodies]
        deep = b"[" * 3000 + b"]" * 3000
        raw += [("/rerank", b'{"query": "x", "documents": ' + deep + b"}"), ("/score", deep)]
        await self._all_answered("bomb", self._draw.sample(raw, 4), allowed=range(200, 500))

    async def grammars(self) -> None:
        """Grammars that overflow a stack, take forever to compile or are invalid."""
        rules = "\n".join(f"r{i}: r{i + 1}" for i in range(2900))
        schema: dict[str, Any] = {"$defs": {}, "$ref": "#/$defs/d0"}
        for i in range(2000):
            schema["$defs"][f"d{i}"] = {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}
        schema["$defs"]["d2000"] = {"type": "null"}
        body = {"prompt": "x", "max_tokens": 4}
        bodies = [
            {"guided_grammar": f'start: r0\n{rules}\nr2900: "x"'},
            {"guided_json": schema},
            {"guided_regex": "(a{1,1000}){1,1000}"},
            {"guided_regex": "((((((((((a*)*)*)*)*)*)*)*)*)*b"},
            {"guided_grammar": "start: ) ("},
            {"guided_json": '{"a":' * 5000},
        ]
        raw = [("/v1/completions", json.dumps(body | each).encode()) for each in bodies]
        await self._all_answered("grammar", self._draw.sample(raw, 3), allowed=range(200, 500))

    async def poison(self) -> None:
        """Rows whose values become non-finite. Each fails alone, with its own typed error."""
        text = f"water {POISON} river"
        bodies: list[tuple[str, Any]] = [
            ("/v1/embeddings", {"input": text}),
            ("/v1/embeddings", {"input": ["water", text]}),
            ("/rerank", {"query": text, "documents": ["water"]}),
            ("/v1/completions", {"prompt": text, "max_tokens": 3}),
        ]
        raw = [(path, json.dumps(body).encode()) for path, body in bodies]
        await self._all_answered("poison", self._draw.sample(raw, 3), allowed=(500,), code="row_failed")

    async def _all_answered(
        self, kind: str, raw: list[tuple[str, bytes]], allowed: Any, code: str | None = None
    ) -> None:
        async def ask(path: str, body: bytes) -> None:
            async with httpx.AsyncClient(base_url=self.server.url, timeout=90) as http:
                try:
                    response = await http.post(path, content=body)
                except httpx.TimeoutException:
                    self.tally.violated(kind, f"no answer within 90 s to {path} {body[:80]!r}")
                    return
                except httpx.TransportError as error:
                    self.tally.refused(kind, f"connection lost ({type(error).__name__})")
                    return
            status = response.status_code
            if status in REFUSALS:
                self.tally.refused(kind, f"{status}")
            elif status not in allowed or (code is not None and response.json()["error"]["reason"] != code):
                self.tally.violated(kind, f"status {status} for {path} {body[:80]!r}: {response.text[:200]}")
            else:
                self.tally.refused(kind, f"answered {status}")

        await asyncio.gather(*(ask(path, body) for path, body in raw))

    # Connections.

    async def disconnects(self) -> None:
        """Clients that disconnect at a random moment, while they send the request or while they read."""
        body = json.dumps({"prompt": "water", "max_tokens": 60, "stream": True}).encode()
        request = _raw_request("/v1/completions", body)
        for _ in range(20):
            with _connected(self.server.port) as connection:
                connection.sendall(request[: self._draw.randint(1, len(request))])
                await asyncio.sleep(self._draw.uniform(0, 0.05))
                if self._draw.random() < 0.5:  # disconnect with a TCP reset
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    async def slow_readers(self) -> None:
        """Clients that request large answers and do not read them."""
        body = json.dumps({"input": [f"text {i}" for i in range(512)]}).encode()
        await self._hold([_raw_request("/v1/embeddings", body)] * 8)

    async def slow_senders(self) -> None:
        """Clients whose headers and bodies never end."""
        header = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nX-Fill: "
        half = (
            b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000000\r\n\r\n"
            + b"[" * 9000
        )
        await self._hold([header] * 40 + [half] * 80)

    async def _hold(self, requests: list[bytes]) -> None:
        connections = []
        try:
            for request in requests:
                connections.append(connection := _connected(self.server.port))
                connection.sendall(request)
            await asyncio.sleep(3.0)
        finally:
            for connection in connections:
                connection.close()


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def _raw_request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _continue(pid: int) -> None:
    if pid:
        _send_signal(pid, signal.SIGCONT)

"""A small HTTP/1.1 server that gives the responses of every API, and the failures that tests need."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WIDTH = 8


def vector(text: object) -> list[float]:
    """A vector that depends only on the text."""
    digest = hashlib.sha256(repr(text).encode()).digest()
    return [byte / 255 for byte in digest[:WIDTH]]


def words(text: str) -> set[str]:
    return set(text.lower().split())


class Stub(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, port: int = 0, **behaviour: Any) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.behaviour = behaviour
        self.lock = threading.Lock()
        self.bodies: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.active = self.max_active = 0
        self.last_writes_s: list[float] = []  # time at which the last part of each body was written
        self.changed = threading.Condition(self.lock)  # notified when `max_active` grows or the server stops
        self.is_stopping = False

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        return None  # tests let clients disconnect


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections += 1

    def log_message(self, format: str, *args: Any) -> None:
        return None

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            names = self.server.behaviour.get("models", ["stub-model"])
            self._json(200, {"data": [{"id": name} for name in names]})
        elif self.path == "/health":
            self._json(200, {})
        else:
            self._json(404, {"error": {"message": f"there is no route {self.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            server.bodies.append((self.path, body))
            server.headers.append(dict(self.headers.items()))
            number = len(server.bodies)
            server.active += 1
            server.max_active = max(server.max_active, server.active)
            server.changed.notify_all()
        try:
            time.sleep(server.behaviour.get("delay_s", 0.0))
            self._wait_for_active(server.behaviour.get("answer_from_active", 0))
            self._answer(number, body)
        finally:
            with server.lock:
                server.active -= 1

    def _wait_for_active(self, count: int) -> None:
        """Hold the answer until this number of requests has been in progress at once."""
        with self.server.changed:
            self.server.changed.wait_for(
                lambda: self.server.max_active >= count or self.server.is_stopping, 100
            )

    def _answer(self, number: int, body: dict[str, Any]) -> None:
        behaviour = self.server.behaviour
        if behaviour.get("fail_every") and number % behaviour["fail_every"] == 0:
            self._json(500, {"error": {"message": "made to fail"}})
        elif behaviour.get("die_after") and number > behaviour["die_after"]:
            self.server.socket.close()
            self.connection.close()
            raise ConnectionAbortedError
        elif behaviour.get("garbage"):
            self.wfile.write(b"this is not HTTP at all\r\n\r\n")
            self.close_connection = True
        else:
            self._route(body)

    def _route(self, body: dict[str, Any]) -> None:
        routes = {
            "/v1/embeddings": self._embeddings,
            "/embeddings": self._embeddings,
            "/pooling": self._pooling,
            "/v1/rerank": self._rerank,
            "/v2/rerank": self._rerank,
            "/embed": self._tei,
            "/rerank": self._tei,
            "/v1/completions": self._stream,
            "/v1/chat/completions": self._stream,
        }
        if self.server.behaviour.get("tokenizer"):
            routes |= {"/tokenize": self._tokenize, "/detokenize": self._detokenize}
        if self.path not in routes:
            self._json(404, {"error": {"message": f"there is no route {self.path}"}})
            return
        routes[self.path](body)

    def _embeddings(self, body: dict[str, Any]) -> None:
        given = body.get("input", body.get("messages"))
        rows = (
            given if isinstance(given, list) and given and not isinstance(given[0], (int, dict)) else [given]
        )
        data = [{"object": "embedding", "index": i, "embedding": vector(row)} for i, row in enumerate(rows)]
        tokens = sum(len(row) if isinstance(row, list) else len(str(row).split()) for row in rows)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        if body.get("encoding_format") == "bytes":
            self._send(200, b"\0" * 32 * len(rows), {"metadata": json.dumps({"usage": usage})})
            return
        self._json(200, {"object": "list", "data": data, "usage": usage})

    def _tokenize(self, body: dict[str, Any]) -> None:
        """Tokenise several texts in one request, up to `max_rows`."""
        rows = body["input"]
        if len(rows) > self.server.behaviour.get("max_rows", 2048):
            self._json(400, {"error": {"message": "too many rows"}})
            return
        ids = self.server.behaviour["tokenizer"].encode(rows, body["add_special_tokens"])
        self._json(200, {"data": [{"tokens": row, "count": len(row)} for row in ids]})

    def _detokenize(self, body: dict[str, Any]) -> None:
        tokenizer, rows = self.server.behaviour["tokenizer"], body["tokens"]
        is_one = isinstance(rows[0], int)
        rows = [rows] if is_one else rows
        if max(map(max, rows)) >= tokenizer.vocab_size:
            self._json(400, {"error": {"message": "an id that the tokenizer does not know"}})
            return
        special = set(range(tokenizer.vocab_size)) - set(tokenizer.ordinary.tolist())
        if body.get("skip_special_tokens"):
            rows = [[i for i in row if i not in special] for row in rows]
        texts = tokenizer.decode(rows)
        self._json(200, {"prompt": texts[0]} if is_one else {"data": [{"prompt": text} for text in texts]})

    def _pooling(self, body: dict[str, Any]) -> None:
        rows = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [{"index": i, "data": [vector(word) for word in row.split()]} for i, row in enumerate(rows)]
        self._json(200, {"data": data, "usage": {"prompt_tokens": 7 * len(rows)}})

    def _rerank(self, body: dict[str, Any]) -> None:
        """Score by MaxSim of word vectors if `maxsim` is set, otherwise by the share of common words."""
        query, documents = body["query"], body["documents"]
        if self.server.behaviour.get("maxsim"):
            scores = [
                sum(
                    max(sum(a * b for a, b in zip(vector(q), vector(w), strict=True)) for w in text.split())
                    for q in query.split()
                )
                for text in documents
            ]
        else:
            scores = [len(words(query) & words(text)) / max(1, len(words(text))) for text in documents]
        results = [{"index": i, "relevance_score": score} for i, score in enumerate(scores)]
        results.sort(key=lambda result: -result["relevance_score"])
        answer: dict[str, Any] = {"results": results}
        if self.path == "/v1/rerank":
            answer["usage"] = {"total_tokens": 11}
        self._json(200, answer)

    def _tei(self, body: dict[str, Any]) -> None:
        if "texts" in body:
            answer: Any = [{"index": i, "score": 0.5} for i in range(len(body["texts"]))]
        else:
            rows = body["inputs"] if isinstance(body["inputs"], list) else [body["inputs"]]
            answer = [vector(row) for row in rows]
        self._send(200, json.dumps(answer).encode(), {"x-compute-tokens": "5"})

    def _stream(self, body: dict[str, Any]) -> None:
        wanted = body.get("max_tokens", body.get("max_completion_tokens", 3))
        events = [{"choices": [{"index": 0, "text": " a", "delta": {"content": " a"}}]}] * wanted
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in events:
            self._chunk(f"data: {json.dumps(event)}\n\n")
        usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": wanted}}
        self._chunk(f"data: {json.dumps(usage)}\n\n")
        self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), {"content-type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        how = self.server.behaviour.get("framing", "length")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if how == "chunked":
            self.send_header("transfer-encoding", "chunked")
        elif how == "close":
            self.send_header("connection", "close")
        else:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        half = len(data) // 2
        for number, part in enumerate((data[:half], data[half:])):
            if number and how == "cut":
                self.close_connection = True
                return
            if number:
                self.wfile.flush()
                time.sleep(self.server.behaviour.get("body_delay_s", 0.0))
                self.server.last_writes_s.append(time.monotonic())
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n" if how == "chunked" else part)
        if how == "chunked":
            self.wfile.write(b"0\r\n\r\n")
        if how == "close":
            self.close_connection = True


@contextmanager
def stub(**behaviour: Any) -> Iterator[Stub]:
    server = Stub(**behaviour)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        with server.changed:
            server.is_stopping = True
            server.changed.notify_all()
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    Stub(int(sys.argv[1]), delay_s=float(sys.argv[2]) if len(sys.argv) > 2 else 0.0).serve_forever()

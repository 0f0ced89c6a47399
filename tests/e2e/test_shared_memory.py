"""Large answers pass through memory that the engine shares with API processes. All of it is freed again."""

from __future__ import annotations

import base64
import json
import socket
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.e2e.server import API, ENGINE, Server, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
BODY = {"input": ["many words " * 300] * 12, "task": "token_embed", "truncate_prompt_tokens": -1}
TOKENS, WIDTH = 256, 384
GAUGE = "penstock_shared_memory_bytes"


def shared_files() -> set[str]:
    return {file.name for file in Path("/dev/shm").glob("*penstock*")}


def check(http: httpx.Client, encoding: str) -> None:
    answer = http.post("/pooling", json=BODY | {"encoding_format": encoding})
    assert answer.status_code == 200, answer.text[:300]
    if encoding == "bytes":
        rows = [np.frombuffer(answer.content, dtype=np.float32)]
    else:
        data = [item["data"] for item in answer.json()["data"]]
        rows = [
            np.frombuffer(base64.b64decode(one), dtype=np.float32) if encoding == "base64" else np.array(one)
            for one in data
        ]
    assert sum(row.size for row in rows) == 12 * TOKENS * WIDTH
    for row in rows:
        np.testing.assert_allclose(row, WIDTH**-0.5, rtol=1e-6)


def disconnect_early(server: Server) -> None:
    """Send a request, read the beginning of the answer and disconnect."""
    body = json.dumps(BODY | {"encoding_format": "base64"}).encode()
    head = f"POST /pooling HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_large_answers_give_their_memory_back_also_if_clients_disconnect() -> None:
    before = shared_files()
    with serving("--device", "null", "--no-share-identical") as server, server.client() as http:
        for encoding in ("base64", "bytes", "float"):
            check(http, encoding)
        slow = socket.create_connection(("127.0.0.1", server.port))
        body = json.dumps(BODY | {"encoding_format": "bytes"}).encode()
        slow.sendall(
            f"POST /pooling HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        assert slow.recv(100).startswith(b"HTTP/1.1 200")
        server.wait_for_metric(GAUGE, 12 * TOKENS * WIDTH * 4)  # the slow client still holds its blocks
        for _ in range(5):
            disconnect_early(server)
        check(http, "base64")
        slow.close()
        server.wait_for_metric(GAUGE, 0)
        assert shared_files() == before
    assert shared_files() == before


def test_a_killed_engine_or_api_process_leaves_no_shared_memory() -> None:
    before = shared_files()
    with serving("--device", "null", "--shared-memory-mb", "8") as server, server.client() as http:
        check(http, "base64")
        for process in (API, ENGINE):
            server.kill(process)
            server.wait_ready()
            check(http, "base64")
        server.wait_for_metric(GAUGE, 0)
    assert shared_files() == before


def test_large_answers_are_sent_without_shared_memory() -> None:
    with serving("--device", "null", "--shared-memory-mb", "0") as server, server.client() as http:
        for encoding in ("base64", "bytes"):
            check(http, encoding)
        assert server.metric(GAUGE) == 0

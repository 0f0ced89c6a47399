"""A running server: health, metrics, limits, priorities, failures, restarts and shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.gates import Gates
from tests.e2e.server import API, ENGINE, Server, serving
from tests.thinning import thorough
from tests.waiting import PATIENCE_S

RUNNING_ROWS, QUEUED_ROWS = "penstock_running_rows", "penstock_queue_rows"
ROUTE = "/v1/embeddings"


def test_health_version_models_schema_and_pages_answer(http: httpx.Client) -> None:
    assert http.get("/live").json() == {"status": "alive"}
    assert http.get("/health").json() == {"status": "healthy"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json()["version"]
    card = http.get("/v1/models").json()["data"][0]
    assert card["max_model_len"] == 256 and card["dimensions"] == 384 and card["tasks"][0] == "embed"
    schema = http.get("/openapi.json").json()
    assert schema["paths"]["/v1/embeddings"]["post"]["requestBody"]
    fields = schema["components"]["schemas"]["EmbeddingsRequest"]["properties"]
    assert {"input", "dimensions", "embed_dtype", "truncate_prompt_tokens"} <= set(fields)
    for page in ("/", "/docs"):
        response = http.get(page)
        assert response.headers["content-type"].startswith("text/html")
        assert "Penstock" in response.text


def test_metrics_report_the_queue_batch_fill_and_the_four_phases(server: Server, http: httpx.Client) -> None:
    http.post(ROUTE, json={"input": ["a", "b"]})
    text = http.get("/metrics").text
    for name in (
        "penstock_requests_total",
        "penstock_rows_total",
        "penstock_tokens_total",
        "penstock_queue_rows",
        "penstock_queue_seconds_count",
        "penstock_step_seconds_count",
        "penstock_step_tokens_count",
        "penstock_batch_fill_count",
        "penstock_rejected_total",
        "penstock_cancelled_total",
    ):
        assert name in text, name
    for phase in ("tokenize", "queue", "device", "encode"):
        assert f'phase="{phase}"' in text
    before = server.metric("penstock_rows_total")
    http.post(ROUTE, json={"input": ["a", "b", "c"]})
    assert server.metric("penstock_rows_total") == before + 3


def test_a_server_with_an_api_key_refuses_other_keys(null_server: Server) -> None:
    http, body = null_server.http, {"input": "a"}
    assert http.get("/health").status_code == 200
    refused = http.post(ROUTE, json=body)
    assert refused.status_code == 401
    assert refused.json()["error"]["reason"] == "invalid_api_key"
    wrong = {"Authorization": "Bearer other"}
    assert http.post(ROUTE, json=body, headers=wrong).status_code == 401
    right = {"Authorization": "Bearer secret"}
    assert http.post(ROUTE, json=body, headers=right).status_code == 200


def test_several_api_processes_share_one_engine(null_server: Server) -> None:
    assert len(null_server.children(API)) == 2
    headers = {"Authorization": "Bearer secret", "Connection": "close"}
    for _ in range(20):  # a new connection may reach either process
        answer = null_server.http.post(ROUTE, json={"input": "a"}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"][0]["embedding"]) == 384


def test_an_api_process_imports_no_torch_and_stays_small(server: Server) -> None:
    (pid,) = server.children(API)
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    status = Path(f"/proc/{pid}/status").read_text()
    resident_kb = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    assert resident_kb < 150 * 1024


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Threads for blocked requests, joined after every gate is open again."""
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def held_server(
    gated_server: Server, shared_gates: Gates, background: ThreadPoolExecutor
) -> Iterator[Server]:
    """A server with one row in flight that does not finish. Later rows wait in the queue."""
    with shared_gates.no_step_finishes():
        first = background.submit(gated_server.post, ROUTE, input="first")
        gated_server.wait_for_metric(RUNNING_ROWS, 1)
        yield gated_server
    assert first.result().status_code == 200
    gated_server.wait_for_metric(RUNNING_ROWS, 0)


def test_a_request_past_its_deadline_gets_408_and_leaves_the_queue(held_server: Server) -> None:
    late = held_server.post(ROUTE, input=["a", "b"], timeout=0.2)
    assert late.status_code == 408
    assert late.json()["error"]["reason"] == "deadline_exceeded"
    held_server.wait_for_metric(QUEUED_ROWS, 0)


def test_a_client_that_disconnects_cancels_its_rows(held_server: Server) -> None:
    before = held_server.metric("penstock_cancelled_total")
    body = json.dumps({"input": ["a", "b"]}).encode()
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", held_server.port)) as connection:
        connection.sendall(head + body)
        held_server.wait_for_metric(QUEUED_ROWS, 2)
    held_server.wait_for_metric("penstock_cancelled_total", before + 1)
    held_server.wait_for_metric(QUEUED_ROWS, 0)


def test_urgent_requests_overtake_waiting_ones(
    held_server: Server, shared_gates: Gates, background: ThreadPoolExecutor
) -> None:
    patient = background.submit(held_server.post, ROUTE, input=["a", "b", "c"])
    held_server.wait_for_metric(QUEUED_ROWS, 3)
    urgent = background.submit(held_server.post, ROUTE, input="d", priority=-100)
    held_server.wait_for_metric(QUEUED_ROWS, 4)
    for _ in range(2):  # the row in flight, then the urgent one
        shared_gates.finish_one_step()
    assert urgent.result(PATIENCE_S).status_code == 200
    assert not patient.done()
    for _ in range(3):
        shared_gates.finish_one_step()
    assert patient.result(PATIENCE_S).status_code == 200


def test_a_full_server_answers_429_and_says_when_to_retry(
    gates: Gates, background: ThreadPoolExecutor
) -> None:
    flags = ("--device", "null", "--max-concurrent-requests", "1")
    with serving(*flags, environment=gates.environment) as server:
        with gates.no_step_finishes():
            busy = background.submit(server.post, ROUTE, input="a")
            server.wait_for_metric("penstock_requests_in_flight", 1)
            refused = server.post(ROUTE, input="b")
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "RateLimitError"
            assert server.http.get("/health").status_code == 200
        assert busy.result(PATIENCE_S).status_code == 200
        assert server.post(ROUTE, input="b").status_code == 200


def test_a_full_queue_answers_429(gates: Gates, background: ThreadPoolExecutor) -> None:
    flags = (
        "--device",
        "null",
        "--max-num-seqs",
        "1",
        "--max-queued-tokens",
        "100",
        "--max-queue-seconds",
        "0",
    )
    with serving(*flags, environment=gates.environment) as server:
        with gates.no_step_finishes():
            running = background.submit(server.post, ROUTE, input="a")
            server.wait_for_metric(RUNNING_ROWS, 1)
            queued = background.submit(server.post, ROUTE, input="word " * 90)
            server.wait_for_metric(QUEUED_ROWS, 1)
            refused = server.post(ROUTE, input="word " * 20)
            assert refused.status_code == 429
            assert "retry-after" in refused.headers
            server.wait_for_metric("penstock_rejected_total", 1)
        assert running.result(PATIENCE_S).status_code == queued.result(PATIENCE_S).status_code == 200


def test_a_request_that_does_not_start_within_the_bound_gets_429(
    gates: Gates, background: ThreadPoolExecutor
) -> None:
    flags = ("--device", "null", "--max-num-seqs", "1", "--max-queue-seconds", "0.2")
    with serving(*flags, environment=gates.environment) as server:
        with gates.no_step_finishes():
            running = background.submit(server.post, ROUTE, input="a")
            server.wait_for_metric(RUNNING_ROWS, 1)
            late = server.post(ROUTE, input="b")
            assert late.status_code == 429
            assert "waited 0.2 s and did not start" in late.json()["error"]["message"]
            assert int(late.headers["retry-after"]) >= 1
        assert running.result(PATIENCE_S).status_code == 200


def test_a_killed_engine_answers_503_with_a_reason_and_is_restarted(
    gated_server: Server, shared_gates: Gates, background: ThreadPoolExecutor
) -> None:
    server = gated_server
    (engine,) = server.children(ENGINE)
    with shared_gates.no_engine_starts(), shared_gates.no_step_finishes():
        running = background.submit(server.post, ROUTE, input="a")
        server.wait_for_metric(RUNNING_ROWS, 1)
        os.kill(engine, signal.SIGKILL)
        failed = running.result(PATIENCE_S)
        assert failed.status_code == 503
        assert "engine" in failed.json()["error"]["message"]
        server.wait_for(lambda: "SIGKILL" in server.http.get("/ready").text)
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/live").status_code == 200
    server.wait_ready()
    assert server.children(ENGINE) != [engine]
    assert server.post(ROUTE, input="a").status_code == 200


def test_a_signal_writes_a_profile_of_the_next_steps(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    with serving("--device", "null", "--profile", str(folder), "--profile-steps", "1") as server:
        server.process.send_signal(signal.SIGUSR2)
        for _ in range(15):  # too few steps to write a profile without the signal
            assert server.post(ROUTE, input="a").status_code == 200
            if traces := list(folder.glob("*.json")):
                break
            time.sleep(1)  # the signal has not reached the engine yet
        (trace,) = traces
        assert "step: 1 rows" in trace.read_text()
        assert server.post(ROUTE, input="a").status_code == 200


def test_a_lost_device_answers_503_with_a_reason_and_gets_a_new_engine(
    gated_server: Server, shared_gates: Gates
) -> None:
    server = gated_server
    (engine,) = server.children(ENGINE)
    shared_gates.fail_next_step("the device failed: CUDA error: an illegal memory access was encountered")
    lost = server.post(ROUTE, input=["a", "b", "c"])
    assert lost.status_code == 503
    assert "illegal memory access" in lost.json()["error"]["message"]
    server.wait_for_log("device failed; restart ")
    server.wait_for(lambda: server.children(ENGINE) not in ([], [engine]))
    server.wait_ready()
    assert server.post(ROUTE, input=["a", "b", "c"]).status_code == 200


def test_a_killed_api_process_is_restarted_however_often(gated_server: Server) -> None:
    for _ in range(3):
        gated_server.kill(API)
        gated_server.wait_ready()
    assert gated_server.post(ROUTE, input="a").status_code == 200


def test_sigterm_finishes_running_requests_and_exits_0(gates: Gates, background: ThreadPoolExecutor) -> None:
    flags = ("--device", "null", "--drain", "120")
    with serving(*flags, environment=gates.environment) as server:
        with gates.no_step_finishes():
            running = background.submit(server.post, ROUTE, input=["a", "b"])
            server.wait_for_metric(RUNNING_ROWS, 2)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log("draining")
            assert not running.done()
        assert server.process.wait(PATIENCE_S) == 0
        assert running.result(PATIENCE_S).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def run_serve(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["no/such/folder/here"], "neither a folder nor a hub id"),
        (["--dtype", "float99"], "float99"),
        pytest.param(["--max-model-len", "100000"], "512", marks=thorough),  # same stage as dtype
        (["--pooler-config", '{"pooling_type": "best"}'], "best"),
    ],
)
def test_a_server_that_cannot_start_says_why_and_exits_2(flags: list[str], words: str) -> None:
    ran = run_serve("--port", "0", *flags)
    assert ran.returncode == 2, ran.stderr
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_port_in_use_is_reported_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran = run_serve("--device", "null", "--port", str(taken.getsockname()[1]))
    assert ran.returncode == 2
    assert "cannot listen" in ran.stderr

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, serving

BIG = {
    "input": [f"{i} " + "some words that take a while to embed " * 25 for i in range(250)]
}  # seconds of work


def test_health_version_models_schema_and_pages_answer(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "alive"}
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


def test_metrics_tell_queue_fill_and_the_four_phases(server: Server, http: httpx.Client) -> None:
    http.post("/v1/embeddings", json={"input": ["a", "b"]})
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
    http.post("/v1/embeddings", json={"input": ["a", "b", "c"]})
    assert server.metric("penstock_rows_total") == before + 3


def test_a_key_is_needed_where_one_is_set(null_server: Server) -> None:
    with null_server.client() as http:
        body = {"input": "a"}
        assert http.get("/health").status_code == 200
        refused = http.post("/v1/embeddings", json=body)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        wrong = {"Authorization": "Bearer other"}
        assert http.post("/v1/embeddings", json=body, headers=wrong).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert http.post("/v1/embeddings", json=body, headers=right).status_code == 200


def test_several_api_processes_share_one_engine_without_torch(null_server: Server) -> None:
    processes = null_server.children("penstock.api.process")
    assert len(processes) == 2
    headers = {"Authorization": "Bearer secret"}
    for _ in range(20):  # new connections reach either process
        with null_server.client(headers=headers) as http:
            assert len(http.post("/v1/embeddings", json={"input": "a"}).json()["data"][0]["embedding"]) == 384


def test_an_api_process_imports_no_torch_and_stays_small(server: Server) -> None:
    (pid,) = server.children("penstock.api.process")
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    status = Path(f"/proc/{pid}/status").read_text()
    resident_kb = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    assert resident_kb < 150 * 1024


def test_a_deadline_gives_408_and_the_rows_are_dropped(server: Server, http: httpx.Client) -> None:
    response = http.post("/v1/embeddings", json={**BIG, "timeout": 0.2})
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "deadline_exceeded"
    server.wait_for(lambda: server.metric("penstock_queue_rows") == 0)
    assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def test_a_client_that_leaves_cancels_its_rows(server: Server, http: httpx.Client) -> None:
    before = server.metric("penstock_cancelled_total")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/embeddings", json=BIG, timeout=0.4)
    server.wait_for(lambda: server.metric("penstock_cancelled_total") == before + 1)
    server.wait_for(lambda: server.metric("penstock_queue_rows") == 0, seconds=3)
    assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def test_urgent_requests_overtake_waiting_ones(server: Server, http: httpx.Client) -> None:
    done: list[str] = []

    def send(name: str, body: dict[str, object]) -> None:
        httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
        done.append(name)

    big = threading.Thread(target=send, args=("big", BIG))
    big.start()
    time.sleep(0.3)
    urgent = threading.Thread(target=send, args=("urgent", {"input": "a", "priority": -100}))
    urgent.start()
    urgent.join()
    big.join()
    assert done == ["urgent", "big"]


def test_a_full_server_says_429_and_when_to_come_back() -> None:
    with serving("--device", "cpu", "--max-concurrent-requests", "1") as server:
        busy = threading.Thread(
            target=lambda: httpx.post(f"{server.url}/v1/embeddings", json=BIG, timeout=60)
        )
        busy.start()
        time.sleep(0.5)
        with server.client() as http:
            refused = http.post("/v1/embeddings", json={"input": "a"})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert http.get("/health").status_code == 200
        busy.join()


def test_a_queue_beyond_its_tokens_says_429() -> None:
    with serving("--device", "cpu", "--max-queued-tokens", "1000") as server, server.client() as http:
        busy = threading.Thread(
            target=lambda: httpx.post(f"{server.url}/v1/embeddings", json=BIG, timeout=60)
        )
        busy.start()
        time.sleep(0.5)
        refused = http.post("/v1/embeddings", json={"input": [f"{i} " + "word " * 200 for i in range(20)]})
        assert refused.status_code == 429
        assert "retry-after" in refused.headers
        busy.join()


def test_a_killed_engine_gives_503_with_a_reason_and_comes_back() -> None:
    with serving("--device", "cpu") as server, server.client() as http:
        answers: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/v1/embeddings", json=BIG, timeout=60))
        )
        waiting.start()
        time.sleep(0.7)
        (engine,) = server.children("penstock.serving.engine_process")
        os.kill(engine, signal.SIGKILL)
        waiting.join(10)
        assert answers and answers[0].status_code == 503
        assert "engine" in answers[0].json()["error"]["message"]
        server.wait_for(lambda: http.get("/ready").status_code == 503, seconds=3)
        reason = http.get("/ready").json()["error"]["message"]
        assert "SIGKILL" in reason or "loading" in reason or "engine" in reason
        assert http.get("/health").status_code == 200
        server.wait_ready()
        assert http.post("/v1/embeddings", json={"input": "back again"}).status_code == 200


def test_a_signal_writes_a_profile_of_the_next_steps(tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--profile", str(tmp_path), "--profile-steps", "1")
    with serving(*flags) as server, server.client() as http:
        server.wait_for(lambda: any("is ready at" in line for line in server.log))
        os.kill(server.process.pid, signal.SIGUSR2)
        time.sleep(0.5)
        assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200
        server.wait_for(lambda: len(list(tmp_path.glob("*.json"))) == 1)
        assert http.post("/v1/embeddings", json={"input": "b"}).status_code == 200


LOSE_THE_DEVICE = """
from pathlib import Path
from penstock.errors import DeviceFailed
from penstock.runner.null import NullRunner

launch, once = NullRunner.launch, Path(__file__).with_name("lost")

def lose(self, plan):
    if plan.num_rows == 3 and not once.exists():
        once.touch()
        raise DeviceFailed("the device failed: CUDA error: an illegal memory access was encountered")
    return launch(self, plan)

NullRunner.launch = lose
"""


def test_a_lost_device_gives_503_with_a_reason_and_a_new_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOSE_THE_DEVICE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with serving("--device", "null") as server, server.client() as http:
        (engine,) = server.children("penstock.serving.engine_process")
        lost = http.post("/v1/embeddings", json={"input": ["a", "b", "c"]})
        assert lost.status_code == 503
        assert "illegal memory access" in lost.json()["error"]["message"]
        server.wait_for(lambda: any("device failed; restart 1" in line for line in server.log))
        server.wait_for(lambda: server.children("penstock.serving.engine_process") not in ([], [engine]))
        server.wait_ready()
        assert http.post("/v1/embeddings", json={"input": ["a", "b", "c"]}).status_code == 200


def test_a_killed_api_process_is_started_again() -> None:
    with serving("--device", "null") as server:
        (api,) = server.children("penstock.api.process")
        os.kill(api, signal.SIGKILL)
        server.wait_for(lambda: server.children("penstock.api.process") not in ([], [api]))
        server.wait_ready()
        with server.client() as http:
            assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def test_sigterm_finishes_what_was_begun_and_exits_0() -> None:
    with serving("--device", "cpu", "--drain", "120") as server:
        answers: list[httpx.Response] = []
        some = {"input": BIG["input"][:150]}
        waiting = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/v1/embeddings", json=some, timeout=120))
        )
        waiting.start()
        server.wait_for(lambda: server.metric("penstock_rows_total") == 150)
        assert server.terminate() == 0
        waiting.join(5)
        assert answers and answers[0].status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", timeout=2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["no/such/folder/here"], "no folder"),
        (["--dtype", "float99"], "float99"),
        (["--max-model-len", "100000"], "512"),
        (["--pooler-config", "{nope"], "pooler-config"),
        (["--pooler-config", '{"pooling_type": "best"}'], "best"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_a_server_that_cannot_start_says_why_and_exits_2(flags: list[str], words: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 2, ran.stderr
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_port_in_use_is_told_before_anything_slow() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "penstock", "serve", "--device", "null", "--port", port]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ran.returncode == 2
    assert "cannot listen" in ran.stderr

"""A real server's result cache: its entries outlive an engine that dies, but not a change of the weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import httpx

from tests.checkpoints import BERT_CONFIG, bert_tensors, write_bert
from tests.e2e.server import ENGINE, Server, serving

# No Redis listens there: requests are served nevertheless.
REDIS = ("--result-cache-redis", "redis://:hunter2@127.0.0.1:1/0") if find_spec("redis") else ()
TEXTS = ["the long water", "people write many words"]


def embed(server: Server) -> httpx.Response:
    answer = server.post("/v1/embeddings", input=TEXTS)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_new_engine_keeps_results_only_if_its_weights_are_the_same(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model")
    flags = ("--device", "null", "--result-cache-mb", "4", *REDIS)
    with serving(str(folder), *flags) as server:
        shown = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        assert b"--result-cache-mb" in shown and b"hunter2" not in shown
        first = embed(server)
        again = embed(server)
        assert (first.headers["x-cache-hits"], again.headers["x-cache-hits"]) == ("0", "2")
        assert again.json()["data"] == first.json()["data"]
        assert float(again.headers["x-device-ms"]) == float(again.headers["x-queue-ms"]) == 0

        server.kill(ENGINE)
        server.wait_ready()
        same = embed(server)
        assert same.headers["x-cache-hits"] == "2" and same.json()["data"] == first.json()["data"]

        write_bert(folder, tensors=bert_tensors(BERT_CONFIG, seed=1))
        assert embed(server).headers["x-cache-hits"] == "2"  # the engine still has the old weights
        server.kill(ENGINE)
        server.wait_ready()
        other = embed(server)
        assert other.headers["x-cache-hits"] == "0"
        server.wait_for_metric("penstock_result_cache_hits_total", 6)
        server.wait_for_metric("penstock_result_cache_lookups_total", 10)
        assert "hunter2" not in server.http.get("/server_info").text
    assert not any("hunter2" in line for line in server.log)

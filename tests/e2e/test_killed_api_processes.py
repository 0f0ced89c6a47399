"""Killed API processes: no answer is swapped, successors are served, and the engine drops their work."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.gates import Gates
from tests.e2e.mixed_load import reference_cases, running_load, wait_until_idle
from tests.e2e.server import API, Server, serving

NUM_API_PROCESSES = 3
NUM_KILLS = int(os.environ.get("PENSTOCK_TEST_KILLS", "2"))  # set it higher for a long run
SEED = int(os.environ.get("PENSTOCK_TEST_SEED", "0"))
ROUTE = "/v1/embeddings"
QUEUED_ROWS, RUNNING_ROWS = "penstock_queue_rows", "penstock_running_rows"


@pytest.fixture(scope="module")
def server(llama_folder: Path) -> Iterator[Server]:
    flags = ("--device", "cpu", "--threads", "1", "--api-server-count", str(NUM_API_PROCESSES))
    embeds = ("--pooler-config", '{"pooling_type": "LAST"}')  # so that scores come from its vectors
    with serving(str(llama_folder), *flags, *embeds) as running:
        yield running


def kill_one(server: Server, draw: random.Random) -> None:
    before = server.children(API)
    os.kill(draw.choice(before), signal.SIGKILL)
    server.wait_for(lambda: len(now := server.children(API)) == NUM_API_PROCESSES and set(now) != set(before))


def test_under_a_mixed_load_every_answer_is_right_or_a_typed_error(server: Server) -> None:
    cases, draw = reference_cases(server), random.Random(SEED)
    with running_load(server, cases, num_threads=8, seed=SEED) as load:
        for _ in range(NUM_KILLS):
            load.wait_for_answers(8)
            kill_one(server, draw)
        load.wait_for_answers(12)
    assert {"embed", "rerank", "generate", "maxsim"} <= set(load.counts)
    wait_until_idle(server)


def test_the_work_of_a_killed_process_leaves_the_engine_and_its_successor_is_served(gates: Gates) -> None:
    """A successor once counted its requests from 0 again. The engine refused them as duplicates, or answered
    them with results of its predecessor's requests."""
    flags = ("--device", "null", "--max-num-seqs", "1")

    def lost(server: Server, name: str) -> None:
        with pytest.raises(httpx.TransportError), server.client() as http:
            http.post(ROUTE, json={"input": [f"{name} one", f"{name} two"]})

    with serving(*flags, environment=gates.environment) as server, ThreadPoolExecutor(4) as threads:
        with gates.no_step_finishes():
            clients = [threads.submit(lost, server, str(n)) for n in range(3)]
            server.wait_for_metric(RUNNING_ROWS, 1)
            server.wait_for_metric(QUEUED_ROWS, 5)
            server.http.close()
            del server.http
            server.kill(API)
            server.wait_ready()
            for client in clients:
                client.result()
            server.wait_for_metric(QUEUED_ROWS, 0)
            answers = [threads.submit(server.post, ROUTE, input=f"new {n}") for n in range(3)]
            server.wait_for_metric(QUEUED_ROWS, 3)
        assert [answer.result().status_code for answer in answers] == [200] * 3
        server.wait_for_metric(RUNNING_ROWS, 0)

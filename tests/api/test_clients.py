"""How a client is identified, and that one client leaves capacity for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from penstock.api.admission import Admission
from penstock.api.endpoint import client_of
from penstock.api.state import ServerState
from penstock.config import ServerConfig
from penstock.errors import QueueFull, QueueTooSlow, TooManyRequests
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import PooledOutput, Request, Task, Timings
from penstock.wire.status import EngineStatus, StatusReader, StatusWriter, create_status_page
from tests.api.scripted_app import listening, make_state
from tests.text_models import ScriptedEngine, continue_with, write_text_model
from tests.waiting import PATIENCE_S, wait_until

SETTINGS = {
    "max_num_batched_tokens": 1000,
    "max_num_seqs": 100,
    "max_queued_tokens": 50_000,
    "max_queue_seconds": 5.0,
}


class PoolingEngine(ScriptedEngine):
    async def run(self, request: Request) -> PooledOutput:
        self.requests.append(request)
        values = np.ones((request.num_rows, 8), dtype=np.float32)
        return PooledOutput(request.id, values, Timings(0.0, 0.0))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> ServerState:
    folder = write_text_model(tmp_path_factory.mktemp("model"))
    engine = PoolingEngine(continue_with(Tokenizer(folder), "the water"))
    return make_state(folder, engine, {"max_concurrent_requests": 16}, tasks=(Task.EMBED, Task.GENERATE))


@pytest.fixture(scope="module")
def url(state: ServerState) -> Iterator[str]:
    with listening(state) as url:
        yield url


def seen(state: ServerState) -> list[Request]:
    (model,) = state.models.values()
    engine = model.engine
    assert isinstance(engine, PoolingEngine)
    requests, engine.requests = list(engine.requests), []
    return requests


def connect(url: str, source: str | None = None) -> HTTPConnection:
    address = urlsplit(url)
    assert address.hostname is not None
    return HTTPConnection(
        address.hostname,
        address.port,
        timeout=PATIENCE_S,
        source_address=None if source is None else (source, 0),
    )


def post(connection: HTTPConnection, path: str, body: bytes) -> int:
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer.status


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        (("10.1.2.3", 4000), "10.1.2.3"),
        (("2001:db8::7", 4000), "2001:db8::7"),
        (("127.0.0.1", 4000), "127.0.0.1:4000"),
        (("::1", 4000), "::1:4000"),
        (None, ""),
    ],
    ids=str,
)
def test_a_client_is_an_address_or_on_this_machine_a_connection(peer: Any, client: str) -> None:
    assert client_of({"type": "http", "client": peer}) == client


def test_requests_of_a_connection_are_of_one_client_and_those_of_another_are_not(
    state: ServerState, url: str
) -> None:
    seen(state)
    one, other = connect(url), connect(url)
    for connection in (one, other, one):
        assert post(connection, "/v1/embeddings", b'{"input": "water"}') == 200
    assert post(one, "/v1/completions", b'{"prompt": "water", "max_tokens": 2}') == 200
    first, second, third, generated = seen(state)
    assert first.client == third.client == generated.client != second.client
    assert first.client.startswith("127.0.0.1:")
    assert {request.weight for request in (first, second, third, generated)} == {1.0}
    wait_until(lambda: state.held == {} and state.in_flight == 0)


def test_a_client_with_one_of_several_keys_has_its_name_and_weight(
    state: ServerState, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("- {key: one, name: shop, weight: 4}\n- {key: two, name: search}\n")
    file.chmod(0o600)
    assert clients_of_keys(state, {"api_key_file": str(file)}) == [("shop", 4.0), ("search", 1.0)]


def test_clients_with_the_only_key_are_told_apart_like_those_without(state: ServerState) -> None:
    (one, _), (other, _) = clients_of_keys(state, {"api_keys": ("one",)}, ("one", "one"))
    assert one.startswith("127.0.0.1:") and one != other


def clients_of_keys(
    state: ServerState, server: dict[str, Any], keys: Sequence[str] = ("one", "two")
) -> list[tuple[str, float]]:
    """The client names and weights of requests with these keys, on a server with these settings."""
    seen(state)
    with listening(ServerState(ServerConfig(**server), state.models)) as url:
        for key in keys:
            connection = connect(url)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            connection.request("POST", "/v1/embeddings", b'{"input": "water"}', headers)
            assert connection.getresponse().status == 200
    return [(request.client, request.weight) for request in seen(state)]


def test_connections_from_one_other_address_are_of_one_client(state: ServerState, url: str) -> None:
    seen(state)
    for _ in range(2):
        assert post(connect(url, "127.0.0.2"), "/v1/embeddings", b'{"input": "water"}') == 200
    assert [request.client for request in seen(state)] == ["127.0.0.2"] * 2


def test_a_client_with_many_requests_in_flight_leaves_room_for_others(state: ServerState) -> None:
    for _ in range(16):
        state.admit("flood")
    with pytest.raises(TooManyRequests, match="16 requests are in flight"):
        state.admit("flood")
    state.admit("one")
    state.admit("other")
    with pytest.raises(TooManyRequests, match="18 requests are in flight"):
        state.admit("third")
    for client in ["one", "other", *["flood"] * 16]:
        state.release(client)
    assert state.held == {} and state.in_flight == 0


def test_a_client_alone_has_no_more_requests_in_flight_than_the_limit(state: ServerState) -> None:
    for _ in range(16):
        state.admit()
    with pytest.raises(TooManyRequests):
        state.check_room()
    for _ in range(16):
        state.release()


def admission(folder: Path, **status: Any) -> Admission:
    create_status_page(folder / "page")
    StatusWriter(folder / "page").publish(EngineStatus(pid=1, **status))
    return Admission(StatusReader(folder / "page"), lambda: SETTINGS)


@pytest.mark.parametrize("kind", ["small", "large", "prompt"])
def test_a_client_without_other_requests_is_not_refused_for_those_of_one_other(
    tmp_path: Path, kind: str
) -> None:
    waiting = {
        "small": {"queued_tokens": 9000, "tokens_per_s": 1000, "small_weight": 1},
        "large": {
            "queued_tokens": 9000,
            "queued_large_tokens": 9000,
            "tokens_per_s": 1000,
            "large_weight": 1,
        },
        "prompt": {"queued_prompt_tokens": 9000, "prompt_tokens_per_s": 1000, "prompt_weight": 1},
    }
    door = admission(tmp_path, **waiting[kind])
    num_bytes, generates = 40_000 if kind == "large" else 400, kind == "prompt"
    with pytest.raises(QueueTooSlow, match=r"about 9\.0 s to start"):
        door.admit("Embed", num_bytes, generates=generates)
    door.admit("Embed", num_bytes, generates=generates, light_weight=1.0)


def test_a_client_without_other_requests_waits_for_its_turn_among_many(tmp_path: Path) -> None:
    door = admission(tmp_path, queued_tokens=9000, tokens_per_s=1000, small_weight=90)
    with pytest.raises(QueueTooSlow, match=r"about 9\.0 s to start"):
        door.admit("Embed", 400, light_weight=1.0)


def test_a_full_queue_has_room_for_a_client_without_other_requests(tmp_path: Path) -> None:
    door = admission(tmp_path, queued_tokens=50_000, tokens_per_s=1e6, small_weight=1)
    with pytest.raises(QueueFull, match="at most 50000 may"):
        door.admit("Embed", 4000)
    door.admit("Embed", 4000, light_weight=1.0)
    with pytest.raises(QueueFull, match="at most 56250 may"):
        door.admit("Embed", 40_000, light_weight=1.0)

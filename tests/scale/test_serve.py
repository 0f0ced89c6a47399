"""Penstock on Ray Serve, without a cluster: its configuration, the data sent to replicas, and errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
from ray.exceptions import ActorDiedError

from penstock.balance import Affinity
from penstock.cli import ray as cli_ray
from penstock.cli.main import app as cli
from penstock.cli.settings import app_settings
from penstock.errors import BadValue, ConfigError, EngineError, EngineUnavailable, PenstockError, QueueFull
from penstock.scale.serve import build_app
from penstock.scale.serving import replica_table
from penstock.scale.serving.autoscaling import QueuedTokensPolicy
from penstock.scale.serving.engine_replica import TokenQueue
from penstock.scale.serving.handle import RayEngineHandle
from penstock.scale.serving.transport import failure, pack_results, pack_work, unpack_results, unpack_work
from penstock.types import (
    Comparison,
    Failure,
    GeneratedTokens,
    PooledOutput,
    PoolingParams,
    Request,
    Timings,
)
from tests.deploy.files import check_config

ENGINE_PACKAGES = ("penstock.engine", "penstock.runner", "penstock.scheduler", "penstock.models")
MODEL = {"model": "some/model", "served_model_name": "m"}


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def request(name: str = "r", deadline_s: float | None = None) -> Request:
    params = PoolingParams(dimensions=2)
    arrival_s = time.monotonic()
    return Request(
        name,
        ints(5, 6, 7),
        ints(1, 2),
        params,
        type_ids=ints(0, 0, 1),
        arrival_s=arrival_s,
        deadline_s=deadline_s,
    )


def output(name: str) -> PooledOutput:
    return PooledOutput(name, np.ones((2, 2), dtype=np.float32), Timings(0.1, 0.2), ())


# --- the configuration --------------------------------------------------------------------------------------


def test_a_model_has_the_flags_of_the_file_and_its_own_share_of_a_gpu() -> None:
    config = app_settings(
        {
            "device": "cuda",
            "drain": 7,
            "ray": {"max_replicas": 4, "ingress_replicas": 2},
            "models": [
                {**MODEL, "aliases": ["n"], "ray": {"gpu_share": 0.5}},
                {"model": "other/model", "max-model-len": 128},
            ],
        }
    )
    first, second = config.models
    assert (first.gpu_share, second.gpu_share) == (0.5, 1.0)
    assert (first.replicas.max_replicas, second.replicas.is_scaled) == (4, True)
    assert second.config.engine.max_model_len == 128
    assert (config.server.drain_s, config.ingress.ingress_replicas) == (7, 2)
    assert [model.deployment for model in config.models] == ["engine-m", "engine-other-model"]


def test_a_file_is_read_like_that_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("device: cpu\nmodels:\n  - some/model\nray:\n  cpus: 2\n")
    (model,) = app_settings(file).models
    assert (model.config.engine.device, model.replicas.cpus) == ("cpu", 2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"ray": {"replicas": 2}}, "'replicas'; use min_replicas"),
        ({"models": [{**MODEL, "ray": {"gpus": 1}}]}, "ray of model 'some/model' has 'gpus'"),
        ({"models": [{**MODEL, "ray": {"ingress_replicas": 1}}]}, "ingress_replicas is for all models"),
        ({"ray": {"min_replicas": 3, "max_replicas": 2}}, "max_replicas is 2"),
        ({"ray": {"min_replicas": "two"}}, "Expected `int`"),
        ({"ray": {"gpu_share": 1.5}}, "gpu_share is 1.5"),
        ({"ray": {"gpu_share": 2}}, "uses one GPU at most"),
        ({"ray": [1]}, "ray must map names"),
        ({"device": "cpu", "ray": {"gpu_share": 0.5}}, "gpu_share is 0.5, but device is cpu"),
        ({"device": "cuda:1"}, "Ray assigns the GPUs"),
        ({"port": 8000}, "http_options"),
        ({"uds": "/tmp/socket"}, "--uds cannot be used with Ray"),
        ({"api-server-count": 2}, "--api-server-count cannot be used with Ray"),
        ({"ssl_certfile": "c.pem"}, "--ssl-certfile cannot be used with Ray"),
        ({"sleep-after": 5}, "--sleep-after cannot be used with Ray"),
        ({"models": [{**MODEL, "sleep_after": 5}]}, "sleep_after cannot be used with Ray"),
        ({"devise": "cpu"}, "'devise', which is no flag of a server; did you mean device?"),
        ({"models": [{**MODEL, "devise": "cpu"}]}, "'devise', which is no setting of a model"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        app_settings(config)
    assert words in caught.value.message


def test_the_application_has_a_deployment_for_each_model() -> None:
    application = build_app(
        {
            "models": [MODEL, {"model": "other/model"}],
            "device": "cuda",
            "drain": 9,
            "ray": {"gpu_share": 0.25, "cpus": 2, "min_replicas": 1, "max_replicas": 3},
        }
    )
    ingress = application._bound_deployment
    engines = {each._bound_deployment.name: each._bound_deployment for each in ingress.init_args[1:]}
    assert set(engines) == {"engine-m", "engine-other-model"}
    assert engines["engine-m"].ray_actor_options == {"num_cpus": 2, "num_gpus": 0.25}
    assert engines["engine-m"]._deployment_config.graceful_shutdown_timeout_s == 9
    assert engines["engine-m"]._deployment_config.autoscaling_config.max_replicas == 3


def test_the_ingress_imports_nothing_of_the_engine() -> None:
    code = "import sys, penstock.scale.serving.ingress\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ran.stdout.split()
    assert "penstock.scale.serving.ingress" in loaded
    assert [name for name in loaded if name == "torch" or name.startswith(ENGINE_PACKAGES)] == []


def test_a_plain_server_takes_the_same_file(tmp_path: Path) -> None:
    check_config({"models": [{**MODEL, "ray": {"cpus": 1}}], "ray": {"cpus": 2}}, tmp_path)


def test_another_number_of_replicas_restarts_none() -> None:
    def started_with(**ray: int) -> list[bytes]:
        application = build_app({"models": [MODEL, {"model": "other/model"}], "ray": ray})
        config, *engines = application._bound_deployment.init_args
        return [config, *(each._bound_deployment.init_args[0] for each in engines)]

    assert started_with(min_replicas=1) == started_with(min_replicas=2, max_replicas=5)


# --- the command --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ray", "--uds", "/tmp/socket"], "--uds cannot be used with Ray"),
        (["--ray", "--ray-replicas", "two"], "--ray-replicas is 'two'; use a number such as 2"),
        (["--ray-replicas", "2"], "--ray-replicas needs --ray"),
    ],
)
def test_the_command_refuses_flags_that_make_no_sense(arguments: list[str], words: str) -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(cli, ["serve", *arguments, "some/model"])
    assert result.exit_code == 2
    assert words in result.output + result.stderr


def test_without_ray_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_ray.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[scale\]'"):
        cli_ray.check_installed()


# --- data sent to replicas ----------------------------------------------------------------------------------


def test_a_request_crosses_with_its_arrays_and_its_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = request(deadline_s=time.monotonic() + 10)
    sent.client, sent.weight = "someone", 2.0
    frames = pack_work(sent, "attempt")
    here = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: here + 1e6)  # another machine has another clock
    found = unpack_work(frames)
    assert isinstance(found, Request)
    assert (found.id, found.params, found.client, found.weight) == ("attempt", sent.params, "someone", 2.0)
    np.testing.assert_array_equal(found.token_ids, sent.token_ids)
    np.testing.assert_array_equal(found.type_ids, sent.type_ids)
    assert found.deadline_s is not None and sent.deadline_s is not None
    assert found.deadline_s - found.arrival_s == pytest.approx(sent.deadline_s - sent.arrival_s)
    assert found.deadline_s - (here + 1e6) <= 10
    assert sent.id == "r"  # the caller's request is unchanged


def test_a_comparison_crosses_with_its_arrays() -> None:
    vectors = np.arange(6, dtype=np.float32).reshape(3, 2)
    sent = Comparison("c", vectors[:1], ints(1), vectors, ints(1, 2), ints(0, 0))
    found = unpack_work(pack_work(sent, "attempt"))
    assert isinstance(found, Comparison)
    np.testing.assert_array_equal(found.documents, vectors)


def test_frames_that_do_not_fit_are_refused() -> None:
    header, values = pack_work(request(), "attempt")
    with pytest.raises(BadValue, match="cannot read"):
        unpack_work([header, values[:-1]])


def test_token_ids_and_vectors_are_raw_bytes() -> None:
    _, values = pack_work(request(), "attempt")
    assert bytes(memoryview(values))[8:20] == ints(5, 6, 7).tobytes()
    large = PooledOutput("r", np.ones((300, 300), dtype=np.float16), Timings(0, 0), ())
    assert pack_results([large])[-1].nbytes == 300 * 300 * 2


@pytest.mark.parametrize("error", [QueueFull("full"), BadValue("bad", param="input"), ValueError("a bug")])
def test_an_error_of_a_replica_keeps_its_class(error: Exception) -> None:
    (found,) = unpack_results(pack_results([failure("r", error)]))
    assert isinstance(found, Failure)
    assert type(found.error) is (type(error) if isinstance(error, PenstockError) else EngineError)
    assert found.error.param == getattr(error, "param", None)


@on_loop
async def test_tokens_that_wait_leave_together() -> None:
    queue = TokenQueue("r", 1)
    queue.on_token(0, 3)
    queue.on_tokens([GeneratedTokens("r", 0, ints(4), "stop")])
    assert [part.token_ids.tolist() for part in await queue.take()] == [[3], [4]]  # type: ignore[union-attr]
    assert await queue.take() == []


# --- the engine handle --------------------------------------------------------------------------------------


class FakeDeployment:
    """A fake Ray handle: each call takes the next answer, an exception or a function of the request."""

    app_name = "app"

    def __init__(self, name: str, answers: list[Any]) -> None:
        self.deployment_name = name
        self.answers = answers
        self.names: list[str] = []

    def options(self, **options: Any) -> FakeDeployment:
        return self

    @property
    def hello(self) -> FakeDeployment:
        return self

    def remote(self, frames: Any = None, *, name: str, **others: Any) -> FakeResponse:
        self.names.append(name)
        return FakeResponse(self.answers.pop(0), frames)


class FakeResponse:
    def __init__(self, answer: Any, frames: Any) -> None:
        self.answer, self.frames = answer, frames
        self.is_cancelled = False

    def __await__(self) -> Any:
        return self._result().__await__()

    async def _result(self) -> Any:
        if self.answer == "never":
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return pack_results([self.answer(unpack_work(self.frames))])

    async def __aiter__(self) -> AsyncIterator[Any]:
        for each in self.answer:
            if isinstance(each, Exception):
                raise each
            yield pack_results([each])

    def cancel(self) -> None:
        self.is_cancelled = True


def engine_of(name: str, *answers: Any, ready: bool = True, wait_s: float = 60.0) -> RayEngineHandle:
    engine = RayEngineHandle(FakeDeployment(name, list(answers)), "m", "same", wait_s)  # type: ignore[arg-type]
    engine._loop = asyncio.get_running_loop()
    if ready:
        replica_table.replicas_of("app", name).running = {"1": {"fingerprint": "same", "revision": "v"}}
    return engine


def answered(work: Any) -> PooledOutput:
    return output(work.id)


LOST = ActorDiedError()


@on_loop
async def test_a_request_whose_replica_dies_runs_once_more() -> None:
    engine = engine_of("dies-once", LOST, answered)
    found = await engine.run(request("mine"))
    assert found.id == "mine"
    assert engine.num_retried == 1
    assert len(set(engine._handle.names)) == 2  # type: ignore[attr-defined]
    assert engine.stats().num_requests == 0


@on_loop
async def test_a_second_death_fails_the_request() -> None:
    engine = engine_of("dies-twice", LOST, LOST, answered)
    with pytest.raises(EngineUnavailable, match="stopped while this request was in flight") as caught:
        await engine.run(request())
    assert caught.value.status == 503


@on_loop
async def test_an_error_that_the_replica_answers_with_is_raised_and_not_retried() -> None:
    engine = engine_of("full", lambda work: Failure(work.id, QueueFull("no room")), answered)
    with pytest.raises(QueueFull, match="no room"):
        await engine.run(request())
    assert engine.num_retried == 0


@on_loop
async def test_before_a_replica_has_been_there_requests_get_a_reason_at_once() -> None:
    engine = engine_of("none", answered, ready=False)
    with pytest.raises(EngineUnavailable, match="no engine replica of m runs"):
        await engine.run(request())


@on_loop
async def test_a_request_that_no_replica_takes_fails_after_a_while() -> None:
    engine = engine_of("gone", "never", wait_s=0.01)
    assert engine.ready
    replica_table.replicas_of("app", "gone").running = {}
    with pytest.raises(EngineUnavailable, match=r"no engine replica of m runs.*waited 0.01 s"):
        await engine.run(request())


@on_loop
async def test_a_request_that_a_replica_has_taken_waits_on() -> None:
    engine = engine_of("slow", "never", wait_s=0.01)
    running = asyncio.create_task(engine.run(request()))
    await asyncio.sleep(0)
    (name,) = engine._handle.names  # type: ignore[attr-defined]
    replica_table.replicas_of("app", "slow").routed.add(name)
    done, _ = await asyncio.wait({running}, timeout=0.1)
    assert not done
    running.cancel()


@on_loop
async def test_replicas_of_another_model_are_not_used() -> None:
    engine = engine_of("replaced", answered)
    replica_table.replicas_of("app", "replaced").running = {"1": {"fingerprint": "other"}}
    assert not engine.ready
    assert "another model" in engine.unavailable_reason


@on_loop
async def test_the_revision_is_known_only_while_all_replicas_agree() -> None:
    engine = engine_of("revisions", answered)
    assert engine.revision == "v"
    replica_table.replicas_of("app", "revisions").running["2"] = {"fingerprint": "same", "revision": "w"}
    assert engine.revision == ""


def test_a_request_goes_where_the_fewest_tokens_are_in_flight() -> None:
    table = replica_table.Replicas()
    table.update({"a": {}, "b": {}, "c": {}})
    assert table.order({"a": 30, "b": 10, "c": 20}) == ["b", "c", "a"]


def test_a_query_goes_to_the_replica_that_has_it_until_that_is_too_busy() -> None:
    table = replica_table.Replicas()
    table.update({"a": {}, "b": {}})
    table.affinities["asked"] = Affinity([b"query"], 100)
    first, second = table.order({}, "asked")
    assert table.order({first: 100, second: 0}, "asked")[0] == first
    assert table.order({first: 101, second: 0}, "asked")[0] == second


def test_a_replica_that_is_gone_gets_nothing_and_the_others_keep_what_they_have() -> None:
    table = replica_table.Replicas()
    table.update({"a": {}, "b": {}, "c": {}})
    table.affinities["asked"] = Affinity([b"query"], 1000)
    home = table.order({}, "asked")[0]
    gone = next(name for name in "abc" if name != home)
    table.update({name: {} for name in ("a", "b", "c", "d") if name != gone})
    assert table.order({home: 5}, "asked")[0] == home
    assert sorted(table.order({})) == sorted({"a", "b", "c", "d"} - {gone})


class Listener:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: PenstockError | None = None
        self.ended = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self.ended.is_set()

    def on_token(self, row: int, token_id: int) -> None:
        self.tokens.append(token_id)

    def on_tokens(self, parts: list[GeneratedTokens]) -> None:
        for part in parts:
            assert part.id == "r"
            self.tokens += part.token_ids.tolist()
            if part.finish_reason is not None:
                self.ended.set()

    def on_error(self, error: PenstockError) -> None:
        self.error = error
        self.ended.set()


@on_loop
async def test_a_stream_without_a_token_begins_again_when_its_replica_dies() -> None:
    last = GeneratedTokens("x", 0, ints(4), "stop")
    engine = engine_of("stream", [LOST], [GeneratedTokens("x", 0, ints(3)), last])
    listener = Listener()
    engine.stream(request(), listener)
    await listener.ended.wait()
    assert (listener.tokens, listener.error) == ([3, 4], None)


@on_loop
async def test_a_stream_that_has_given_tokens_fails_when_its_replica_dies() -> None:
    engine = engine_of("broken-stream", [GeneratedTokens("x", 0, ints(3)), LOST])
    listener = Listener()
    engine.stream(request(), listener)
    await listener.ended.wait()
    assert listener.tokens == [3]
    assert isinstance(listener.error, EngineUnavailable)


# --- scaling ------------------------------------------------------------------------------------------------


class Context:
    capacity_adjusted_min_replicas, capacity_adjusted_max_replicas, target_num_replicas = 1, 4, 2

    def __init__(self, *queued: float) -> None:
        self.aggregated_metrics = {"queued_tokens": dict(enumerate(queued))}


@pytest.mark.parametrize(
    ("queued", "wanted"), [((0, 0), 1), ((900, 100), 1), ((1500, 600), 3), ((9999, 0), 4), ((), 2)]
)
def test_there_are_as_many_replicas_as_queued_tokens_ask_for(queued: tuple[float, ...], wanted: int) -> None:
    assert QueuedTokensPolicy(target_queued_tokens=1000)(Context(*queued))[0] == wanted

"""OpenTelemetry traces, as gRPC and HTTP collectors receive them."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api import tracing
from penstock.api.app import build_app
from penstock.api.tracing import GRPC, HTTP, Tracer, check_endpoint, protocol_of, tracer_for
from penstock.config import ServerConfig
from penstock.errors import ConfigError, EngineUnavailable
from penstock.inputs.tokenizer import Tokenizer
from tests.api.collectors import Collector, attributes, grpc_collector, http_collector
from tests.api.local_app import local_app
from tests.api.scripted_app import make_state
from tests.checkpoints import write_bert
from tests.text_models import ScriptedEngine, continue_with, write_text_model
from tests.waiting import PATIENCE_S

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "water that nobody may read"
needs_otel = pytest.mark.skipif(not tracing.is_installed(), reason="the extra otel is not installed")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove OpenTelemetry variables of the machine that runs the tests."""
    for name in ("EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_PROTOCOL", "SERVICE_NAME", "TRACES_SAMPLER"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server wait until its last spans are sent, however busy the machine is."""
    monkeypatch.setattr(tracing, "MAX_CLOSE_S", PATIENCE_S)


@pytest.fixture
def collector(no_haste: None) -> Iterator[Collector]:
    with grpc_collector() as running:
        yield running


def embed(folder: Path, server: dict[str, Any], *headers: dict[str, str], texts: Any = SECRET) -> None:
    """Serve one embedding request per set of headers. All spans are sent when this returns."""
    with local_app(folder, server=server) as (http, _):
        for each in headers or ({},):
            http.post("/v1/embeddings", json={"input": texts}, headers=each)


@needs_otel
@pytest.mark.parametrize(("start", "protocol"), [(grpc_collector, GRPC), (http_collector, HTTP)])
def test_an_embedding_is_a_server_span_with_its_phases_below(
    folder: Path,
    start: Callable[[], AbstractContextManager[Collector]],
    protocol: str,
    no_haste: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    with start() as collector:
        embed(folder, {"otlp_endpoint": collector.url, "otlp_service_name": "search"}, texts=[SECRET, "b"])
    root = collector.named("POST /v1/embeddings")
    phases = [collector.named(name) for name in ("tokenize", "queue", "step", "encode")]
    assert len(collector.spans) == 5 and root.parent_span_id == b""
    for before, after in itertools.pairwise(phases):
        assert before.end_time_unix_nano <= after.start_time_unix_nano
    for phase in phases:
        assert phase.parent_span_id == root.span_id and phase.trace_id == root.trace_id
        assert root.start_time_unix_nano <= phase.start_time_unix_nano <= phase.end_time_unix_nano
        assert phase.end_time_unix_nano <= root.end_time_unix_nano
    step = phases[2]
    device_ns = attributes(step)["penstock.device_seconds"] * 1e9
    assert 0 < device_ns <= step.end_time_unix_nano - step.start_time_unix_nano
    shown = attributes(root)
    assert shown["http.request.method"] == "POST" and shown["http.route"] == "/v1/embeddings"
    assert shown["http.response.status_code"] == 200 and shown["penstock.rows"] == 2
    assert shown["gen_ai.request.model"] == "model" and shown["gen_ai.operation.name"] == "embeddings"
    assert shown["gen_ai.usage.input_tokens"] > 2
    assert collector.resources[0]["service.name"] == "search"
    assert collector.headers[0]["x-tenant"] == "blue"
    assert SECRET not in str(collector.spans)


@needs_otel
def test_a_trace_of_the_client_is_continued_and_its_sampling_honoured(
    folder: Path, collector: Collector
) -> None:
    sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    unsampled = {"traceparent": f"00-{'a' * 32}-{PARENT}-00"}
    broken = {"traceparent": "nonsense"}
    embed(folder, {"otlp_endpoint": collector.url}, sampled, unsampled, broken)
    roots = [span for span in collector.spans if span.name == "POST /v1/embeddings"]
    assert len(roots) == 2
    continued, own = roots
    assert continued.trace_id.hex() == TRACE and continued.parent_span_id.hex() == PARENT
    assert continued.trace_state == "vendor=1"
    assert own.trace_id.hex() not in (TRACE, "a" * 32) and own.parent_span_id == b""


@needs_otel
def test_requests_that_the_client_gets_wrong_are_no_errors_of_the_server(
    folder: Path, collector: Collector
) -> None:
    with local_app(folder, server={"otlp_endpoint": collector.url}) as (http, _):
        http.post("/v1/embeddings", json={"input": [SECRET], "model": "other"})
        http.get("/health")
    (span,) = collector.spans
    assert attributes(span)["http.response.status_code"] == 404
    assert attributes(span)["error.type"] == "model_not_found" and span.status.code == 0


@needs_otel
def test_an_engine_that_fails_sets_the_status_of_the_span(
    folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_app(folder, server={"otlp_endpoint": collector.url}) as (http, local):

        async def fail(request: Any) -> None:
            raise EngineUnavailable(SECRET)

        monkeypatch.setattr(local, "run", fail)
        http.post("/v1/embeddings", json={"input": "a"})
    span = collector.named("POST /v1/embeddings")
    assert span.status.code == 2 and span.status.message == EngineUnavailable.code
    assert [each.name for each in collector.spans if each is not span] == ["tokenize"]
    assert SECRET not in str(collector.spans)


@needs_otel
@pytest.mark.parametrize("streams", [True, False])
def test_a_generation_has_its_first_token_and_ends_with_its_stream(
    tmp_path: Path, collector: Collector, streams: bool
) -> None:
    folder = write_text_model(tmp_path)
    engine = ScriptedEngine(continue_with(Tokenizer(folder), "the water was long"))
    state = make_state(folder, engine, {"otlp_endpoint": collector.url})
    body = {"prompt": SECRET, "max_tokens": 4, "stream": streams}
    with TestClient(build_app(state)) as http:
        assert http.post("/v1/completions", json=body).status_code == 200
    root = collector.named("POST /v1/completions")
    (event,) = root.events
    assert event.name == "first_token"
    assert root.start_time_unix_nano < event.time_unix_nano < root.end_time_unix_nano
    assert attributes(root)["gen_ai.usage.output_tokens"] >= 1
    assert attributes(root)["gen_ai.operation.name"] == "text_completion"
    names = {span.name for span in collector.spans}
    assert names >= {"tokenize"} and names & {"decode", "generate"}
    assert all(span.end_time_unix_nano <= root.end_time_unix_nano for span in collector.spans)


@needs_otel
def test_the_environment_alone_turns_traces_on(
    folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-environment")
    embed(folder, {})
    assert collector.named("POST /v1/embeddings")
    assert collector.resources[0]["service.name"] == "from-environment"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracer_for(ServerConfig()) is None


@needs_otel
def test_a_sampler_of_the_environment_decides(
    folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    embed(folder, {"otlp_endpoint": collector.url})
    assert collector.spans == []


@needs_otel
def test_a_collector_that_never_answers_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "MAX_CLOSE_S", 0.01)
    released = threading.Event()

    class Silent:
        def export(self, spans: Any) -> None:
            released.wait()

        def shutdown(self) -> None:
            released.set()

    tracer = Tracer(Silent())
    scope = {"method": "POST", "path": "/x", "headers": []}
    tracer.begin(scope, "/x", 1.0)._span.end()
    tracer.close()
    assert "the last spans are lost" in caplog.text
    assert released.wait(PATIENCE_S)  # the export was abandoned


@needs_otel
def test_requests_succeed_without_a_trace_collector(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_CLOSE_S", 0.01)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with local_app(folder, server={"otlp_endpoint": url}) as (http, _):
            assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MODULES", ("no_such_package.trace",))
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk"):
        check_endpoint("http://127.0.0.1:4317")


def test_without_the_extra_a_variable_of_the_machine_is_an_error_in_the_log_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_MODULES", ("no_such_package.trace",))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert tracer_for(ServerConfig()) is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT needs OpenTelemetry" in caplog.text


@pytest.mark.parametrize("url", ["collector:4317", "http://", "ftp://collector", "http://collector:x"])
def test_an_endpoint_must_be_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match="use a URL such as"):
        check_endpoint(url)


@pytest.mark.parametrize(
    ("url", "protocol"),
    [
        ("http://collector:4317", GRPC),
        ("grpc://collector:4317", GRPC),
        ("http://collector:4318", HTTP),
        ("http://collector/v1/traces", HTTP),
    ],
)
def test_the_protocol_follows_from_the_url_unless_a_variable_names_it(url: str, protocol: str) -> None:
    assert protocol_of(url, {}) == protocol
    assert protocol_of(url, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}) == GRPC
    with pytest.raises(ConfigError, match="use grpc or http/protobuf"):
        protocol_of(url, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})

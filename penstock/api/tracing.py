"""OpenTelemetry traces: one server span for a request, and a span for each of its phases.

An engine runs in another process and exports nothing. It reports when it launched a request, on the monotonic
clock that all processes of a machine share, so the API process can compute every phase. Spans contain no
inputs and no keys. A thread exports them in batches, so a collector that does not answer delays no request.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
import urllib.parse
from collections.abc import Mapping
from threading import Thread
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from penstock import __version__
from penstock.config import ServerConfig
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.api.call import Call

log = logging.getLogger("penstock.api")
GRPC, HTTP = "grpc", "http/protobuf"
HTTP_PORT = 4318  # where collectors take OTLP over HTTP
TRACES_PATH = "/v1/traces"
MAX_CLOSE_S = 2.0  # to export the last spans when the server stops
MAX_PATH_CHARS = 256
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
_MODULES = (
    "opentelemetry.sdk.trace",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
_INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp (the extra `otel`)"
_OPERATIONS = {  # names of the semantic conventions, by a word in the route
    "embed": "embeddings",
    "chat": "chat",
    "completions": "text_completion",
    "generate": "text_completion",
}
Phase = tuple[str, float, float, dict[str, Any]]  # name, begin and end on the monotonic clock, attributes


def is_installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in _MODULES)
    except ModuleNotFoundError:  # a parent package is missing
        return False


def check_endpoint(url: str, flag: str = "--otlp-endpoint") -> str:
    """Return the URL of a collector if traces can be sent there; raise otherwise."""
    parts = urllib.parse.urlsplit(url)
    try:
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_place = False
    if parts.scheme not in ("http", "https", "grpc") or not has_place:
        raise ConfigError(
            f"{flag} is {url!r}; use a URL such as http://127.0.0.1:4317", param="otlp_endpoint"
        )
    if not is_installed():
        raise ConfigError(
            f"{flag} needs OpenTelemetry, which is not installed: {_INSTALL}", param="otlp_endpoint"
        )
    protocol_of(url, os.environ)
    return url


def protocol_of(url: str, environment: Mapping[str, str]) -> str:
    """The protocol for spans. By default HTTP if the URL has its usual port or a path, otherwise gRPC."""
    for name in _PROTOCOLS:
        if given := environment.get(name):
            if given not in (GRPC, HTTP):
                raise ConfigError(f"{name} is {given!r}; use {GRPC} or {HTTP}")
            return given
    parts = urllib.parse.urlsplit(url)
    return HTTP if parts.port == HTTP_PORT or parts.path.strip("/") else GRPC


def tracer_for(config: ServerConfig) -> Tracer | None:
    """The tracer of the configuration or the environment; None: requests are not traced."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if (url := config.otlp_endpoint) is not None:
        return Tracer(exporter(url, is_base=not urllib.parse.urlsplit(url).path), config.otlp_service_name)
    variable = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if variable is None or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return None
    try:
        url = check_endpoint(os.environ[variable], variable)
    except ConfigError as error:  # it may be set for all programs of a machine: start without traces
        log.error("no traces are sent: %s", error.message)
        return None
    return Tracer(exporter(url, is_base=variable != _ENDPOINTS[0]), config.otlp_service_name)


def exporter(url: str, *, is_base: bool) -> Any:
    """The exporter of spans to a collector. With `is_base`, the path of traces is added to an HTTP URL."""
    if protocol_of(url, os.environ) == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=url.replace("grpc://", "http://", 1))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=url.rstrip("/") + TRACES_PATH if is_base else url)


class Tracer:
    """Makes the spans of requests and hands them to an exporter. Samples as OTEL_TRACES_SAMPLER says."""

    def __init__(self, exporter: Any, service_name: str | None = None) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._exporter = exporter
        self._provider = TracerProvider(
            resource=Resource.create(_resource(service_name)), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penstock", __version__)
        self._extract = TraceContextTextMapPropagator().extract
        self._kind = trace.SpanKind.SERVER
        self.in_span = trace.set_span_in_context

    def begin(self, scope: Scope, route: str, began_s: float) -> RequestTrace:
        """Begin the server span of a request, below the span that its `traceparent` names."""
        parent = None
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _CONTEXT_HEADERS
        }
        if carrier:
            parent = self._extract(carrier)
        offset_ns = time.time_ns() - time.monotonic_ns()
        attributes = {
            "http.request.method": scope["method"],
            "http.route": route,
            "url.path": scope["path"][:MAX_PATH_CHARS],
            "url.scheme": scope.get("scheme", "http"),
            "network.protocol.version": scope.get("http_version", "1.1"),
        }
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            context=parent,
            kind=self._kind,
            attributes=attributes,
            start_time=_to_ns(began_s, offset_ns),
        )
        return RequestTrace(self, span, route, offset_ns)

    def phase(self, parent: Any, phase: Phase, offset_ns: int) -> None:
        name, begin_s, end_s, attributes = phase
        span = self._tracer.start_span(
            name, context=parent, attributes=attributes, start_time=_to_ns(begin_s, offset_ns)
        )
        span.end(_to_ns(max(begin_s, end_s), offset_ns))

    def close(self) -> None:
        """Export the remaining spans, within `MAX_CLOSE_S`."""
        closing = Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(MAX_CLOSE_S)
        if closing.is_alive():
            log.warning("the collector of traces does not answer; the last spans are lost")
            Thread(target=self._exporter.shutdown, daemon=True).start()  # ends the running export


class RequestTrace:
    """The server span of one request, and its phases so far. All times are on the monotonic clock."""

    __slots__ = (
        "_first_token_s",
        "_offset_ns",
        "_phases",
        "_ready_s",
        "_route",
        "_span",
        "_tracer",
        "trace_id",
    )

    def __init__(self, tracer: Tracer, span: Any, route: str, offset_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._route = route
        self._offset_ns = offset_ns
        self._phases: list[Phase] = []
        self._ready_s = 0.0  # when the latest tokens were handed to the engine
        self._first_token_s: float | None = None
        self.trace_id = format(span.get_span_context().trace_id, "032x")

    def tokenized(self, began_s: float, seconds: float) -> None:
        self._ready_s = began_s + seconds
        self._phases.append(("tokenize", began_s, self._ready_s, {}))

    def stepped(self, launched_s: float, device_s: float) -> None:
        """Record the queue and the steps of an answered request. Its first step was launched at `launched_s`.

        Without an engine, such as for a cached result, `launched_s` is before the tokens were ready, and
        nothing is recorded.
        """
        if device_s == 0.0 and launched_s < self._ready_s:
            return
        launched_s = max(launched_s, self._ready_s)
        self._phases.append(("queue", self._ready_s, launched_s, {}))
        attributes = {"penstock.device_seconds": device_s}
        self._phases.append(("step", launched_s, time.monotonic(), attributes))

    def first_token(self, now_s: float) -> None:
        self._first_token_s = now_s

    def generated(self, launched_s: float | None, device_s: float) -> None:
        """Record the phases of a generation that has ended. `launched_s` may be None if it failed."""
        now_s = time.monotonic()
        attributes = {"penstock.device_seconds": device_s}
        if launched_s is None or self._first_token_s is None:
            self._phases.append(("generate", self._ready_s, now_s, attributes))
            return
        launched_s = min(max(launched_s, self._ready_s), self._first_token_s)
        self._phases.append(("queue", self._ready_s, launched_s, {}))
        self._phases.append(("prefill", launched_s, self._first_token_s, {}))
        self._phases.append(("decode", self._first_token_s, now_s, attributes))

    def encoded(self, began_s: float, seconds: float) -> None:
        self._phases.append(("encode", began_s, began_s + seconds, {}))

    def end(self, call: Call) -> None:
        """Create the spans of the phases, then end the server span with the attributes of the request."""
        span = self._span
        if not span.is_recording():
            return
        now_s = time.monotonic()
        context = self._tracer.in_span(span)
        for phase in self._phases:
            self._tracer.phase(context, phase, self._offset_ns)
        if self._first_token_s is not None:
            span.add_event("first_token", timestamp=_to_ns(self._first_token_s, self._offset_ns))
        span.set_attributes(_attributes(call, self._route))
        if call.error_code and (call.status >= 500 or call.is_streamed):
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, call.error_code))
        span.end(_to_ns(now_s, self._offset_ns))


def _attributes(call: Call, route: str) -> dict[str, Any]:
    out: dict[str, Any] = {
        "http.response.status_code": 200 if call.is_streamed else call.status,
        "penstock.rows": call.num_rows,
        "gen_ai.usage.input_tokens": call.num_tokens,
    }
    if call.model_name:
        out["gen_ai.request.model"] = out["gen_ai.response.model"] = call.model_name
        out["gen_ai.provider.name"] = "penstock"
    if operation := next((name for word, name in _OPERATIONS.items() if word in route), None):
        out["gen_ai.operation.name"] = operation
    if call.num_generated:
        out["gen_ai.usage.output_tokens"] = call.num_generated
    if call.error_code:
        out["error.type"] = call.error_code
    if call.request_id is not None:
        out["penstock.request_id"] = call.request_id
    return out


def _resource(service_name: str | None) -> dict[str, str | int]:
    out: dict[str, str | int] = {"service.version": __version__, "process.pid": os.getpid()}
    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    if service_name is not None or not is_named:
        out["service.name"] = service_name or "penstock"
    return out


def _to_ns(monotonic_s: float, offset_ns: int) -> int:
    return int(monotonic_s * 1e9) + offset_ns

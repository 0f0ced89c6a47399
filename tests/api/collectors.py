"""Fake OpenTelemetry collectors, over gRPC and over HTTP, that record the spans they receive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from tests.waiting import PATIENCE_S


@dataclass
class Collector:
    url: str
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)  # request headers of each export

    def take(self, request: Any) -> None:
        for resource_spans in request.resource_spans:
            self.resources.append(attributes(resource_spans.resource))
            for scope_spans in resource_spans.scope_spans:
                self.spans += scope_spans.spans

    def named(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found


def attributes(owner: Any) -> dict[str, Any]:
    """Attributes of a span or a resource, by name."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in owner.attributes}


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.headers.append(dict(context.invocation_metadata()))
            collector.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    collector = Collector(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait(PATIENCE_S)


@contextmanager
def http_collector() -> Iterator[Collector]:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join(PATIENCE_S)
        server.server_close()

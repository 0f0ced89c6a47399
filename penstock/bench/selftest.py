"""`penstock bench serve --self-test`: the same requests against a server that computes nothing.

The result is the load client's ceiling on this machine. If a real server's figures are near that ceiling,
they measure the client instead of the server.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from penstock.bench.backends import Backend
from penstock.bench.console import print_note, print_result
from penstock.bench.datasets.item import Item
from penstock.bench.load.fleet import default_processes
from penstock.bench.nullserver import null_server
from penstock.bench.options import (
    BackendName,
    BodyOptions,
    DataOptions,
    ReportOptions,
    ServerOptions,
    TrafficOptions,
)
from penstock.bench.prepare import Prepared, prepare
from penstock.bench.report.table import row, table
from penstock.bench.run import Run, run_once, traffic_of, warnings_for
from penstock.bench.target import target_of
from penstock.config import available_cpus

_DIMENSIONS = 384
_SECONDS = 3.0
_CONCURRENCY = 64


def self_test(
    server: ServerOptions,
    data: DataOptions,
    traffic: TrafficOptions,
    body: BodyOptions,
    report: ReportOptions,
) -> int:
    """Measure and print; return the exit code."""
    named = msgspec.structs.replace(server, model=server.model or _placeholder_model(server))
    load = prepare(named, data, body, asks_server=False)
    settled = traffic_of(traffic, data.seed)
    if not settled.is_scheduled and settled.duration_s is None:
        settled = msgspec.structs.replace(settled, duration_s=_SECONDS)
    if not settled.is_scheduled and settled.max_concurrency is None:
        settled = msgspec.structs.replace(settled, max_concurrency=_CONCURRENCY)
    processes = traffic.num_processes or default_processes()
    with null_server(null_body(load.name, load.backend, load.items[0]), processes) as port:
        address = msgspec.structs.replace(server, base_url=f"http://127.0.0.1:{port}")
        report = msgspec.structs.replace(report, metric_percentiles="50,99")
        run = run_once(_with_target(load, address), settled, processes, report)
    print_result(
        table(run.summary, run.traffic, ["e2el"], [50, 99], load.backend.generates, "Load Client Self-Test")
    )
    for line in ceiling(run):
        print_result(line)
    for line in warnings_for(run, report):
        print_note(line)
    return run.exit_code


def ceiling(run: Run) -> list[str]:
    summary, cpus = run.summary, available_cpus()
    with_server, per_core = "Ceiling beside a null server", "Ceiling for a core of the client"
    lines = [
        row(f"{with_server} (req/s)", round(summary.request_throughput)),
        row(f"{per_core} (req/s)", round(summary.completed / summary.client.cpu_s))
        + f" ({summary.client.processes} processes, {cpus} cores)",
    ]
    if run.load.backend.generates:
        lines.append(row(f"{with_server} (tok/s)", round(summary.output_throughput)))
        tokens = round(summary.total_output_tokens / summary.client.cpu_s)
        lines.append(row(f"{per_core} (tok/s)", tokens))
    return lines


def null_body(name: BackendName, backend: Backend, item: Item) -> list[bytes]:
    """A response with made-up numbers in the format of this backend, in the pieces that it would send."""
    usage = {"prompt_tokens": item.tokens or 1, "total_tokens": item.tokens or 1}
    vector = [round(0.05 + i / 10_000, 7) for i in range(_DIMENSIONS)]
    scores = [{"index": i, "relevance_score": 0.5} for i in range(item.rows)]
    if backend.generates:
        return _stream(item.output_tokens, usage)
    return [orjson.dumps(_answer(name, item, vector, scores, usage))]


def _answer(
    name: BackendName, item: Item, vector: list[float], scores: list[dict[str, Any]], usage: dict[str, int]
) -> Any:
    match name:
        case BackendName.TEI if item.query is not None:
            return [{"index": i, "score": 0.5} for i in range(item.rows)]
        case BackendName.TEI:
            return [vector] * item.rows
        case BackendName.TEI_PREDICT:
            return [[{"score": 0.5, "label": "null"}]] * item.rows
        case BackendName.COHERE_EMBED:
            return {"id": "null", "embeddings": {"float": [vector] * item.rows}, "meta": usage}
        case BackendName.OLLAMA_EMBED:
            return {"embeddings": [vector] * item.rows, "prompt_eval_count": usage["prompt_tokens"]}
        case BackendName.VLLM_SCORE:
            return {"data": [{"index": i, "score": 0.5} for i in range(item.rows)], "usage": usage}
        case _ if item.query is not None:
            return {"id": "null", "results": scores, "usage": usage}
    data = [{"object": "embedding", "index": i, "embedding": vector} for i in range(item.rows)]
    return {"object": "list", "data": data, "usage": usage}


def _stream(tokens: int, usage: dict[str, int]) -> list[bytes]:
    token = b'data: {"choices":[{"index":0,"text":" a","delta":{"content":" a"}}]}\n\n'
    last = orjson.dumps({"choices": [], "usage": usage | {"completion_tokens": tokens}})
    return [*[token] * tokens, b"data: " + last + b"\n\ndata: [DONE]\n\n"]


def _placeholder_model(server: ServerOptions) -> str:
    """A model name that needs no server: the tokenizer's, or the default model's."""
    from penstock.checkpoint.find import DEFAULT_NAME

    return server.tokenizer or DEFAULT_NAME


def _with_target(load: Prepared, server: ServerOptions) -> Prepared:
    load.target = target_of(server)
    return load

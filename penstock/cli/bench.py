"""`penstock bench`: benchmarks of servers, offline speed, kernels and quality.

Each command imports its benchmark when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import (
    DEFAULT_BATCH_SIZE,
    BodyOptions,
    ClientOptions,
    CompareOptions,
    DataOptions,
    EmbedderName,
    EngineOptions,
    QualityOptions,
    ReportOptions,
    ServerOptions,
    TextOptions,
    TrafficOptions,
    one_of,
)
from penstock.cli.command import MultiValueCommand, with_options
from penstock.cli.flags import ENGINE, EngineFields
from penstock.config import EngineConfig, from_mapping
from penstock.errors import BadValue

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure servers, the engine, kernels and quality.",
)


@app.command(cls=MultiValueCommand)
@with_options(ServerOptions, DataOptions, TrafficOptions, BodyOptions, ReportOptions)
def serve(
    server: ServerOptions,
    data: DataOptions,
    traffic: TrafficOptions,
    body: BodyOptions,
    report: ReportOptions,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="concurrency|rate[=N,…]",
            help="Measure rising loads and find the knee, such as concurrency=1,8,64.",
        ),
    ] = None,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test", help="Measure the load client itself, against a server that computes nothing."
        ),
    ] = False,
) -> None:
    """Measure throughput and latency of a running server."""
    from penstock.bench.selftest import self_test as test_client
    from penstock.bench.serve import bench_serve, bench_sweep

    if self_test and sweep is not None:
        raise BadValue("--self-test and --sweep exclude each other")
    if self_test:
        raise typer.Exit(test_client(server, data, traffic, body, report))
    if sweep is not None:
        raise typer.Exit(bench_sweep(server, data, traffic, body, report, sweep))
    raise typer.Exit(bench_serve(server, data, traffic, body, report))


@app.command(cls=MultiValueCommand)
@with_options(ClientOptions, DataOptions, TrafficOptions, BodyOptions, ReportOptions, CompareOptions)
def compare(
    client: ClientOptions,
    data: DataOptions,
    traffic: TrafficOptions,
    body: BodyOptions,
    report: ReportOptions,
    servers: CompareOptions,
) -> None:
    """Measure several servers in turn and compare them.

    Prints the ratio to the first server, and its spread over the rounds.
    """
    from penstock.bench.compare import bench_compare

    raise typer.Exit(bench_compare(client, data, traffic, body, report, servers))


Backends = Annotated[
    list[EmbedderName],
    typer.Option(
        "--backend",
        metavar="NAME",
        help=f"Engine to measure; give several to measure them in turn. {one_of(EmbedderName)}",
    ),
]
BatchSize = Annotated[
    int, typer.Option(min=1, help="Texts in a batch, for engines that do not form batches themselves.")
]
OutputJson = Annotated[str | None, typer.Option(help="File to write the figures into, as JSON.")]


def _options(engine: EngineFields, batch_size: int) -> EngineOptions:
    return EngineOptions(config=from_mapping(EngineConfig, engine), batch_size=batch_size)


@app.command(cls=MultiValueCommand)
@with_options(ENGINE, TextOptions)
def throughput(
    engine: EngineFields,
    texts: TextOptions,
    backend: Backends = [EmbedderName.PENSTOCK],  # noqa: B006
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of times that each engine is measured, in turn.")
    ] = 3,
    num_warmups: Annotated[int, typer.Option(min=1, help="Texts to embed before the measurement.")] = 64,
    output_json: OutputJson = None,
) -> None:
    """Measure texts and tokens a second of offline embedding.

    Flags other than --model, --device, --dtype, --quantization and --threads apply to Penstock alone.
    """
    from penstock.bench.offline.speed import bench_throughput

    raise typer.Exit(
        bench_throughput(backend, _options(engine, batch_size), texts, rounds, num_warmups, output_json)
    )


@app.command(cls=MultiValueCommand)
@with_options(ENGINE)
def latency(
    engine: EngineFields,
    backend: Backends = [EmbedderName.PENSTOCK],  # noqa: B006
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens in a text.")] = 32,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Iterations before the measurement.")] = 10,
    num_iters: Annotated[int, typer.Option(min=1, help="Iterations to measure.")] = 30,
    output_json: OutputJson = None,
) -> None:
    """Measure the latency of one batch of offline embedding.

    Flags other than --model, --device, --dtype, --quantization and --threads apply to Penstock alone.
    """
    from penstock.bench.offline.speed import bench_latency

    raise typer.Exit(
        bench_latency(
            backend, _options(engine, batch_size), input_len, num_iters_warmup, num_iters, output_json
        )
    )


@app.command(cls=MultiValueCommand)
@with_options(ENGINE, QualityOptions)
def quality(
    engine: EngineFields,
    options: QualityOptions,
    backend: Annotated[
        EmbedderName,
        typer.Option(
            metavar="NAME",
            help=f"Engine to evaluate, unless --base-url names a server. {one_of(EmbedderName)}",
        ),
    ] = EmbedderName.PENSTOCK,
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
) -> None:
    """Evaluate vectors and rankings.

    Prints cosine to a reference, Spearman correlation on pairs, nDCG@10, MRR and recall.
    """
    from penstock.bench.quality.run import bench_quality

    raise typer.Exit(bench_quality(backend, _options(engine, batch_size), options))


@app.command(cls=MultiValueCommand)
def kernels(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    only: Annotated[list[str], typer.Option("--only", help="Kernel to measure. Default: all.")] = [],  # noqa: B006
    min_time: Annotated[float, typer.Option(min=0.0, help="Seconds to measure each kernel for.")] = 0.2,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    output_json: OutputJson = None,
) -> None:
    """Measure each kernel.

    Compares it with its reference and with the limit of this device.
    """
    from penstock.bench.kernels.run import bench_kernels

    raise typer.Exit(bench_kernels(device, dtype, only, min_time, threads, output_json))

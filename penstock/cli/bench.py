"""`penstock bench`: load on a server, offline speed, kernels, quality. Each part is imported when it runs."""

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
    help="Measure servers, the engine, its kernels, and the quality of results.",
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
        typer.Option(metavar="concurrency|rate[=N,…]", help="Measure rising loads; find the knee."),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Measure the load client itself, against a null server.")
    ] = False,
) -> None:
    """Send a load to a running server and report throughput and latency."""
    from penstock.bench.selftest import self_test as test_client
    from penstock.bench.serve import bench_serve, bench_sweep

    if self_test and sweep is not None:
        raise BadValue("--self-test and --sweep do not go together")
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
    """Send the same load to several servers in turn and print ratios with their spread."""
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
OutputJson = Annotated[str | None, typer.Option(help="Write the figures of every round here.")]


def _options(engine: EngineFields, batch_size: int) -> EngineOptions:
    return EngineOptions(config=from_mapping(EngineConfig, engine), batch_size=batch_size)


@app.command(cls=MultiValueCommand)
@with_options(ENGINE, TextOptions)
def throughput(
    engine: EngineFields,
    texts: TextOptions,
    backend: Backends = [EmbedderName.PENSTOCK],  # noqa: B006
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    rounds: Annotated[int, typer.Option(min=1, help="How often each engine takes its turn.")] = 3,
    num_warmups: Annotated[int, typer.Option(min=1, help="Texts before the clock starts.")] = 64,
    output_json: OutputJson = None,
) -> None:
    """Embed a set of texts offline, in one call, and print texts and tokens a second."""
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
    input_len: Annotated[int, typer.Option(min=1, help="Tokens a text.")] = 32,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Iterations before the clock starts.")] = 10,
    num_iters: Annotated[int, typer.Option(min=1, help="Iterations.")] = 30,
    output_json: OutputJson = None,
) -> None:
    """Embed one batch offline, over and over, and print how long it takes."""
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
    """Judge vectors and rankings: cosine to a reference, Spearman on pairs, nDCG@10, MRR and recall."""
    from penstock.bench.quality.run import bench_quality

    raise typer.Exit(bench_quality(backend, _options(engine, batch_size), options))


@app.command(cls=MultiValueCommand)
def kernels(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    only: Annotated[list[str], typer.Option("--only", help="Only these kernels.")] = [],  # noqa: B006
    min_time: Annotated[float, typer.Option(min=0.0, help="Seconds to measure each for.")] = 0.2,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    output_json: OutputJson = None,
) -> None:
    """Measure each kernel against its reference and against the floor of this device."""
    from penstock.bench.kernels.run import bench_kernels

    raise typer.Exit(bench_kernels(device, dtype, only, min_time, threads, output_json))

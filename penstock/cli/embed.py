"""`penstock embed`: embeds a file of texts into a file of vectors. `penstock.jobs` does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from penstock.cli.adapter_flag import AdapterFlag
from penstock.cli.command import with_options
from penstock.cli.flags import ENGINE, EngineFields
from penstock.cli.vector_flags import VectorFlags
from penstock.errors import BadValue
from penstock.jobs.formats import InputFormat, OnError, OutputFormat, VectorKind

if TYPE_CHECKING:
    from penstock.jobs.job import Job, Sink


_ROWS, _RUN, _RAY = "Rows", "Run", "Ray"
_BY_EXTENSION = "by the file's extension"


class EmbedOptions(msgspec.Struct, frozen=True, kw_only=True):
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="Files, folders, patterns or URIs to read; or - for stdin, which needs --format.",
        ),
    ]
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write, such as vectors.parquet, vectors.jsonl or vectors.lance; "
            "or a folder or URI that ends with /, for one file a block. With --to: the folder that keeps the "
            "progress.",
        ),
    ] = None
    to: Annotated[
        str | None,
        typer.Option(
            metavar="STORE",
            help="Vector store to write into: lancedb:PATH/TABLE, qdrant:URL/COLLECTION, "
            "pgvector:postgresql://…?table=TABLE or opensearch:URL/INDEX.",
        ),
    ] = None
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="Write into a collection without a stamp. You vouch that its vectors are of this model and "
            "these settings.",
        ),
    ] = False
    input_format: Annotated[
        InputFormat | None,
        typer.Option("--format", help="Format of INPUT.", show_default=_BY_EXTENSION, rich_help_panel=_ROWS),
    ] = None
    output_format: Annotated[
        OutputFormat | None,
        typer.Option(help="Format of the output.", show_default=_BY_EXTENSION, rich_help_panel=_ROWS),
    ] = None
    column: Annotated[
        str | None,
        typer.Option(
            help="Column that holds the texts.",
            show_default="text, or the only column with text",
            rich_help_panel=_ROWS,
        ),
    ] = None
    id_column: Annotated[
        str | None,
        typer.Option(
            help="Column that identifies the rows in the output.",
            show_default="the row number, as id",
            rich_help_panel=_ROWS,
        ),
    ] = None
    keep: Annotated[
        list[str],
        typer.Option(
            help="Column to copy to the output. Repeat the flag for more columns.", rich_help_panel=_ROWS
        ),
    ] = []
    limit: Annotated[
        int | None, typer.Option(min=1, help="Stop after this number of rows.", rich_help_panel=_ROWS)
    ] = None
    on_error: Annotated[
        OnError,
        typer.Option(
            help="What to do with a row that has no text or cannot be read: stop, or skip it and list it in "
            "OUT.errors.jsonl.",
            rich_help_panel=_RUN,
        ),
    ] = OnError.FAIL
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue where a run with the same flags stopped.", rich_help_panel=_RUN
        ),
    ] = False
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace the output, and delete unfinished parts.", rich_help_panel=_RUN
        ),
    ] = False
    batch_rows: Annotated[
        int,
        typer.Option(min=1, help="Rows to read, compute and save together.", rich_help_panel=_RUN),
    ] = 2048
    pdf_dpi: Annotated[
        int,
        typer.Option(
            min=18,
            max=1200,
            help="Dots per inch at which pages of PDF files are read.",
            rich_help_panel=_ROWS,
        ),
    ] = 150


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job runs."""

    ray: Annotated[
        bool, typer.Option("--ray", help="Run on a Ray cluster, with several engines.", rich_help_panel=_RAY)
    ] = False
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Address of the cluster: auto on one of its machines, or host:6379.",
            show_default="RAY_ADDRESS, or a cluster on this machine for this run",
            rich_help_panel=_RAY,
        ),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of engines.", show_default="one a GPU, or one a node", rich_help_panel=_RAY
        ),
    ] = None
    gpus_per_worker: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="GPUs of an engine; 0.5 lets two share one.",
            show_default="1 if the cluster has GPUs",
            rich_help_panel=_RAY,
        ),
    ] = None


@with_options(EmbedOptions, VectorFlags, AdapterFlag, RayOptions, ENGINE)
def embed(
    options: EmbedOptions, vectors: VectorFlags, adapter: AdapterFlag, ray: RayOptions, engine: EngineFields
) -> None:
    """Embed every text of a file, or every image of a folder, into a file of vectors.

    Reads JSONL, CSV, Parquet, Lance and plain text; images, and PDF files page by page. Reads, computes and
    writes at the same time, a few thousand rows at once, however long the input is.

    \b
    Examples:
      penstock embed articles.parquet -o vectors.parquet
      penstock embed articles.jsonl -o vectors.jsonl --column body --keep title
      penstock embed 'articles/*.parquet' -o vectors/ --on-error skip
      penstock embed articles.jsonl --to lancedb:./db/articles --id-column url
      penstock embed articles.parquet -o vectors.parquet --adapter a=./adapter
      penstock embed photos/ report.pdf -o vectors.parquet --keep path
    """
    job = _job(options, vectors, adapter, engine)
    sink = _sink(options)
    if ray.ray:
        from penstock.scale.data import Pool, run_job

        pool = Pool(workers=ray.workers, gpus_per_worker=ray.gpus_per_worker, address=ray.ray_address)
        run_job(job, pool, sink=sink)
        return
    if given := [name for name in ("ray_address", "workers", "gpus_per_worker") if getattr(ray, name)]:
        flag = "--" + given[0].replace("_", "-")
        raise BadValue(f"{flag} needs --ray", param=flag)
    from penstock.jobs.job import run

    run(job, sink)


def _sink(options: EmbedOptions) -> Sink | None:
    """The store that --to names."""
    if options.to is None:
        return None
    from penstock.stores.sink import store_sink

    return store_sink(options.to, adopt=options.adopt)


def _job(options: EmbedOptions, vectors: VectorFlags, adapter: AdapterFlag, engine: EngineFields) -> Job:
    from penstock.jobs.job import Job

    fields = msgspec.structs.asdict(options) | msgspec.structs.asdict(vectors)
    fields["output"] = _output(fields.pop("to"), fields.pop("adopt"), options)
    fields["inputs"] = tuple(options.inputs)
    fields["vectors"] = tuple(vectors.vectors) or (VectorKind.DENSE,)
    fields["truncation_side"] = vectors.truncation_side.value
    fields["adapter"] = adapter.chosen(engine)
    return Job(engine=engine, **fields)


def _output(to: str | None, adopt: bool, options: EmbedOptions) -> str:
    """The output, or with --to the folder that keeps the progress."""
    if to is None:
        if adopt:
            raise BadValue("--adopt is for vector stores; give --to", param="--adopt")
        if options.output is None:
            raise BadValue("give --output for a file, or --to for a vector store", param="--output")
        return options.output
    if options.output_format is not None:
        raise BadValue("--output-format is for files, not for --to", param="--output-format")
    from penstock.stores.sink import progress_folder

    return options.output or progress_folder(to)

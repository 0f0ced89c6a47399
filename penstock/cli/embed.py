"""`penstock embed`: a file of texts to a file of vectors. The work is in `penstock.jobs`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from penstock.cli.command import with_options
from penstock.cli.flags import ENGINE, EngineFields
from penstock.jobs.formats import InputFormat, OutputFormat


class EmbedDtype(enum.StrEnum):
    """The values of `penstock.types.OutputDtype`, without its import of NumPy."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    UINT8 = "uint8"
    BINARY = "binary"
    UBINARY = "ubinary"


class Side(enum.StrEnum):
    LEFT = "left"
    RIGHT = "right"


_ROWS, _VECTORS, _RUN = "Rows", "Vectors", "Run"
_BY_EXTENSION = "by the file's extension"


class EmbedOptions(msgspec.Struct, frozen=True, kw_only=True):
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="File to read, or - for stdin, which needs --format.")
    ]
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, such as vectors.parquet or vectors.jsonl.")
    ]
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
    dimensions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Keep the first N numbers of each vector, and normalise again.",
            show_default="all",
            rich_help_panel=_VECTORS,
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Scale vectors to length 1.",
            show_default="as the model says",
            rich_help_panel=_VECTORS,
        ),
    ] = None
    embed_dtype: Annotated[
        EmbedDtype, typer.Option(help="Number format of the output.", rich_help_panel=_VECTORS)
    ] = EmbedDtype.FLOAT32
    prompt_name: Annotated[
        str | None,
        typer.Option(
            help="One of the model's own prompts to put before each text; penstock info lists them.",
            rich_help_panel=_VECTORS,
        ),
    ] = None
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Words to put before each text, such as 'query: '.",
            rich_help_panel=_VECTORS,
        ),
    ] = None
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate/--no-truncate",
            help="Truncate texts at the model's limit, or stop at the first text beyond it.",
            rich_help_panel=_VECTORS,
        ),
    ] = True
    truncation_side: Annotated[
        Side, typer.Option(help="End of the text to truncate.", rich_help_panel=_VECTORS)
    ] = Side.RIGHT
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


@with_options(EmbedOptions, ENGINE)
def embed(options: EmbedOptions, engine: EngineFields) -> None:
    """Embed every text of a file into a file of vectors.

    Reads JSONL, CSV, Parquet and plain text. Reads, computes and writes at the same time, a few thousand
    rows at once, however long the file is.

    \b
    Examples:
      penstock embed articles.parquet -o vectors.parquet
      penstock embed articles.jsonl -o vectors.jsonl --column body --keep title
    """
    from penstock.jobs.job import Job, run

    fields = msgspec.structs.asdict(options)
    fields["truncation_side"] = options.truncation_side.value
    run(Job(engine=engine, **fields))

"""`penstock embed`: a file of texts to a file of vectors. Here are the flags; the work is in `job`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.flags import (
    Device,
    Dtype,
    HfOverridesJson,
    Impl,
    InputFormat,
    LoadAs,
    LoadFormat,
    MaxModelLen,
    MaxNumBatchedTokens,
    ModelImpl,
    OutputFormat,
    PoolerConfigJson,
    Quantize,
    Revision,
    Seed,
    Threads,
    engine_options,
)


class EmbedDtype(enum.StrEnum):
    """As `penstock.types.OutputDtype`, which would bring NumPy into `penstock --help`."""

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


def embed(
    source: Annotated[str, typer.Argument(metavar="INPUT", help="A file, or - for stdin (with --format).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: .parquet or .jsonl.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder or hub id; default: the embedded model."),
    ] = None,
    input_format: Annotated[
        InputFormat | None,
        typer.Option("--format", help="Default: by the file's extension.", rich_help_panel=_ROWS),
    ] = None,
    output_format: Annotated[
        OutputFormat | None, typer.Option(help="Default: by the extension of -o.", rich_help_panel=_ROWS)
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            help="Column that holds the text; default: text, or the only one with text.",
            rich_help_panel=_ROWS,
        ),
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option(
            help="Column that names the rows in the output; default: the row number, as id.",
            rich_help_panel=_ROWS,
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Another column to carry over; can be repeated.", rich_help_panel=_ROWS),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many rows.", rich_help_panel=_ROWS)
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(min=1, help="Cut vectors to this many, then renormalise.", rich_help_panel=_VECTORS),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Scale vectors to length 1; default: as the model says.",
            rich_help_panel=_VECTORS,
        ),
    ] = None,
    embed_dtype: Annotated[
        EmbedDtype, typer.Option(help="How numbers are stored.", rich_help_panel=_VECTORS)
    ] = EmbedDtype.FLOAT32,
    prompt_name: Annotated[
        str | None,
        typer.Option(help="A prompt of the model's own table to put first.", rich_help_panel=_VECTORS),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Words to put before each text.", rich_help_panel=_VECTORS)
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate/--no-truncate",
            help="Cut texts at the model's limit, or stop at the first that is too long.",
            rich_help_panel=_VECTORS,
        ),
    ] = True,
    truncation_side: Annotated[
        Side, typer.Option(help="Which end is cut off.", rich_help_panel=_VECTORS)
    ] = Side.RIGHT,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on where a run with the same flags stopped.", rich_help_panel=_RUN),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace the output, and drop unfinished parts.", rich_help_panel=_RUN
        ),
    ] = False,
    batch_rows: Annotated[
        int,
        typer.Option(min=1, help="Rows read, computed and saved together.", rich_help_panel=_RUN),
    ] = 2048,
    revision: Revision = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantization: Quantize = None,
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    threads: Threads = None,
    model_impl: Impl = ModelImpl.AUTO,
    load_format: LoadAs = LoadFormat.AUTO,
    pooler_config: PoolerConfigJson = None,
    hf_overrides: HfOverridesJson = None,
    seed: Seed = 0,
) -> None:
    """Embed every text of a file (JSONL, CSV, Parquet, plain text) into a file of vectors.

    Reads, computes and writes side by side, a few thousand rows at a time, however long the file is.
    """
    engine = engine_options(
        model=model,
        revision=revision,
        device=device,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        threads=threads,
        load_format=load_format,
        model_impl=model_impl,
        pooler_config=pooler_config,
        hf_overrides=hf_overrides,
        seed=seed,
    )
    from penstock.cli.job import Job, run

    run(
        Job(
            source=source,
            output=output,
            input_format=input_format,
            output_format=output_format,
            column=column,
            id_column=id_column,
            keep=tuple(keep or ()),
            limit=limit,
            engine=engine,
            dimensions=dimensions,
            normalize=normalize,
            embed_dtype=embed_dtype.value,
            prompt_name=prompt_name,
            prompt=prompt,
            truncate=truncate,
            truncation_side="left" if truncation_side is Side.LEFT else "right",
            resume=resume,
            overwrite=overwrite,
            batch_rows=batch_rows,
        )
    )

"""`penstock rerank` and `penstock score`: documents in their order for a query, and scores for a file of
pairs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from penstock.cli import flags
from penstock.cli.flags import engine_options
from penstock.errors import BadValue

_ROWS, _PAIRS = "Rows", "Pairs"
_CHUNK = 2048
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Folder or hub id; default: the embedded model.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The file to write; default: standard output.")
]
Jsonl = Annotated[bool, typer.Option("--jsonl", help="An object a line instead of tab-separated values.")]
Form = Annotated[
    flags.InputFormat | None,
    typer.Option("--format", help="Default: by the file's extension.", rich_help_panel=_ROWS),
]
Instruction = Annotated[
    str | None, typer.Option(help="What the model is told to look for.", rich_help_panel=_PAIRS)
]
Raw = Annotated[bool, typer.Option("--raw", help="Scores without activation.", rich_help_panel=_PAIRS)]
Truncate = Annotated[
    bool,
    typer.Option(
        "--truncate/--no-truncate",
        help="Cut what exceeds the model's limit, or stop at it.",
        rich_help_panel=_PAIRS,
    ),
]


def rerank(
    query: Annotated[str, typer.Argument(help="What is looked for.")],
    source: Annotated[
        str, typer.Argument(metavar="DOCUMENTS", help="A file, or - for stdin (with --format).")
    ],
    model: Model = None,
    top_n: Annotated[int | None, typer.Option(min=1, help="Only the best so many.")] = None,
    output: Output = None,
    jsonl: Jsonl = False,
    input_format: Form = None,
    column: Annotated[
        str | None,
        typer.Option(
            help="Column that holds the text; default: text, or the only one.", rich_help_panel=_ROWS
        ),
    ] = None,
    instruction: Instruction = None,
    raw: Raw = False,
    truncate: Truncate = True,
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    quantization: flags.Quantize = None,
    max_model_len: flags.MaxModelLen = None,
    threads: flags.Threads = None,
    load_format: flags.LoadAs = flags.LoadFormat.AUTO,
    pooler_config: flags.PoolerConfigJson = None,
    hf_overrides: flags.HfOverridesJson = None,
    score_template: flags.ScoreTemplate = None,
) -> None:
    """Sort the texts of a file by how well they answer QUERY, best first: score, row number, text."""
    engine = engine_options(
        model=model,
        device=device,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        threads=threads,
        load_format=load_format,
        pooler_config=pooler_config,
        hf_overrides=hf_overrides,
        template=score_template,
    )
    from penstock.cli.rows import choose_columns, open_source
    from penstock.offline.engine import Engine

    with open_source(source, input_format) as rows:
        columns = choose_columns(rows, column, None, ())
        chunks = rows.chunks(columns, start=0, stop=None, size=_CHUNK)
        documents = [text for chunk in chunks for text in chunk.texts]
    if not documents:
        raise BadValue(f"{source} has no documents", param="documents")
    with Engine(**engine) as running, _writing(output) as out:
        options = _options(instruction, raw, truncate)
        for found in running.rerank(query, documents, top_n=top_n, **options):
            values = {"score": found.score, "index": found.index, "document": found.document}
            _write(out, values, jsonl)


def score(
    source: Annotated[str, typer.Argument(metavar="PAIRS", help="A file, or - for stdin (with --format).")],
    model: Model = None,
    output: Output = None,
    jsonl: Jsonl = False,
    input_format: Form = None,
    query_column: Annotated[
        str, typer.Option(help="Column that holds the queries.", rich_help_panel=_ROWS)
    ] = "query",
    document_column: Annotated[
        str, typer.Option(help="Column that holds the documents.", rich_help_panel=_ROWS)
    ] = "document",
    instruction: Instruction = None,
    raw: Raw = False,
    truncate: Truncate = True,
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    quantization: flags.Quantize = None,
    max_model_len: flags.MaxModelLen = None,
    threads: flags.Threads = None,
    load_format: flags.LoadAs = flags.LoadFormat.AUTO,
    pooler_config: flags.PoolerConfigJson = None,
    hf_overrides: flags.HfOverridesJson = None,
    score_template: flags.ScoreTemplate = None,
) -> None:
    """Score every pair of a file (JSONL, CSV, Parquet), in its order: score, row number."""
    engine = engine_options(
        model=model,
        device=device,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        threads=threads,
        load_format=load_format,
        pooler_config=pooler_config,
        hf_overrides=hf_overrides,
        template=score_template,
    )
    from penstock.cli.rows import choose_columns, open_source
    from penstock.offline.engine import Engine

    with open_source(source, input_format) as rows:
        columns = choose_columns(rows, document_column, None, (query_column,))
        with Engine(**engine) as running, _writing(output) as out:
            options = _options(instruction, raw, truncate)
            for chunk in rows.chunks(columns, start=0, stop=None, size=_CHUNK):
                queries = _queries(chunk.carried[query_column], query_column, chunk.first)
                for at, value in enumerate(running.score(queries, chunk.texts, **options).tolist()):
                    _write(out, {"score": value, "index": chunk.first + at}, jsonl)


def _options(instruction: str | None, raw: bool, truncate: bool) -> dict[str, Any]:
    return {
        "instruction": instruction,
        "use_activation": False if raw else None,
        "truncate_prompt_tokens": -1 if truncate else None,
    }


def _queries(values: Any, name: str, first: int) -> list[str]:
    queries = values if isinstance(values, list) else values.to_pylist()
    for at, query in enumerate(queries):
        if not isinstance(query, str):
            raise BadValue(f"row {first + at}: {name!r} is not a text", param="--query-column")
    return list(queries)


@contextmanager
def _writing(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    with output.open("w", encoding="utf-8") as file:
        yield file


def _write(out: TextIO, values: dict[str, Any], jsonl: bool) -> None:
    import orjson

    if jsonl:
        out.write(orjson.dumps(values).decode() + "\n")
        return
    number, *rest = values.values()
    words = [" ".join(str(value).split()) for value in rest]
    out.write("\t".join([f"{number:.6f}", *words]) + "\n")

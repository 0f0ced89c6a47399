"""`penstock rerank` and `penstock score`: ranks documents for a query, and scores a file of pairs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
import typer

from penstock.cli.adapter_flag import AdapterFlag
from penstock.cli.command import with_options
from penstock.cli.flags import ENGINE, EngineFields
from penstock.errors import BadValue
from penstock.jobs.formats import InputFormat

_ROWS, _PAIRS = "Rows", "Pairs"
_CHUNK = 2048  # rows to read at once


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags that `rerank` and `score` share."""

    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write.", show_default="standard output"),
    ] = None
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Write a JSON object a line instead of tab-separated values.")
    ] = False
    input_format: Annotated[
        InputFormat | None,
        typer.Option(
            "--format",
            help="Format of the input.",
            show_default="by the file's extension",
            rich_help_panel=_ROWS,
        ),
    ] = None
    instruction: Annotated[
        str | None,
        typer.Option(help="Task description for models whose prompt has one.", rich_help_panel=_PAIRS),
    ] = None
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave out the activation: print logits.", rich_help_panel=_PAIRS)
    ] = False
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate/--no-truncate",
            help="Truncate pairs at the model's limit, or stop at the first pair beyond it.",
            rich_help_panel=_PAIRS,
        ),
    ] = True


class RerankOptions(RankOptions, frozen=True, kw_only=True):
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Query to rank the documents for.")]
    source: Annotated[
        str,
        typer.Argument(metavar="DOCUMENTS", help="File to read, or - for stdin, which needs --format."),
    ]
    top_n: Annotated[
        int | None, typer.Option(min=1, help="Number of documents to print.", show_default="all")
    ] = None
    column: Annotated[
        str | None,
        typer.Option(
            help="Column that holds the documents.",
            show_default="text, or the only column with text",
            rich_help_panel=_ROWS,
        ),
    ] = None


class ScoreOptions(RankOptions, frozen=True, kw_only=True):
    source: Annotated[
        str,
        typer.Argument(metavar="PAIRS", help="File to read, or - for stdin, which needs --format."),
    ]
    query_column: Annotated[
        str, typer.Option(help="Column that holds the queries.", rich_help_panel=_ROWS)
    ] = "query"
    document_column: Annotated[
        str, typer.Option(help="Column that holds the documents.", rich_help_panel=_ROWS)
    ] = "document"


@with_options(RerankOptions, AdapterFlag, ENGINE)
def rerank(given: RerankOptions, adapter: AdapterFlag, engine: EngineFields) -> None:
    """Sort the texts of a file by relevance to QUERY.

    Prints score, row number and text of each document, best first.

    \b
    Example:
      penstock rerank "how do turbines work" passages.txt --top-n 10
    """
    from penstock.jobs.inputs import open_source
    from penstock.jobs.rows import choose_columns
    from penstock.offline.engine import Engine

    with open_source(given.source, given.input_format) as rows:
        columns = choose_columns(rows, given.column, None, ())
        chunks = rows.chunks(columns, start=0, stop=None, size=_CHUNK)
        documents = [text for chunk in chunks for text in chunk.texts]
    if not documents:
        raise BadValue(f"{given.source} has no documents", param="documents")
    name = adapter.chosen(engine)
    with Engine(**engine) as running, _writing(given.output) as out:
        options = {**_options(given), "adapter": name}
        for found in running.rerank(given.query, documents, top_n=given.top_n, **options):
            values = {"score": found.score, "index": found.index, "document": found.document}
            _write(out, values, given.jsonl)


@with_options(ScoreOptions, AdapterFlag, ENGINE)
def score(given: ScoreOptions, adapter: AdapterFlag, engine: EngineFields) -> None:
    """Score every pair of a query and a document in a file.

    Reads JSONL, CSV and Parquet. Prints score and row number of each pair, in the file's order.

    \b
    Example:
      penstock score pairs.csv --query-column question --document-column answer
    """
    from penstock.jobs.inputs import open_source
    from penstock.jobs.rows import choose_columns
    from penstock.offline.engine import Engine

    with open_source(given.source, given.input_format) as rows:
        columns = choose_columns(rows, given.document_column, None, (given.query_column,))
        name = adapter.chosen(engine)
        with Engine(**engine) as running, _writing(given.output) as out:
            options = {**_options(given), "adapter": name}
            for chunk in rows.chunks(columns, start=0, stop=None, size=_CHUNK):
                queries = _queries(chunk.carried[given.query_column], given.query_column, chunk.first)
                for at, value in enumerate(running.score(queries, chunk.texts, **options).tolist()):
                    _write(out, {"score": value, "index": chunk.first + at}, given.jsonl)


def _options(given: RankOptions) -> dict[str, Any]:
    return {
        "instruction": given.instruction,
        "use_activation": False if given.raw else None,
        "truncate_prompt_tokens": -1 if given.truncate else None,
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

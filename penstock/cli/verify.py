"""`penstock verify`: compares a model with its reference library on the user's texts."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from penstock.cli.command import with_options
from penstock.cli.flags import ENGINE_AND_ARGUMENT, EngineFields
from penstock.errors import BadValue
from penstock.jobs.formats import InputFormat

if TYPE_CHECKING:
    from penstock.verify.samples import Sample

_MAX_ROWS = 4096
_TEXTS = "Texts"
DIFFERENT = 1


class ReferenceLibrary(StrEnum):
    SENTENCE_TRANSFORMERS = "sentence-transformers"
    SPARSE_ENCODER = "sparse-encoder"
    MULTI_VECTOR_ENCODER = "multi-vector-encoder"
    CROSS_ENCODER = "cross-encoder"
    TRANSFORMERS = "transformers"
    MODEL2VEC = "model2vec"


class VerifyOptions(msgspec.Struct, frozen=True, kw_only=True):
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXTS",
            help="File of texts to compare on, or - for stdin, which needs --format.",
            show_default="two dozen built-in texts",
        ),
    ] = None
    input_format: Annotated[
        InputFormat | None,
        typer.Option(
            "--format",
            help="Format of the texts.",
            show_default="by the file's extension",
            rich_help_panel=_TEXTS,
        ),
    ] = None
    column: Annotated[
        str | None,
        typer.Option(
            help="Column that holds the texts, or the documents of rerankers.",
            show_default="text, or the only column with text",
            rich_help_panel=_TEXTS,
        ),
    ] = None
    query_column: Annotated[
        str | None,
        typer.Option(
            help="Column that holds the query of each document.",
            show_default="the first texts are queries for the others",
            rich_help_panel=_TEXTS,
        ),
    ] = None
    limit: Annotated[
        int, typer.Option(min=2, max=_MAX_ROWS, help="Rows to read.", rich_help_panel=_TEXTS)
    ] = 64
    reference: Annotated[
        ReferenceLibrary | None,
        typer.Option(help="Library to compare with.", show_default="the one that the files name"),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Let the reference library run Python code from the model's folder. Penstock never does.",
        ),
    ] = False
    report: Annotated[
        Path | None,
        typer.Option("--report", "-o", help="File for the report.", show_default="verify-MODEL.json"),
    ] = None


@with_options(ENGINE_AND_ARGUMENT, VerifyOptions)
def verify(engine: EngineFields, given: VerifyOptions) -> None:
    """Compare a model's answers with those of its reference library.

    Loads the model in the library that its files name (sentence-transformers with its SparseEncoder,
    MultiVectorEncoder and CrossEncoder, transformers, or model2vec), then in Penstock. Prints cosines,
    differences, agreement of rankings and of the tokens fed, and a verdict, and saves them as JSON. Exits
    with 1 if the answers differ.

    \b
    Example:
      penstock verify BAAI/bge-base-en-v1.5 passages.jsonl
    """
    import orjson

    from penstock.verify.run import verify as run

    report = run(
        {"dtype": "float32"} | dict(engine),
        _sample(given),
        library=None if given.reference is None else given.reference.value,
        runs_model_code=given.trust_remote_code,
    )
    file = given.report or Path(f"verify-{re.sub(r'[^A-Za-z0-9._-]+', '-', report.model)}.json")
    file.write_bytes(orjson.dumps(report.as_json(), option=orjson.OPT_INDENT_2) + b"\n")
    print(report.as_text())
    print(f"report: {file}")
    if not report.is_same:
        raise typer.Exit(DIFFERENT)


def _sample(given: VerifyOptions) -> Sample:
    from penstock.jobs.inputs import open_source
    from penstock.jobs.rows import choose_columns
    from penstock.verify.samples import DEFAULT_TEXTS, Sample

    if given.source is None:
        return Sample.of(DEFAULT_TEXTS)
    kept = () if given.query_column is None else (given.query_column,)
    with open_source(given.source, given.input_format) as rows:
        columns = choose_columns(rows, given.column, None, kept)
        chunks = list(rows.chunks(columns, start=0, stop=given.limit, size=_MAX_ROWS))
    texts = [text for chunk in chunks for text in chunk.texts]
    if len(texts) < 2:
        raise BadValue(f"{given.source} has {len(texts)} texts; a comparison needs at least 2", param="texts")
    if given.query_column is None:
        return Sample.of([text for text in texts if text.strip()])
    queries = [str(query) for chunk in chunks for query in list(chunk.carried[given.query_column])]
    return Sample.of(texts, queries)

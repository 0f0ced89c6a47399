"""`penstock migrate`: moves a collection of a vector store to another model. `stores` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from penstock.cli.command import with_options
from penstock.cli.flags import ENGINE, EngineFields
from penstock.cli.vector_flags import VectorFlags
from penstock.jobs.formats import OnError

if TYPE_CHECKING:
    from penstock.stores.migrate import Migration

_ROWS, _COMPARISON, _SWITCH = "Rows", "Comparison", "Switch"


class MigrateOptions(msgspec.Struct, frozen=True, kw_only=True):
    old: Annotated[str, typer.Argument(metavar="OLD", help="Collection to move, as in penstock embed --to.")]
    new: Annotated[
        str, typer.Argument(metavar="NEW", help="Collection to write, in the same store or another one.")
    ]
    text_column: Annotated[
        str | None,
        typer.Option(
            help="Column of OLD, or of --texts, that holds the texts.",
            show_default="text, or the only column with text",
            rich_help_panel=_ROWS,
        ),
    ] = None
    texts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File with the columns id and text, for a store that keeps no texts.",
            rich_help_panel=_ROWS,
        ),
    ] = None
    updated_column: Annotated[
        str | None,
        typer.Option(
            help="Column of OLD that changes whenever a row does. Rows whose value differs in NEW are "
            "embedded again.",
            rich_help_panel=_ROWS,
        ),
    ] = None
    on_error: Annotated[
        OnError,
        typer.Option(
            help="What to do with a row that has no text or cannot be embedded: stop, or skip it.",
            rich_help_panel=_ROWS,
        ),
    ] = OnError.FAIL
    batch_rows: Annotated[
        int, typer.Option(min=1, help="Rows to read, compute and write together.", rich_help_panel=_ROWS)
    ] = 2048
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Your own queries, a text a row: compare what both collections find for them.",
            rich_help_panel=_COMPARISON,
        ),
    ] = None
    query_column: Annotated[
        str | None,
        typer.Option(
            help="Column of --queries that holds the texts.",
            show_default="text, or the only column with text",
            rich_help_panel=_COMPARISON,
        ),
    ] = None
    judgements: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Which documents are relevant for which query, as TSV (query id, document id, score) or "
            "JSONL: adds nDCG and MRR.",
            rich_help_panel=_COMPARISON,
        ),
    ] = None
    top_k: Annotated[
        int, typer.Option(min=1, max=1000, help="Documents to compare a query.", rich_help_panel=_COMPARISON)
    ] = 10
    query_prompt_name: Annotated[
        str | None,
        typer.Option(
            help="The new model's prompt for queries.",
            show_default="its own for queries, if it has one",
            rich_help_panel=_COMPARISON,
        ),
    ] = None
    query_prompt: Annotated[
        str | None,
        typer.Option(help="Words before each query, for the new model.", rich_help_panel=_COMPARISON),
    ] = None
    old_model: Annotated[
        str | None,
        typer.Option(
            help="The model that made OLD.", show_default="as OLD's stamp says", rich_help_panel=_COMPARISON
        ),
    ] = None
    old_query_prompt_name: Annotated[
        str | None,
        typer.Option(
            help="The old model's prompt for queries.",
            show_default="its own for queries, if it has one",
            rich_help_panel=_COMPARISON,
        ),
    ] = None
    old_query_prompt: Annotated[
        str | None,
        typer.Option(help="Words before each query, for the old model.", rich_help_panel=_COMPARISON),
    ] = None
    cut_over: Annotated[
        bool,
        typer.Option(
            "--cut-over",
            help="At the end, point OLD's name to NEW: an alias of Qdrant or OpenSearch, or a table of "
            "PostgreSQL.",
            rich_help_panel=_SWITCH,
        ),
    ] = False
    switch_only: Annotated[
        bool,
        typer.Option(
            "--switch-only",
            help="Embed and compare nothing, only point OLD's name to NEW. The rollback after --cut-over.",
            rich_help_panel=_SWITCH,
        ),
    ] = False
    min_overlap: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Do not switch if the collections share less than this part of their top documents.",
            rich_help_panel=_SWITCH,
        ),
    ] = None
    min_ndcg_ratio: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Do not switch if the new nDCG divided by the old one is below this.",
            rich_help_panel=_SWITCH,
        ),
    ] = None


@with_options(MigrateOptions, VectorFlags, ENGINE)
def migrate(options: MigrateOptions, vectors: VectorFlags, engine: EngineFields) -> None:
    """Move a collection of a vector store to another model, while it is in use.

    Reads the ids, texts and other columns of OLD, embeds the texts with --model, and writes them to NEW.
    Run it again to continue, or to bring what was added to OLD since.

    \b
    Examples:
      penstock migrate lancedb:db/docs lancedb:db/docs_v2 --model BAAI/bge-small-en-v1.5 --queries queries.txt
      penstock migrate qdrant:http://localhost:6333/docs qdrant:http://localhost:6333/docs_v2 \\
        --model BAAI/bge-small-en-v1.5 --queries queries.jsonl --min-overlap 0.5 --cut-over
    """
    from penstock.stores.migrate import run

    run(_migration(options, vectors, engine))


def _migration(options: MigrateOptions, vectors: VectorFlags, engine: EngineFields) -> Migration:
    from penstock.stores.migrate import Migration
    from penstock.stores.queries import QueryPrompt

    same: tuple[str, ...] = (
        "old",
        "new",
        "text_column",
        "texts",
        "updated_column",
        "queries",
        "query_column",
        "judgements",
    )
    same += ("top_k", "old_model", "cut_over", "switch_only", "min_overlap", "min_ndcg_ratio", "batch_rows")
    return Migration(
        engine=engine,
        vectors=vectors.options(),
        skips_bad_rows=options.on_error is OnError.SKIP,
        query_prompt=QueryPrompt(name=options.query_prompt_name, prompt=options.query_prompt),
        old_query_prompt=QueryPrompt(name=options.old_query_prompt_name, prompt=options.old_query_prompt),
        **{name: getattr(options, name) for name in same},
    )

"""The `penstock` command: registers the subcommands, and turns errors into one line and an exit code.

Importing this module is cheap: a subcommand imports heavy libraries only when it runs.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli.bench import app as bench
from penstock.cli.chat import chat
from penstock.cli.command import Command, ServeCommand
from penstock.cli.doctor import doctor
from penstock.cli.embed import embed
from penstock.cli.flags import message_with_flag
from penstock.cli.generate import generate
from penstock.cli.info import info
from penstock.cli.migrate import migrate
from penstock.cli.plan import plan
from penstock.cli.rank import rerank, score
from penstock.cli.serve import serve
from penstock.cli.verify import verify
from penstock.errors import ClientError, PenstockError

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


class Commands(TyperGroup):
    """Prints expected errors as `error: …` on stderr. Other exceptions are bugs and show a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ClientError as error:
            raise _exit_with_error(message_with_flag(error), USAGE_ERROR) from None
        except PenstockError as error:
            raise _exit_with_error(error.message, FAILURE) from None
        except BrokenPipeError:
            raise  # the reader of our output has exited; typer exits quietly
        except OSError as error:
            raise _exit_with_error(f"{type(error).__name__}: {error}", FAILURE) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _exit_with_error(message: str, code: int) -> typer.Exit:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return typer.Exit(code)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the boxes that rich draws truncate flag names on narrow terminals
    help="Inference engine and server for pooling models: embeddings, reranking, classification.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    return None


app.command(cls=ServeCommand)(serve)
app.command(cls=Command)(embed)
app.command(cls=Command)(migrate)
app.command(cls=Command)(rerank)
app.command(cls=Command)(score)
app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command(cls=Command)(info)
app.command(cls=Command)(plan)
app.command(cls=Command)(verify)
app.command(cls=Command)(doctor)
app.add_typer(bench, name="bench")


def main() -> None:
    app()

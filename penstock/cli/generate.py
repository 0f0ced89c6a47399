"""`penstock generate`: continues prompts from the command line, a file or stdin."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import msgspec
import typer

from penstock.cli.adapter_flag import AdapterFlag
from penstock.cli.command import with_options
from penstock.cli.flags import ENGINE, GENERATION, EngineFields, chat_template, json_object
from penstock.errors import BadValue, ClientError
from penstock.jobs.formats import InputFormat

if TYPE_CHECKING:
    from penstock.inputs.generation import GenerationFields
    from penstock.offline.open import LocalModel
    from penstock.tasks.text_stream import TextDelta

_SAMPLING, _ROWS = "Sampling", "Rows"
_AHEAD = 256  # prompts in progress at the same time
_AS_MODEL_SAYS = "the model's generation_config.json"


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled. Other parameters of /v1/completions go into `params`."""

    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of tokens in an answer.",
            show_default="all that the model's limit leaves",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Randomness; 0 always takes the most likely token.",
            show_default=_AS_MODEL_SAYS,
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the most likely tokens whose probabilities add up to this; above 0, at most 1.",
            show_default=_AS_MODEL_SAYS,
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample from this number of most likely tokens; 0 takes all.",
            show_default=_AS_MODEL_SAYS,
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Makes samples repeatable.", rich_help_panel=_SAMPLING)] = (
        None
    )
    stop: Annotated[
        list[str],
        typer.Option(help="Text that ends an answer. Repeat the flag for more.", rich_help_panel=_SAMPLING),
    ] = []
    params: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Other parameters of /v1/completions, such as '{\"min_p\": 0.1}'.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How messages become a prompt."""

    system: Annotated[str | None, typer.Option(help="System message.")] = None
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|FILE|NAME",
            help="Chat template (Jinja), a file that holds one, or the name of one of the model's templates.",
            show_default="the model's own",
            rich_help_panel=GENERATION,
        ),
    ] = None

    @property
    def template(self) -> str | None:
        """The template's text, or the name of one of the model's."""
        return None if self.chat_template is None else chat_template(self.chat_template)


class GenerateOptions(ChatOptions, frozen=True, kw_only=True):
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT", help="Texts to continue.", show_default=False)
    ] = []
    source: Annotated[
        str | None,
        typer.Option("--file", "-f", help="File of prompts, or - for stdin, which needs --format."),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="standard output")
    ] = None
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Write a JSON object a line instead of plain text.")
    ] = False
    chat: Annotated[
        bool, typer.Option("--chat", help="Send prompts as user messages, through the chat template.")
    ] = False
    n: Annotated[int, typer.Option(min=1, help="Answers to each prompt.", rich_help_panel=_SAMPLING)] = 1
    input_format: Annotated[
        InputFormat | None,
        typer.Option(
            "--format",
            help="Format of --file.",
            show_default="by the file's extension",
            rich_help_panel=_ROWS,
        ),
    ] = None
    column: Annotated[
        str | None,
        typer.Option(
            help="Column that holds the prompts.",
            show_default="text, or the only column with text",
            rich_help_panel=_ROWS,
        ),
    ] = None


@with_options(GenerateOptions, SamplingOptions, AdapterFlag, ENGINE)
def generate(
    options: GenerateOptions, sampling: SamplingOptions, adapter: AdapterFlag, engine: EngineFields
) -> None:
    """Continue every PROMPT, or every row of --file, in order.

    \b
    Examples:
      penstock generate "The capital of France is" -m Qwen/Qwen3-0.6B
      penstock generate --file prompts.jsonl --chat -m Qwen/Qwen3-0.6B --jsonl
    """
    prompts, template = options.prompts, options.template
    if bool(prompts) == (options.source is not None):
        raise BadValue("give prompts, or a file of prompts with --file", param="prompts")
    if options.system is not None and not options.chat:
        raise BadValue("--system needs --chat", param="--system")
    fields, name = sampling_fields(sampling, n=options.n), adapter.chosen(engine)
    import asyncio

    from penstock.offline.open import open_model

    with ExitStack() as stack:
        rows = iter(prompts) if prompts else _from_file(stack, options)
        running = stack.enter_context(open_model(engine, chat_template=template))
        _ = running.text.generation  # raises if the model does not generate
        output = options.output
        out = sys.stdout if output is None else stack.enter_context(output.open("w", encoding="utf-8"))
        adapter_id = -1 if name is None else stack.enter_context(running.adapters.hold(name))
        task = _Task(running, fields, options.system, options.chat, adapter_id)
        single = len(prompts) == 1 and options.n == 1 and not options.jsonl
        asyncio.run(task.stream(next(rows), out) if single else task.run(rows, out, options.jsonl))


def sampling_fields(options: SamplingOptions, n: int | None = None) -> GenerationFields:
    """Merge the flags and the JSON object of --params."""
    from penstock.inputs.generation import GenerationFields

    flags = {**msgspec.structs.asdict(options), "stop": options.stop or None, "n": n}
    values = {} if options.params is None else json_object("--params", options.params)
    values |= {name: value for name, value in flags.items() if value is not None and name != "params"}
    try:
        return msgspec.convert(values, GenerationFields)
    except msgspec.ValidationError as error:
        raise BadValue(f"--params: {error}", param="--params") from None


def _from_file(stack: ExitStack, options: GenerateOptions) -> Iterator[str]:
    from penstock.jobs.inputs import open_source
    from penstock.jobs.rows import choose_columns

    rows = stack.enter_context(open_source(options.source or "-", options.input_format))
    columns = choose_columns(rows, options.column, None, ())
    chunks = rows.chunks(columns, start=0, stop=None, size=_AHEAD)
    return (text for chunk in chunks for text in chunk.texts)


class _Task:
    """Generates from prompts with one model."""

    def __init__(
        self,
        model: LocalModel,
        fields: GenerationFields,
        system: str | None,
        chat: bool,
        adapter: int = -1,
    ) -> None:
        self._model = model
        self._ids = itertools.count()
        self._fields = fields
        self._system = system
        self._chat = chat
        self._adapter = adapter

    async def stream(self, prompt: str, out: TextIO) -> None:
        """Write one answer as it is generated."""
        async with aclosing(self._deltas(prompt)) as stream:
            async for deltas in stream:
                out.write("".join(delta.text for delta in deltas))
                out.flush()
        out.write("\n")

    async def run(self, prompts: Iterable[str], out: TextIO, jsonl: bool) -> None:
        """Answer many prompts at once, and write the answers in the order of the prompts."""
        import asyncio

        import orjson

        waiting: deque[asyncio.Task[list[dict[str, Any]]]] = deque()
        rows = enumerate(prompts)
        with _progress() as advance:
            try:
                while True:
                    while len(waiting) < _AHEAD and (row := next(rows, None)) is not None:
                        waiting.append(asyncio.create_task(self._answers(*row)))
                    if not waiting:
                        return
                    for answer in await waiting.popleft():
                        line = orjson.dumps(answer).decode() if jsonl else str(answer["text"])
                        out.write(line + "\n")
                    out.flush()
                    advance()
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

    async def _answers(self, index: int, prompt: str) -> list[dict[str, Any]]:
        answers = [
            {"index": index, "prompt": prompt, "text": "", "finish_reason": None, "tokens": 0}
            for _ in range(self._fields.n or 1)
        ]
        try:
            async with aclosing(self._deltas(prompt)) as stream:
                async for deltas in stream:
                    for delta in deltas:
                        answer: dict[str, Any] = answers[delta.row]
                        answer["text"] += delta.text
                        answer["tokens"] += len(delta.token_ids)
                        answer["finish_reason"] = delta.finish_reason
        except ClientError as error:
            raise BadValue(f"prompt {index}: {error.message}", param="prompt") from None
        return answers

    def _deltas(self, prompt: str) -> AsyncGenerator[list[TextDelta], None]:
        from penstock.tasks.generate import ChatPrompt, Generate, TextPrompts

        source: TextPrompts | ChatPrompt = TextPrompts(prompts=prompt)
        if self._chat:
            system = [] if self._system is None else [{"role": "system", "content": self._system}]
            source = ChatPrompt(messages=[*system, {"role": "user", "content": prompt}])
        task = Generate(source=source, fields=self._fields, default_max_tokens=None, adapter=self._adapter)
        return task.stream(self._model.text, self._model.engine, f"prompt-{next(self._ids)}")


class _progress:
    """Shows the number of finished prompts on a terminal; does nothing elsewhere."""

    def __enter__(self) -> Any:
        self._bar: Any = None
        if not sys.stderr.isatty() or sys.stdout.isatty():
            return lambda: None
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.completed:,} prompts"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.start()
        task = self._bar.add_task("", total=None)
        return lambda: self._bar.advance(task)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

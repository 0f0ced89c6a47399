"""`penstock generate`: continues prompts from the command line, a file or stdin."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from penstock.cli import flags
from penstock.cli.flags import engine_options, json_object
from penstock.errors import BadValue, ClientError

if TYPE_CHECKING:
    from penstock.inputs.generation import GenerationFields
    from penstock.offline.open import LocalModel
    from penstock.tasks.text_stream import TextDelta

_PANEL, _ROWS = "Sampling", "Rows"
_AHEAD = 256  # prompts under way together
Temperature = Annotated[float | None, typer.Option(help="0: the likeliest token.", rich_help_panel=_PANEL)]
TopP = Annotated[float | None, typer.Option(help="Above 0, at most 1.", rich_help_panel=_PANEL)]
TopK = Annotated[int | None, typer.Option(help="0: all tokens.", rich_help_panel=_PANEL)]
SeedOf = Annotated[int | None, typer.Option(help="Makes samples repeatable.", rich_help_panel=_PANEL)]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.", rich_help_panel=_PANEL)
]
Params = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="Any other parameter of /v1/completions, such as '{\"min_p\": 0.1}'.",
        rich_help_panel=_PANEL,
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(metavar="TEXT|FILE|NAME", help="A chat template instead of the model's own."),
]


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT…", help="What to continue.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Folder or hub id.")] = None,
    source: Annotated[
        str | None, typer.Option("--file", "-f", help="A file of prompts, or - for stdin (with --format).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; default: standard output.")
    ] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="An object a line instead of plain text.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are a user's messages.")] = False,
    system: Annotated[str | None, typer.Option(help="What the model is told first; with --chat.")] = None,
    chat_template: ChatTemplate = None,
    input_format: Annotated[
        flags.InputFormat | None,
        typer.Option("--format", help="Default: by the file's extension.", rich_help_panel=_ROWS),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            help="Column that holds the prompt; default: text, or the only one.", rich_help_panel=_ROWS
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Default: as many as there is room for.", rich_help_panel=_PANEL)
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    n: Annotated[int, typer.Option(min=1, help="Answers to each prompt.", rich_help_panel=_PANEL)] = 1,
    seed: SeedOf = None,
    stop: Stop = None,
    params: Params = None,
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    quantization: flags.Quantize = None,
    max_model_len: flags.MaxModelLen = None,
    threads: flags.Threads = None,
    load_format: flags.LoadAs = flags.LoadFormat.AUTO,
    hf_overrides: flags.HfOverridesJson = None,
) -> None:
    """Continue every PROMPT, or every row of --file, in their order."""
    engine = engine_options(
        model=model,
        device=device,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        threads=threads,
        load_format=load_format,
        hf_overrides=hf_overrides,
    )
    if bool(prompts) == (source is not None):
        raise BadValue("give prompts, or a file of them with --file", param="prompts")
    if system is not None and not chat:
        raise BadValue("--system needs --chat", param="--system")
    fields = sampling_fields(
        params,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        n=n,
        seed=seed,
        stop=stop or None,
    )
    from penstock.offline.open import open_model

    with ExitStack() as stack:
        rows = iter(prompts) if prompts else _from_file(stack, source or "-", input_format, column)
        running = stack.enter_context(open_model(engine, chat_template=chat_template))
        _ = running.text.generation  # refuses a model that does not generate
        out = sys.stdout if output is None else stack.enter_context(output.open("w", encoding="utf-8"))
        task = _Task(running, fields, system if chat else None, chat)
        single = prompts is not None and len(prompts) == 1 and n == 1 and not jsonl
        asyncio.run(task.stream(next(rows), out) if single else task.run(rows, out, jsonl))


def sampling_fields(params: str | None, **given: Any) -> GenerationFields:
    """The flags and the JSON object as one set of parameters."""
    import msgspec

    from penstock.inputs.generation import GenerationFields

    values = (json_object("--params", params) or {}) | {k: v for k, v in given.items() if v is not None}
    try:
        return msgspec.convert(values, GenerationFields)
    except msgspec.ValidationError as error:
        raise BadValue(f"--params: {error}", param="--params") from None


def _from_file(
    stack: ExitStack, source: str, form: flags.InputFormat | None, column: str | None
) -> Iterator[str]:
    from penstock.cli.rows import choose_columns, open_source

    rows = stack.enter_context(open_source(source, form))
    columns = choose_columns(rows, column, None, ())
    chunks = rows.chunks(columns, start=0, stop=None, size=_AHEAD)
    return (text for chunk in chunks for text in chunk.texts)


class _Task:
    """Prompts through one model."""

    def __init__(self, model: LocalModel, fields: GenerationFields, system: str | None, chat: bool) -> None:
        self._model = model
        self._ids = itertools.count()
        self._fields = fields
        self._system = system
        self._chat = chat

    async def stream(self, prompt: str, out: TextIO) -> None:
        """One answer, shown while it comes."""
        async with aclosing(self._deltas(prompt)) as stream:
            async for deltas in stream:
                out.write("".join(delta.text for delta in deltas))
                out.flush()
        out.write("\n")

    async def run(self, prompts: Iterable[str], out: TextIO, jsonl: bool) -> None:
        """Many at once, written in their order."""
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
        task = Generate(source=source, fields=self._fields, default_max_tokens=None)
        return task.stream(self._model.text, self._model.engine, f"prompt-{next(self._ids)}")


class _progress:
    """A count on a terminal, and nothing elsewhere."""

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

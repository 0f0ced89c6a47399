"""`penstock chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import flags
from penstock.cli.flags import engine_options
from penstock.cli.generate import ChatTemplate, Params, SeedOf, Stop, Temperature, TopK, TopP, sampling_fields
from penstock.errors import ClientError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.inputs.generation import GenerationFields
    from penstock.offline.open import LocalModel

HELP = (
    "/reset forgets the conversation, /system TEXT says what comes first, /exit ends; ctrl-C stops an answer"
)

# A model's words must not move the cursor or ring the bell: control signs but for tab and new line.
_QUIET = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def chat(
    model: Annotated[str | None, typer.Argument(help="Folder or hub id.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    chat_template: ChatTemplate = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of an answer; default: as many as there is room for.")
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
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
    """Talk to MODEL. Type /help for what else can be typed."""
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
    fields = sampling_fields(
        params,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or None,
    )
    from rich.console import Console

    from penstock.offline.open import open_model

    console = Console(highlight=False)
    with open_model(engine, chat_template=chat_template) as opened:
        _ = opened.text.generation.chat.template  # refuses a model without a chat template
        console.print(f"[bold]{opened.spec.name}[/bold] — /help, /exit", style="dim")
        Conversation(opened, fields, console, system).run()


class Conversation:
    """Messages so far, and the loop that adds to them."""

    def __init__(
        self, model: LocalModel, fields: GenerationFields, console: Console, system: str | None = None
    ) -> None:
        self._model = model
        self._fields = fields
        self._console = console
        self._system = system
        self.messages: list[dict[str, str]] = []

    def run(self) -> None:
        while True:
            try:
                line = self._console.input("[bold cyan]> [/bold cyan]").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(*line.split(maxsplit=1))
            elif line:
                self._turn(line)

    def _command(self, name: str, words: str = "") -> None:
        if name == "/reset":
            self.messages.clear()
            self._say("forgotten")
        elif name == "/system":
            self._system = words or None
            self.messages.clear()
            self._say("a new conversation " + ("begins with that" if words else "without a system message"))
        else:
            self._say(HELP if name == "/help" else f"there is no {name}; {HELP}")

    def _turn(self, line: str) -> None:
        """One question and its answer; what was said before ctrl-C stays said."""
        self.messages.append({"role": "user", "content": line})
        texts: list[str] = []
        tokens, began_s = [0], time.monotonic()
        try:
            asyncio.run(self._answer(texts, tokens))
        except KeyboardInterrupt:
            self._console.print(" …", style="dim", end="")
        except ClientError as error:
            self.messages.pop()
            self._say(error.message)
            return
        self._console.print()
        seconds = time.monotonic() - began_s
        self._say(f"{tokens[0]} tokens, {tokens[0] / max(seconds, 1e-9):.1f} tokens/s")
        self.messages.append({"role": "assistant", "content": "".join(texts)})

    async def _answer(self, texts: list[str], tokens: list[int]) -> None:
        first: list[dict[str, Any]] = (
            [] if self._system is None else [{"role": "system", "content": self._system}]
        )
        from penstock.tasks.generate import ChatPrompt, Generate

        source = ChatPrompt(messages=[*first, *self.messages])
        task = Generate(source=source, fields=self._fields, default_max_tokens=None)
        reply = task.stream(self._model.text, self._model.engine, f"turn-{len(self.messages)}")
        async with aclosing(reply) as stream:
            async for deltas in stream:
                text = "".join(delta.text for delta in deltas)
                texts.append(text)
                tokens[0] += sum(len(delta.token_ids) for delta in deltas)
                self._console.print(text.translate(_QUIET), end="", markup=False, soft_wrap=True)

    def _say(self, words: str) -> None:
        self._console.print(words, style="dim", markup=False)

"""`penstock chat`: a conversation in the terminal."""

from __future__ import annotations

import time
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

from penstock.cli.adapter_flag import AdapterFlag
from penstock.cli.command import with_options
from penstock.cli.flags import ENGINE_AND_ARGUMENT, EngineFields
from penstock.cli.generate import ChatOptions, SamplingOptions, sampling_fields
from penstock.errors import ClientError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.inputs.generation import GenerationFields
    from penstock.offline.open import LocalModel

HELP = (
    "/reset clears the conversation, /system TEXT sets a system message, /exit quits, ctrl-C stops an answer"
)

# Control characters except tab and newline: the model's output must not move the cursor or ring the bell.
_QUIET = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


@with_options(ENGINE_AND_ARGUMENT, ChatOptions, SamplingOptions, AdapterFlag)
def chat(engine: EngineFields, options: ChatOptions, sampling: SamplingOptions, adapter: AdapterFlag) -> None:
    """Talk to MODEL in the terminal. Type /help for commands.

    \b
    Example:
      penstock chat Qwen/Qwen3-0.6B --system "Answer in one sentence."
    """
    chat_template = options.template
    fields, name = sampling_fields(sampling), adapter.chosen(engine)
    from rich.console import Console

    from penstock.offline.open import open_model

    console = Console(highlight=False)
    with open_model(engine, chat_template=chat_template) as opened:
        _ = opened.text.generation.chat.template  # raises if the model has no chat template
        console.print(f"[bold]{opened.spec.name}[/bold] — /help, /exit", style="dim")
        with nullcontext(-1) if name is None else opened.adapters.hold(name) as adapter_id:
            Conversation(opened, fields, console, options.system, adapter_id).run()


class Conversation:
    """The messages so far, and the loop that reads questions and prints answers."""

    def __init__(
        self,
        model: LocalModel,
        fields: GenerationFields,
        console: Console,
        system: str | None = None,
        adapter: int = -1,
    ) -> None:
        self._model = model
        self._fields = fields
        self._console = console
        self._system = system
        self._adapter = adapter
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
            self._say("conversation cleared")
        elif name == "/system":
            self._system = words or None
            self.messages.clear()
            self._say(
                "new conversation " + ("with this system message" if words else "without a system message")
            )
        else:
            self._say(HELP if name == "/help" else f"unknown command {name}; {HELP}")

    def _turn(self, line: str) -> None:
        """One question and its answer. ctrl-C keeps the part that has been generated."""
        self.messages.append({"role": "user", "content": line})
        texts: list[str] = []
        tokens, began_s = [0], time.monotonic()
        try:
            import asyncio

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
        task = Generate(source=source, fields=self._fields, default_max_tokens=None, adapter=self._adapter)
        reply = task.stream(self._model.text, self._model.engine, f"turn-{len(self.messages)}")
        async with aclosing(reply) as stream:
            async for deltas in stream:
                text = "".join(delta.text for delta in deltas)
                texts.append(text)
                tokens[0] += sum(len(delta.token_ids) for delta in deltas)
                self._console.print(text.translate(_QUIET), end="", markup=False, soft_wrap=True)

    def _say(self, words: str) -> None:
        self._console.print(words, style="dim", markup=False)

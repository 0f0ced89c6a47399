"""`penstock generate` and `penstock chat` with a scripted engine."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from penstock.cli.chat import Conversation
from penstock.cli.generate import ChatOptions
from penstock.cli.main import app
from penstock.inputs.generation import GenerationFields
from penstock.inputs.tokenizer import Tokenizer
from penstock.offline import open as offline_open
from penstock.offline.open import LocalModel
from penstock.tasks.model import TextModel
from penstock.types import Task
from tests.cli.runs import error_of, invoke, read_jsonl, write_jsonl
from tests.command_line import CliRunner
from tests.text_models import ScriptedEngine, continue_with, text_spec, write_text_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """Replace the real engine with one whose answers begin with the prompt's last two tokens."""
    tokenizer = Tokenizer(folder)
    said = continue_with(tokenizer, " was long 🙂", " other")
    scripted = ScriptedEngine(lambda prompt, copy: [*prompt[-2:], *said(prompt, copy)])

    @contextmanager
    def opened(options: dict[str, Any], *, chat_template: str | None = None) -> Iterator[LocalModel]:
        tasks = (Task.EMBED,) if options["model"] == "embedder" else (Task.GENERATE,)
        yield local_model(scripted, folder, chat_template, tasks=tasks)

    monkeypatch.setattr(offline_open, "open_model", opened)
    return scripted


def local_model(
    engine: ScriptedEngine, folder: Path, chat_template: str | None = None, **changes: Any
) -> LocalModel:
    spec = text_spec(folder, **changes)
    text = TextModel(spec, chat_template=chat_template)
    return LocalModel(spec, cast(Any, None), text, cast(Any, engine), cast(Any, None))


def tail(folder: Path, prompt: str) -> str:
    tokenizer = Tokenizer(folder)
    return tokenizer.decode(tokenizer.encode([prompt])[0].tolist()[-2:])


def test_one_prompt_is_continued(folder: Path, engine: ScriptedEngine) -> None:
    result = invoke(
        "generate", "the water", "-m", "x", "--max-tokens", 30, "--temperature", 0, "--stop", "🙂"
    )
    assert result.stdout == tail(folder, "the water") + " was long \n"
    sampling = engine.requests[0].sampling
    assert sampling is not None and (sampling.temperature, sampling.max_tokens) == (0, 30)


def test_many_prompts_keep_their_order(folder: Path, engine: ScriptedEngine, tmp_path: Path) -> None:
    prompts = [f"the water {number}" for number in range(600)]
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": prompt} for prompt in prompts])
    out = tmp_path / "out.jsonl"
    result = invoke(
        "generate", "-f", source, "-m", "x", "--jsonl", "-o", out, "--n", 2, "--params", '{"min_p": 0.1}'
    )
    assert result.exit_code == 0, result.output
    rows = read_jsonl(out)
    assert [row["index"] for row in rows] == [number for number in range(600) for _ in range(2)]
    for row in rows[::100]:
        assert row["prompt"] == prompts[row["index"]] and row["finish_reason"] == "stop" and row["tokens"] > 2
        assert row["text"] == tail(folder, row["prompt"]) + " was long 🙂"
    assert engine.requests[0].sampling.min_p == 0.1  # type: ignore[union-attr]


@contextmanager
def stdin_of(content: bytes) -> Iterator[None]:
    """Replace file descriptor 0 of this process, which commands read instead of `sys.stdin`."""
    kept = os.dup(0)
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        os.dup2(file.fileno(), 0)
        try:
            yield
        finally:
            os.dup2(kept, 0)
            os.close(kept)


def test_prompts_are_read_from_stdin_and_sent_as_messages(folder: Path, engine: ScriptedEngine) -> None:
    args = ["generate", "-f", "-", "--format", "text", "-m", "x", "--chat", "--system", "be brief"]
    with stdin_of(b"the water\nan oil\n"):
        result = invoke(*args)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("was long 🙂\n") == 2
    oil, water = sorted(prompts_of(folder, engine))  # prompts reach the engine in any order
    assert "system\nbe brief" in water and "user\nthe water" in water
    assert "system\nbe brief" in oil and "user\nan oil" in oil


def test_usage_errors_are_one_line(engine: ScriptedEngine, tmp_path: Path) -> None:
    assert "give prompts" in error_of("generate", "-m", "x")
    assert "--system needs --chat" in error_of("generate", "a", "-m", "x", "--system", "b")
    assert "does not generate" in error_of("generate", "a", "-m", "embedder")
    assert "temperature is -1" in error_of("generate", "a", "-m", "x", "--temperature", -1)
    assert "unknown field `nothing`" in error_of("generate", "a", "-m", "x", "--params", '{"nothing": 1}')
    source = tmp_path / "in.txt"
    source.write_text("short\n" + "word " * 300 + "\n")
    assert "prompt 1: the model takes at most" in error_of("generate", "-f", source, "-m", "x")
    assert engine.open == 0


def talk(lines: str) -> str:
    result = CliRunner().invoke(app, ["chat", "x", "--max-tokens", "40"], input=lines)
    assert result.exit_code == 0, result.output
    return result.stdout


def prompts_of(folder: Path, engine: ScriptedEngine) -> list[str]:
    return [Tokenizer(folder).decode(request.token_ids.tolist()) for request in engine.requests]


def test_a_conversation_keeps_its_messages_until_reset(folder: Path, engine: ScriptedEngine) -> None:
    shown = talk("/system be brief\nthe water\nan oil\n/reset\nagain\n/nothing\n/exit\n")
    assert shown.count("was long 🙂") == 3 and "tokens/s" in shown and "unknown command /nothing" in shown
    first, second, third = prompts_of(folder, engine)
    assert "system\nbe brief" in first and "assistant\n" in first
    assert "the water" in second and "was long 🙂<|im_end|>" in second and "an oil" in second
    assert "the water" not in third and "be brief" in third


def test_control_characters_do_not_reach_the_terminal(folder: Path, engine: ScriptedEngine) -> None:
    tokenizer = Tokenizer(folder)
    engine.script = continue_with(tokenizer, "one\x1b[2J\x07 two\nthree")
    assert "one[2J two\nthree\n" in talk("the water\n")


def test_a_conversation_ends_with_its_input_and_survives_errors(folder: Path, engine: ScriptedEngine) -> None:
    shown = talk("word " * 300 + "\nthe water\n")
    assert "the model takes at most" in shown and shown.count("was long") == 1
    assert "word word" not in prompts_of(folder, engine)[-1]


def test_ctrl_c_stops_the_answer_and_keeps_its_text(folder: Path, engine: ScriptedEngine) -> None:
    tokenizer = Tokenizer(folder)
    engine.script = lambda prompt, copy: tokenizer.encode(["the water was long and"])[0].tolist()

    class Interrupted:
        async def wait(self) -> None:
            if engine.steps == 3:
                raise KeyboardInterrupt

    engine.pause = Interrupted()  # type: ignore[assignment]
    console = Console(file=io.StringIO(), width=80)
    conversation = Conversation(local_model(engine, folder), GenerationFields(), console)
    conversation._turn("hello")
    user, answer = conversation.messages
    assert user["content"] == "hello" and "the water was long and".startswith(answer["content"])
    assert engine.open == 0 and len(engine.cancelled) == 1
    engine.pause = None
    conversation._turn("more")
    assert len(conversation.messages) == 4


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_text_model(tmp_path / "bare", template=None)

    @contextmanager
    def opened(options: dict[str, Any], *, chat_template: str | None = None) -> Iterator[LocalModel]:
        yield local_model(ScriptedEngine(continue_with(Tokenizer(folder), "x")), folder, chat_template)

    monkeypatch.setattr(offline_open, "open_model", opened)
    assert "no chat template" in error_of("chat", "x")


def test_serve_checks_its_chat_template_before_it_starts() -> None:
    message = error_of("serve", "--device", "null", "--chat-template", "no-such-file")
    assert "neither a file nor a Jinja template" in message


def test_a_chat_template_is_a_text_a_file_or_a_name(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert ChatOptions(chat_template=str(file)).template == "{{ messages }}"
    assert ChatOptions(chat_template="{% raw %}").template == "{% raw %}"
    assert ChatOptions(chat_template="rag").template == "rag"
    assert ChatOptions().template is None

"""The command itself: light imports, one-line errors, exit codes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from penstock import __version__
from penstock.cli import main
from penstock.errors import BadValue, EngineUnavailable, ModelLoadError
from tests.cli.runs import invoke, run, spawn


def test_importing_the_command_line_imports_no_heavy_library() -> None:
    program = "import sys, penstock.cli.main; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {
        "torch",
        "pyarrow",
        "zmq",
        "numpy",
        "rich",
        "asyncio",
        "starlette",
        "tokenizers",
        "huggingface_hub",
        "transformers",
    }
    assert not heavy & set(ran.stdout.split())


def test_help_lists_every_command() -> None:
    ran = run("--help")
    assert ran.returncode == 0
    for command in (
        b"serve",
        b"embed",
        b"info",
        b"doctor",
        b"rerank",
        b"score",
        b"generate",
        b"chat",
        b"bench",
    ):
        assert command in ran.stdout


def test_version_is_printed() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"penstock {__version__}\n")


def test_unknown_commands_and_flags_are_usage_errors() -> None:
    assert invoke("embedd").exit_code == 2
    assert invoke("embed", "in.txt", "-o", "out.jsonl", "--no-such-flag").exit_code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadValue("a bad\nvalue"), 2),
        (ModelLoadError("a bad value"), 2),
        (EngineUnavailable("a bad value"), 1),
        (OSError(28, "No space left on device"), 1),
    ],
)
def test_expected_errors_are_one_line_and_an_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer(cls=main.Commands)

    @app.command()
    def fails() -> None:
        raise error

    app.callback()(lambda: None)
    with pytest.raises(SystemExit) as stopped:
        app(["fails"])
    assert stopped.value.code == code
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1


def test_ctrl_c_exits_with_130_and_no_traceback(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    process = spawn(
        "embed", "-", "--format", "text", "-o", output, "--device", "null", "--batch-rows", 1,
        stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(b"some text\n" * 200)  # more rows could follow
    process.stdin.flush()
    folder = tmp_path / "out.jsonl.parts"
    deadline_s = time.monotonic() + 120
    while not list(folder.glob("0*")):
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.01)
    process.send_signal(2)
    assert process.wait(timeout=120) == 130
    assert b"Traceback" not in process.stderr.read()
    process.stdin.close()
    process.stderr.close()
    assert not folder.exists()  # input from a pipe cannot be resumed

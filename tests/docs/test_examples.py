"""Every code block of README.md and docs/ that can run is run, and every command uses existing flags."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import app
from tests.command_line import get_command
from tests.docs.blocks import Block, blocks, pages, read_blocks
from tests.docs.stand_ins import STAND_INS

BLOCKS = blocks()
SERVER = "http://127.0.0.1:8000"
CODE = {"python", "bash"}
TEXT = {"", "text", "json", "yaml", "dockerfile", "mermaid"}


def runnable(language: str) -> list[Any]:
    chosen = [block for block in BLOCKS if block.language == language and block.not_run is None]
    return [pytest.param(block, id=block.name) for block in chosen]


@pytest.fixture
def with_address(url_of: Callable[[str | None], str]) -> Callable[[Block], str]:
    """Gives the code of a block, with the address of a running server."""

    def code(block: Block) -> str:
        return block.code.replace(SERVER, url_of(block.stand_in)) if SERVER in block.code else block.code

    return code


@pytest.mark.parametrize("block", runnable("python"))
def test_a_python_example_runs(
    block: Block,
    namespaces: dict[str, dict[str, Any]],
    with_address: Callable[[Block], str],
    folder_of: Callable[[str], Path],
) -> None:
    code = with_address(block)
    if block.stand_in is not None:
        code = re.sub(r'Engine\("[^"]+"', f'Engine("{folder_of(block.stand_in)}"', code)
        code = re.sub(r'"model": "[^"]+"', f'"model": "{folder_of(block.stand_in)}"', code)  # a draft model
    names = namespaces.setdefault(block.page, {"__name__": "__main__"})
    try:
        exec(compile(code, block.name, "exec"), names)
    finally:
        if (engine := names.pop("engine", None)) is not None and hasattr(engine, "spec"):
            engine.close() if hasattr(engine, "__enter__") else None


@pytest.fixture(scope="module")
def namespaces() -> dict[str, dict[str, Any]]:
    """The variables that the blocks of a page share, by page."""
    return {}


@pytest.mark.skipif(
    shutil.which("bash") is None or shutil.which("curl") is None, reason="needs bash and curl"
)
@pytest.mark.parametrize("block", runnable("bash"))
def test_a_shell_example_runs(
    block: Block,
    with_address: Callable[[Block], str],
    shell_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    code = with_address(block).replace("curl -s ", "curl -sS --fail-with-body ")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=tmp_path,
        env=shell_environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode != 0) == block.expects_failure, done.stdout + done.stderr


def commands() -> Iterator[tuple[str, str]]:
    """(where, command line) of every `penstock …` in a shell block or in the text."""
    for page in pages():
        for block in read_blocks(page):
            if block.language == "bash":
                text = re.sub(r"<<'END'.*?\nEND", "", block.code, flags=re.DOTALL).replace("\\\n", " ")
                for line in text.splitlines():
                    for found in re.findall(r"(?:^|\| |&& )(penstock .*)", line):
                        yield block.name, found
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for found in re.findall(r"`(penstock [^`]*)`", prose):
            if not re.search(r"[…\[\]]|\bCOMMAND\b|\\\|", found):
                yield page.name, found


@pytest.mark.parametrize(("where", "line"), sorted(set(commands())))
def test_a_command_has_flags_that_exist(where: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    for end in ("|", "||", "&&", ">", "&"):
        if end in words:
            words = words[: words.index(end)]
    command: Any = get_command(app)
    path = "penstock"
    while words and words[0] in getattr(command, "commands", {}):
        path += f" {words[0]}"
        command = command.commands[words.pop(0)]
    assert path != "penstock", f"{line} names no command"
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    given = [word.split("=", 1)[0] for word in words if re.match(r"--?[a-z]", word)]
    assert set(given) <= known, f"{path} has no {sorted(set(given) - known)}"


def test_every_block_says_what_it_is() -> None:
    for block in BLOCKS:
        assert block.language in CODE | TEXT, f"{block.name} has the language {block.language!r}"
        assert block.stand_in is None or block.stand_in in STAND_INS, block.name


def test_most_examples_run() -> None:
    code = [block for block in BLOCKS if block.language in CODE]
    assert len([block for block in code if block.not_run is None]) > len(code) / 2


def test_no_page_installs_a_package_that_is_not_published() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"pip install '?penstock(\[|\b(?! @))", text), page.name

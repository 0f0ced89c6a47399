"""A grammar whose compilation crashes, stalls or exhausts its memory is refused. Nothing else is affected."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.errors import NotPossible
from penstock.inputs import grammar_sandbox
from penstock.inputs.grammar_sandbox import GrammarSandbox, GrammarTimeout, GrammarTooComplex
from penstock.types import Grammar
from tests.text_models import tokenizer_folder
from tests.waiting import PATIENCE_S, wait_until

pytest.importorskip("llguidance")
FINE = Grammar("regex", "a+b")
CHAIN = Grammar("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2900)) + 'r2900: "a"')
LARGE = Grammar("regex", "x" * 100_000)  # takes tens of megabytes and half a second


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder("byte bpe", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def sandbox(folder: Path) -> Iterator[GrammarSandbox]:
    with closing(GrammarSandbox(folder / "tokenizer.json", 500, [0])) as made:
        yield made


def check_is_usable(sandbox: GrammarSandbox) -> None:
    assert sandbox.check(FINE, PATIENCE_S).error == ""


def test_a_grammar_that_overflows_the_stack_is_too_complex(sandbox: GrammarSandbox) -> None:
    check_is_usable(sandbox)
    pid = process_id(sandbox)
    for _ in range(3):
        with pytest.raises(GrammarTooComplex):
            sandbox.check(CHAIN, PATIENCE_S)
        check_is_usable(sandbox)
    assert process_id(sandbox) == pid, "a crash must not cost the others a new process"


def test_a_grammar_that_needs_too_much_memory_is_too_complex(
    sandbox: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_sandbox, "MAX_BYTES", 16 << 20)
    with pytest.raises(GrammarTooComplex):
        sandbox.check(LARGE, PATIENCE_S)
    check_is_usable(sandbox)


def test_a_grammar_that_takes_too_long_times_out_and_others_do_not_wait_for_it(
    sandbox: GrammarSandbox,
) -> None:
    check_is_usable(sandbox)
    with pytest.raises(GrammarTimeout):
        sandbox.check(LARGE, 0.001)
    check_is_usable(sandbox)


def test_a_killed_process_is_replaced_and_no_grammar_is_blamed(sandbox: GrammarSandbox) -> None:
    check_is_usable(sandbox)
    pid = process_id(sandbox)
    os.kill(pid, signal.SIGKILL)
    check_is_usable(sandbox)
    assert process_id(sandbox) != pid


def test_grammars_are_checked_side_by_side(sandbox: GrammarSandbox) -> None:
    errors = {}

    def check(name: str, grammar: Grammar) -> None:
        errors[name] = sandbox.check(grammar, PATIENCE_S).error

    grammars = {"fine": FINE, "bad": Grammar("regex", "a(b"), "large": LARGE, "json": Grammar("json", "{}")}
    threads = [threading.Thread(target=check, args=item) for item in grammars.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors["bad"] and not any(errors[name] for name in ("fine", "large", "json"))


def test_closing_ends_the_process(sandbox: GrammarSandbox) -> None:
    check_is_usable(sandbox)
    pid = process_id(sandbox)
    sandbox.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_the_process_inherits_no_secrets_and_imports_nothing_from_the_working_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llguidance.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    with closing(GrammarSandbox(folder / "tokenizer.json", 500, [0])) as sandbox:
        check_is_usable(sandbox)
        assert b"secret" not in Path(f"/proc/{process_id(sandbox)}/environ").read_bytes()


def test_a_tokenizer_that_the_library_cannot_read_is_not_possible(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with (
        closing(GrammarSandbox(tmp_path / "tokenizer.json", 500, [0])) as sandbox,
        pytest.raises(NotPossible, match="tokenizer"),
    ):
        sandbox.check(FINE, PATIENCE_S)


def process_id(sandbox: GrammarSandbox) -> int:
    assert sandbox._process is not None
    return sandbox._process._popen.pid

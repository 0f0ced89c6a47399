"""Compiles grammars in a disposable process first, so that no grammar can crash, stall or fill the engine.

The library that compiles them recurses as deeply as a grammar nests, and overflows the stack of its process.
A grammar that compiles in the disposable process needs no more stack, time or memory in the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from signal import SIGALRM, SIGKILL, SIGXCPU
from typing import IO, Any

from penstock.errors import EngineUnavailable, NotPossible
from penstock.inputs.constraints import source
from penstock.isolation import isolated_python
from penstock.types import Grammar

STACK_BYTES = 4 << 20  # for compiling; the engine's threads have larger stacks
MAX_BYTES = 512 << 20  # for one grammar, beyond the vocabulary
MAX_MASK_S = 0.25  # CPU time of one mask, during which the engine would run no step
_START_S = 60.0
_GRACE_S = 5.0  # wait for an answer after the time limit, which the kernel enforces in the process
_SCRIPT = Path(__file__).with_name("grammar_worker.py")
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "LC_ALL")


class GrammarTimeout(Exception):
    """The grammar was not compiled within the time limit."""


class GrammarTooComplex(Exception):
    """Compiling the grammar crashed its process or exceeded the memory limit."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the process reports about a grammar that did not end it."""

    error: str  # empty if the grammar can be used
    num_bytes: int  # memory used for compiling
    lark: str = ""  # the grammar in Lark notation, if it came in GBNF


class _Died(Exception):
    pass


class GrammarSandbox:
    """Checks grammars over one vocabulary. Thread-safe.

    The process starts with the first grammar, and is replaced if it dies.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._setup = {
            "tokenizer_file": str(tokenizer_file.resolve()),
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
        }
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process without waiting for it."""
        self._running()

    def check(self, grammar: Grammar, max_s: float) -> Checked:
        """Compile the grammar in the process, and compute its first masks there."""
        body = {"gbnf": grammar.text} if grammar.kind == "gbnf" else {"source": source(grammar)}
        for _ in range(2):  # the process may have been killed for another reason, so try twice
            process = self._running()
            try:
                return process.check(body, max_s)
            except _Died:
                continue
        raise GrammarTooComplex

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _running(self) -> _Process:
        with self._lock:
            if self._is_closed:
                raise EngineUnavailable("the engine is stopping")
            if self._process is None or self._process.has_ended:
                self._process = _Process(self._setup)
            return self._process


class _Process:
    """One process, and the requests that it has not answered yet."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._popen = subprocess.Popen(
            isolated_python(str(_SCRIPT)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the library prints there when it crashes
            cwd="/",
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,  # ignores interrupts from the terminal
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._stdin: IO[bytes] = self._popen.stdin
        self._stdout: IO[bytes] = self._popen.stdout
        self._lock = threading.Lock()
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self._next_id = 0
        self._started: Future[dict[str, Any]] = Future()
        self.has_ended = False
        with contextlib.suppress(BrokenPipeError):
            self._write(setup)
        threading.Thread(target=self._read, name="penstock-grammar-sandbox", daemon=True).start()

    def check(self, body: dict[str, str], max_s: float) -> Checked:
        self._wait_for_start()
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self.has_ended:
                raise _Died
            self._next_id += 1
            self._answers[self._next_id] = answer
            limits = {"max_seconds": max_s, "max_bytes": MAX_BYTES, "stack_bytes": STACK_BYTES}
            request = {"id": self._next_id, "max_mask_seconds": MAX_MASK_S, **limits, **body}
            with contextlib.suppress(BrokenPipeError):  # `_read` reports the end
                self._write(request)
        try:
            found = answer.result(max_s + _GRACE_S)
        except FutureTimeout:
            self.close()
            raise GrammarTimeout from None
        if found["died"] in (SIGALRM, SIGXCPU):
            raise GrammarTimeout
        if found["died"] is not None:
            raise GrammarTooComplex
        return Checked(found["error"], found["num_bytes"], found.get("lark", ""))

    def close(self) -> None:
        """Kill the process and its forks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, SIGKILL)

    def _wait_for_start(self) -> None:
        try:
            error = self._started.result(_START_S)["error"]
        except (FutureTimeout, _Died):
            self.close()
            raise EngineUnavailable(
                "the process that checks grammars does not start; try again shortly"
            ) from None
        if error is not None:
            raise NotPossible(f"structured output cannot use this model's tokenizer: {error}")

    def _write(self, message: dict[str, Any]) -> None:
        self._stdin.write(json.dumps(message).encode() + b"\n")
        self._stdin.flush()

    def _read(self) -> None:
        """Deliver answers until the process ends, then fail all waiting requests."""
        for line in self._stdout:
            message = json.loads(line)
            if "id" not in message:
                self._started.set_result(message)
                continue
            with self._lock:
                answer = self._answers.pop(message["id"])
            answer.set_result(message)
        with self._lock:
            self.has_ended = True
            waiting, self._answers = self._answers, {}
        for answer in waiting.values():
            answer.set_exception(_Died())
        if not self._started.done():
            self._started.set_exception(_Died())
        self._popen.wait()
        self._stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

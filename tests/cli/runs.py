"""Runs the command line for tests, in this process or in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock.cli.main import app
from tests.command_line import CliRunner, Result

PROGRAM = [sys.executable, "-c", "from penstock.cli.main import main; main()"]
NULL = ("--device", "null")


def invoke(*args: object) -> Result:
    """Run a command in this process. Exceptions other than exits are re-raised."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def error_of(*args: object) -> str:
    """The one-line error that a command prints for wrong input."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("error: ").strip()


def spawn(*args: object, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*PROGRAM, *map(str, args)], **options)


def run(*args: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*PROGRAM, *map(str, args)], input=stdin, capture_output=True, timeout=120, check=False
    )


def peak_memory(*args: object) -> int:
    """Peak resident memory in bytes of a command, which must succeed."""
    process = spawn(*args, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_interrupted(signal_number: int, parts: int, *args: object) -> subprocess.CompletedProcess[bytes]:
    """Run `penstock embed`, which sends itself a signal after saving `parts` parts and computing one more."""
    command = [sys.executable, "-c", _SIGNALS_ITSELF, str(signal_number), str(parts), *map(str, args)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)


def run_killed(parts: int, *args: object) -> None:
    """Interrupt `penstock embed` with SIGKILL."""
    assert run_interrupted(signal.SIGKILL, parts, *args).returncode == -signal.SIGKILL


_SIGNALS_ITSELF = """
import os, sys
from penstock.cli.main import main
from penstock.jobs.parts import PartWriter
signal_number, parts, commit = int(sys.argv.pop(1)), int(sys.argv.pop(1)), PartWriter.commit
def counted(self, *args):
    global parts
    if parts == 0:
        os.kill(os.getpid(), signal_number)
    parts -= 1
    commit(self, *args)
PartWriter.commit = counted
main()
"""


def write_jsonl(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]

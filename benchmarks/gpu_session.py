"""Check and measure a tree on a GPU machine that is lent for minutes: parts by priority, within a limit.

    python benchmarks/gpu_session.py --models DIR --out DIR [--minutes 9] [--parts tests natural …]

DIR holds model folders (configuration and tokenizer; weights are random). A part starts only if its usual
time is left, and is stopped at the limit. Logs and tables are written to `--out`. Use `--parts` for parts
that an earlier call did not reach. With `--before`, another checkout and this one take turns running the
standard loads. `--list` shows the commands of all parts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TREE = HERE.parent
NUM_SHOWN_LINES = 25  # last lines of each log that are printed
STOP_S = 20.0  # time for a part to print its results after SIGTERM


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    minutes: float  # usual duration
    commands: tuple[str, ...]  # {models} and {out} are replaced
    needs_before: bool = False


LOADS_ONCE = "benchmarks/gpu_loads.py --models {models} --seconds 3"
LOADS = f"{LOADS_ONCE} --rounds 3"
PARTS = (
    Part("tests", 6.0, ("-m tests.gpu.run --jobs 6",)),
    Part("natural", 5.0, (f"{LOADS} --only ^natural --save {{out}}/natural.md",)),
    Part("chat", 6.0, (f"{LOADS} --only ^chat --save {{out}}/chat.md",)),
    Part("generation", 4.0, (f"{LOADS} --only ^gen --save {{out}}/generation.md",)),
    Part(
        "adapters",
        4.0,
        (
            "benchmarks/gpu_lora.py {models}/bge-base {models}/qwen3-embed-0.6b --rank 8 --targets default",
            "benchmarks/gpu_lora.py {models}/bge-base {models}/qwen3-embed-0.6b --rank 16 --targets all",
        ),
    ),
    Part(
        "fp8",
        1.5,
        ("benchmarks/gpu_few_rows.py --rows 16 64 128", "benchmarks/gpu_paged.py --dtype fp8 --rows 16,64"),
    ),
    Part("ramp", 3.0, ("benchmarks/gpu_ramp.py {models}/bge-base --seconds 9 --starts 2",)),
    Part("streams", 3.0, ("benchmarks/gpu_streams.py {models}/qwen3-4b --streams 16 64 --targets 0 14",)),
    Part(
        "speculation",
        2.0,
        ("benchmarks/speculative.py {models}/qwen3-4b --load-format dummy --acceptance 0.8 --prompt 1024",),
    ),
    Part("loading", 3.0, ("benchmarks/gpu_loading.py experts",)),
    Part("images", 3.0, ("benchmarks/gpu_images.py",)),
    Part("loads", 9.0, (f"{LOADS} --save {{out}}/loads.md",)),
    Part(
        "before",
        9.0,
        (
            f"{LOADS_ONCE} --save {{out}}/before-1.md",
            f"{LOADS_ONCE} --save {{out}}/now-1.md",
            f"{LOADS_ONCE} --save {{out}}/before-2.md",
            f"{LOADS_ONCE} --save {{out}}/now-2.md",
        ),
        needs_before=True,
    ),
)


class Session:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._ends_s = time.monotonic() + 60 * options.minutes

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def run(self, part: Part) -> str:
        """Run a part's commands one after another. Returns how it ended."""
        began = time.monotonic()
        log = Path(self._options.out) / f"{part.name}.log"
        for command in self.commands(part):
            tree = self._options.before if "/before-" in command else TREE
            status = self._run(command, Path(tree), log)
            if status != 0:
                return f"{'stopped' if status is None else f'exit {status}'}, see {log.name}"
        return f"done in {time.monotonic() - began:.0f} s"

    def commands(self, part: Part) -> list[str]:
        return [
            command.format(models=self._options.models, out=self._options.out) for command in part.commands
        ]

    def _run(self, command: str, tree: Path, log: Path) -> int | None:
        """Returns the exit status, or None if the command was stopped at the limit, after time to print its
        results. `tree` is also the working directory: `python -m` imports from there before PYTHONPATH."""
        environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"}
        words = [
            str(TREE / word) if word.startswith("benchmarks/") else word for word in shlex.split(command)
        ]
        with log.open("a") as file:
            file.write(f"$ python {command}\n")
            file.flush()
            process = subprocess.Popen(
                [sys.executable, *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=tree,
                env=environment,
                start_new_session=True,
            )
            try:
                return process.wait(max(self.left_s - STOP_S, 1.0))
            except subprocess.TimeoutExpired:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
            finally:  # kill its child processes too: the next part needs the whole device
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return None


def chosen_parts(options: argparse.Namespace) -> list[Part]:
    names = options.parts or [part.name for part in PARTS if options.before or not part.needs_before]
    found = {part.name: part for part in PARTS}
    if unknown := [name for name in names if name not in found]:
        raise SystemExit(f"no part is named {', '.join(unknown)}; there are {', '.join(found)}")
    for name in names:
        if found[name].needs_before and not options.before:
            raise SystemExit(f"the part {name} needs --before, a checkout to compare with")
    return [found[name] for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="DIR", help="directory of the model folders")
    parser.add_argument("--out", default="OUT", help="directory for logs and tables")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit for all parts together")
    parser.add_argument(
        "--parts", nargs="+", default=[], metavar="PART", help="parts to run; by default all, in order"
    )
    parser.add_argument("--before", default="", metavar="DIR", help="a checkout to compare with")
    parser.add_argument("--list", action="store_true", help="show the commands of all parts and exit")
    options = parser.parse_args()
    if options.list:
        session = Session(options)
        for part in PARTS:
            print(f"{part.name} (about {part.minutes:g} min)")
            print("".join(f"  python {command}\n" for command in session.commands(part)), end="")
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no part outlives this process
    parts = chosen_parts(options)
    for name in ("models", "out", "before"):  # a part may run in another directory
        if given := getattr(options, name):
            setattr(options, name, str(Path(given).resolve()))
    if options.before and not (Path(options.before) / "penstock").is_dir():
        raise SystemExit(f"--before: {options.before} is not a checkout")
    Path(options.out).mkdir(parents=True, exist_ok=True)
    session = Session(options)
    outcomes: dict[str, str] = {}
    for part in parts:
        if outcomes and session.left_s < 60 * part.minutes:
            outcomes[part.name] = "not begun"
            continue
        outcomes[part.name] = session.run(part)
        lines = (Path(options.out) / f"{part.name}.log").read_text(errors="replace").splitlines()
        print(
            "\n".join([f"== {part.name}: {outcomes[part.name]}", *lines[-NUM_SHOWN_LINES:], ""]), flush=True
        )
    print("\n".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    if left := [name for name, outcome in outcomes.items() if outcome == "not begun"]:
        print(f"continue with --parts {' '.join(left)}")


if __name__ == "__main__":
    main()

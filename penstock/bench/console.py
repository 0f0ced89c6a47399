"""Output of the bench commands: results on stdout, notes on stderr."""

from __future__ import annotations

import os
import sys

from penstock.config import available_cpus


def print_result(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_note(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")
    sys.stderr.flush()


def note_if_busy() -> None:
    """Note that other processes use this machine, because timings then vary."""
    load, cpus = os.getloadavg()[0], available_cpus()
    if load > cpus / 2:
        print_note(f"this machine is busy (load {load:.1f} on {cpus} cores): timings will vary")

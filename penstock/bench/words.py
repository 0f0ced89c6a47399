"""What the commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import os
import sys

from penstock.config import available_cpus


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")
    sys.stderr.flush()


def warn_if_busy() -> None:
    """Timings beside other work say little: tell who measures anyway."""
    load, cpus = os.getloadavg()[0], available_cpus()
    if load > cpus / 2:
        warn(f"other work is running here (load {load:.1f} on {cpus} cores): timings will scatter")

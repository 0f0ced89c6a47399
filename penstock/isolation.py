"""Starts other Python processes so that they import nothing from the working folder.

The working folder may be a downloaded model, and a file `json.py` in it would otherwise run. `PYTHONPATH` is
the user's own setting and still applies.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[1]  # the folder that holds the package


def isolated_python(*arguments: str) -> list[str]:
    """The command of a Python process with `arguments`."""
    return [sys.executable, "-P", *arguments]


def isolated_environment() -> dict[str, str]:
    """The environment for an isolated Python process. Processes that it starts inherit the isolation.

    Empty entries of `PYTHONPATH`, as in `PYTHONPATH=$PYTHONPATH:/opt/lib`, mean the working folder and are
    dropped. A checkout that is not installed may only be importable through the working folder, so its folder
    is added.
    """
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if _SOURCE.name not in ("site-packages", "dist-packages") and str(_SOURCE) not in paths:
        paths.append(str(_SOURCE))
    return os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}

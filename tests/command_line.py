"""The command line, built once in a process: building its hundreds of flags takes longer than its tests."""

from __future__ import annotations

from functools import cache

import typer.main
import typer.testing
from typer.testing import CliRunner, Result

__all__ = ["CliRunner", "Result", "get_command"]

get_command = cache(typer.main.get_command)
typer.testing._get_command = get_command  # by which CliRunner builds it for every invocation

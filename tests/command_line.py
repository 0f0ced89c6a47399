"""The command line, built once per process: building its hundreds of flags takes longer than the tests."""

from __future__ import annotations

from functools import cache

import typer.main
import typer.testing
from typer.testing import CliRunner, Result

__all__ = ["CliRunner", "Result", "get_command"]

get_command = cache(typer.main.get_command)
typer.testing._get_command = get_command  # otherwise CliRunner builds it for every invocation

"""A private PostgreSQL server with pgvector, for tests. It needs neither a network nor root."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def find_programs() -> Path | None:
    """The folder with initdb, pg_ctl and pg_config."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if installed:
        return installed[-1].parent
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


def why_missing() -> str | None:
    programs = find_programs()
    if programs is None:
        return "PostgreSQL is not installed"
    shown = subprocess.run(
        [programs / "pg_config", "--sharedir"], capture_output=True, text=True, check=False
    )
    if not Path(shown.stdout.strip(), "extension/vector.control").is_file():
        return "PostgreSQL has no pgvector; see docs/guides/vector-stores.md"
    return None


@contextmanager
def running_postgres() -> Iterator[str]:
    """Start a server for the duration of the context and yield its address, a socket in its own folder."""
    if (reason := why_missing()) is not None:
        pytest.skip(reason)
    programs = find_programs()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
    user = _server_user()
    if os.getuid() == 0:
        shutil.chown(folder, user)

    def run(program: str, *args: object) -> None:
        command = [str(programs / program), "-D", str(folder / "data"), *map(str, args)]
        account = {"user": user} if os.getuid() == 0 else {}
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=120, **account)

    try:
        run("initdb", "-A", "trust", "-U", "penstock", "-E", "UTF8", "--no-sync", "--locale=C.UTF-8")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off -c shared_buffers=16MB"
        run("pg_ctl", "-w", "-o", options, "-l", folder / "log", "start")
        try:
            yield f"postgresql://penstock@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _server_user() -> str:
    """A user for the server: PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return getpass.getuser()
    names = {account.pw_name for account in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)

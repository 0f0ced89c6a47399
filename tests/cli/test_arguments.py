"""Secrets on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.api.key_file import read_key_file
from penstock.cli.flags import api_keys, hang_timeout
from penstock.errors import ConfigError
from tests.waiting import PATIENCE_S

PROGRAM = """
import sys
from pathlib import Path
from penstock.cli.arguments import hide_arguments

hide_arguments(("--api-key", "--admin-key"))
print(sys.argv[1:], Path("/proc/self/cmdline").read_bytes().split(b"\\0")[3:])
"""


def test_a_secret_is_overwritten_wherever_it_is_an_argument() -> None:
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "--api-key",
        "secret",
        "--api_key=secret",
        "--admin-key=a,b",
        "é",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    shown = [b"--api-key", b"xxxxxx", b"--api_key=xxxxxx", b"--admin-key=xxx", "é".encode(), b""]
    assert ran.stdout == f"{command[3:]} {shown}\n"


@pytest.mark.parametrize("given", ["", " ", "two words", "clé", "a\nb", "a\tb", "sha256:12", ","])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--api-key.*(visible ASCII|64 hexadecimal)") as refused:
        api_keys([given])
    assert given.strip(" ,") == "" or given not in refused.value.message


def test_several_keys_stand_between_commas() -> None:
    assert api_keys(["old, new", "other"]) == ("old", "new", "other")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n \n# a comment\n", "has no key"),
        (b"good\nse cret\n", "line 2"),
        (b"\xff", "not text"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        read_key_file(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file("")  # for example from an unset variable
    assert "--api-key-file" in refused.value.message and "cret" not in refused.value.message


def test_a_hang_timeout_below_a_heartbeat_is_refused() -> None:
    assert hang_timeout(0) == 0 and hang_timeout(1) == 1
    with pytest.raises(ConfigError, match="at least 1 second, or 0 for never"):
        hang_timeout(0.5)

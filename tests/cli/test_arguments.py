"""Secrets on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.flags import api_key, api_key_file, hang_timeout
from penstock.errors import ConfigError

PROGRAM = """
import sys
from pathlib import Path
from penstock.cli.arguments import hide_argument

hide_argument(None)
hide_argument("secret")
print(sys.argv[1:], Path("/proc/self/cmdline").read_bytes().split(b"\\0")[3:])
"""


def test_a_secret_is_overwritten_wherever_it_is_an_argument() -> None:
    command = [sys.executable, "-c", PROGRAM, "--api-key", "secret", "--api-key=secret", "secretive", "é"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    shown = [b"--api-key", b"xxxxxx", b"--api-key=xxxxxx", b"secretive", "é".encode(), b""]
    assert ran.stdout == f"{command[3:]} {shown}\n"


@pytest.mark.parametrize("given", ["", " ", "two words", "clé", "a\nb", "tab\t"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(given: str) -> None:
    with pytest.raises(ConfigError, match="--api-key takes visible ASCII") as refused:
        api_key(given)
    assert given.strip() == "" or given not in refused.value.message


def test_a_file_has_one_key_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n\n  new \r\n")
    assert api_key_file(str(file)) == ("old", "new")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n \n", "has no key"),
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
        api_key_file(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        api_key_file("")  # for example the value of a variable that is not set
    assert "--api-key-file" in refused.value.message and "cret" not in refused.value.message


def test_a_hang_timeout_below_a_heartbeat_is_refused() -> None:
    assert hang_timeout(0) == 0 and hang_timeout(1) == 1
    with pytest.raises(ConfigError, match="at least 1 second, or 0 for never"):
        hang_timeout(0.5)

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.compare import turns
from penstock.bench.contenders import contenders_of
from penstock.bench.options import ClientOptions, CompareOptions
from penstock.cli.main import app
from penstock.errors import BadValue
from tests.bench.stub import stub
from tests.command_line import CliRunner

STUB = Path(__file__).with_name("stub.py")


def compare(prompts: Path, *args: object) -> Any:
    common = ["bench", "compare", "--dataset-name", "custom", "--dataset-path", str(prompts)]
    flags = ["--backend", "openai-embeddings", "--skip-chat-template", "--model", "m", "--num-processes", "1"]
    return CliRunner().invoke(app, common + flags + [str(arg) for arg in args])


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Reserve ports for servers that a test starts. A socket that does not listen holds each port, so that no
    other process gets it. The server can share it, because both set SO_REUSEADDR."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in held]


def test_the_slower_server_has_the_smaller_ratio(prompts: Path, tmp_path: Path) -> None:
    with stub() as fast, stub(delay_s=0.1) as slow:
        result = compare(
            prompts,
            *(
                "--server",
                f"fast={fast.url}",
                f"slow={slow.url}",
                "--server-backend",
                "slow=infinity-embeddings",
            ),
            *("--rounds", 2, "--num-prompts", 16, "--max-concurrency", 4),
            *("--save-result", "--result-dir", tmp_path, "--result-filename", "c.json"),
        )
        routes = {route for route, _ in slow.bodies}
    assert result.exit_code == 0, result.output
    ratio = re.search(r"req/s +([\d.]+) ×   from [\d.]+ to [\d.]+ over 2 rounds", result.stdout)
    assert ratio is not None
    assert float(ratio[1]) < 1
    assert routes == {"/embeddings"}
    saved = json.loads((tmp_path / "c.json").read_text())
    assert len(saved["ratios"]["slow"]["request_throughput"]) == 2
    assert [len(run["e2els"]) for run in saved["servers"]["fast"]["runs"]] == [16, 16]
    assert "Rounds" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize("alone", [True, False])
def test_servers_are_started_and_stopped_for_a_comparison(prompts: Path, alone: bool) -> None:
    flags: list[object] = ["--one-at-a-time"] if alone else []
    with reserved_ports(2) as ports:
        for name, port in zip("ab", ports, strict=True):
            flags += ["--server", f"{name}=http://127.0.0.1:{port}"]
            flags += ["--start", f"{name}={sys.executable} {STUB} {port}"]
        result = compare(prompts, *flags, "--rounds", 1, "--num-prompts", 5)
        assert result.exit_code == 0, result.output
        assert "a was ready after" in result.stderr
        for port in ports:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_error_quotes_a_server_that_does_not_start(prompts: Path) -> None:
    command = f"{sys.executable} -c \"raise SystemExit('no such flag')\""
    result = compare(
        prompts, "--server", "a=http://127.0.0.1:9", "b=http://127.0.0.1:10", "--start", f"a={command}"
    )
    assert result.exit_code == 2
    assert "a ended with status 1 before it was ready: no such flag" in result.stderr


def test_a_server_that_already_runs_is_not_started(prompts: Path) -> None:
    with stub() as server:
        flags = ("--server", f"a={server.url}", "b=http://127.0.0.1:10", "--start", "a=true")
        result = compare(prompts, *flags)
    assert result.exit_code == 2
    assert "answers at" in result.stderr


def test_every_second_round_is_reversed() -> None:
    options = CompareOptions(server=["a=http://127.0.0.1:1", "b=http://127.0.0.1:2"])
    order = [contender.name for _, contender in turns(contenders_of(ClientOptions(), options), 3)]
    assert order == ["a", "b", "b", "a", "a", "b"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"server": ["a=http://x"]}, "at least two"),
        ({"server": ["a=http://x", "a=http://y"]}, "twice"),
        ({"server": ["a", "b=http://y"]}, "NAME=VALUE"),
        ({"server": ["a=http://x", "b=http://y"], "start": ["c=run"]}, "no --server of that name"),
        ({"server": ["a=http://x", "b=http://y"], "server_backend": ["a=gopher"]}, "is unknown"),
        ({"server": ["a=http://x", "b=http://y"], "one_at_a_time": True}, "has no --start"),
    ],
)
def test_invalid_comparisons_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadValue, match=said):
        contenders_of(ClientOptions(), CompareOptions(**fields))

"""The reasons that clients get when an engine cannot be reached."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.api.state import engine_reason
from penstock.serving.launch import EngineState


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (EngineState("restarting", "the engine process was killed by SIGKILL"), "killed by SIGKILL"),
        (EngineState("running", "the engine is running"), "the engine is not connected"),
        (None, "the engine is not running"),
    ],
)
def test_a_refusal_never_says_that_the_engine_runs(
    tmp_path: Path, state: EngineState | None, reason: str
) -> None:
    if state is not None:
        (tmp_path / "state").write_bytes(msgspec.json.encode(state))
    assert reason in engine_reason(tmp_path / "state")

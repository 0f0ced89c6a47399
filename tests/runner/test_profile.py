from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock import Engine
from penstock.errors import ConfigError
from penstock.runner.profile import WARM_UP_STEPS, ProfiledRunner


def names_in(trace: Path) -> list[str]:
    return [str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"]]


def test_a_trace_holds_the_steps_after_the_warm_up_steps(tmp_path: Path) -> None:
    with (
        Engine(device="cpu") as plain,
        Engine(device="cpu", profile=str(tmp_path), profile_steps=3) as engine,
    ):
        runner = engine.local.engine.core.runner
        assert isinstance(runner, ProfiledRunner)
        for number in range(WARM_UP_STEPS):
            engine.embed([f"warm {number}"])
        assert not list(tmp_path.iterdir())
        for number in range(4):
            np.testing.assert_allclose(
                engine.embed([f"text {number}"]), plain.embed([f"text {number}"]), atol=1e-6
            )
        (trace,) = tmp_path.iterdir()
        names = names_in(trace)
        assert sum(name.startswith("step: 1 rows") for name in names) >= 3
        assert any("linear" in name for name in names), "the step thread is in it"
        engine.embed(["not in a window"])
        runner.profile_again()
        for number in range(3):
            engine.embed([f"again {number}"])
        assert len(list(tmp_path.iterdir())) == 2


def test_close_writes_a_window_that_is_still_open(tmp_path: Path) -> None:
    with Engine(device="cpu", profile=str(tmp_path / "new"), profile_steps=100) as engine:
        runner = engine.local.engine.core.runner
        assert isinstance(runner, ProfiledRunner)
        runner.profile_again()
        engine.embed(["a"])
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_a_profile_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="profile"):
        Engine(device="cpu", profile=str(tmp_path / "file" / "sub"))


def test_the_runner_is_not_wrapped_without_the_profile_option() -> None:
    with Engine(device="cpu") as engine:
        assert not isinstance(engine.local.engine.core.runner, ProfiledRunner)

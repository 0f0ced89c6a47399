"""Gates: files by which a test holds a server's engine on the null device, instead of keeping it busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_until

HOOKS = Path(__file__).parent / "hooks"


class Gates:
    """Gate files for an engine. A closed gate holds launched steps, the next launch, or an engine's start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a server whose engine polls these gates."""
        path = os.pathsep.join([str(HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        return os.environ | {"PYTHONPATH": path, "PENSTOCK_TEST_GATES": str(self.folder)}

    @contextmanager
    def no_step_finishes(self) -> Iterator[None]:
        """Keep every step in flight. The engine still handles deadlines, cancellations and new requests."""
        with self._closed("steps"):
            yield

    @contextmanager
    def no_engine_starts(self) -> Iterator[None]:
        with self._closed("start"):
            yield

    @contextmanager
    def no_launch_returns(self) -> Iterator[None]:
        """Block the engine's loop in its next launch, as a graph capture does."""
        with self._closed("launches"):
            yield

    @contextmanager
    def engines_crash_at_start(self) -> Iterator[None]:
        """Make every engine process raise an exception while it loads the model."""
        with self._closed("crash-at-start"):
            yield

    def finish_one_step(self) -> None:
        """Let one step pass the closed gate."""
        permit = self.folder / "permit"
        permit.touch()
        wait_until(lambda: not permit.exists())

    def fail_next_step(self, message: str) -> None:
        """Make the next launch fail as if the device were lost."""
        (self.folder / "device-failure").write_text(message)

    @contextmanager
    def _closed(self, name: str) -> Iterator[None]:
        gate = self.folder / name
        gate.touch()
        try:
            yield
        finally:
            gate.unlink()

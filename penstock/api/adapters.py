"""The LoRA adapters of a served model, and how a request chooses one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.serving.launch import AdapterLaunch


def _nobody(adapter: ServedAdapter) -> None:
    """Do nothing after the last request of an adapter."""


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """An adapter that requests may choose. It counts them: engines keep an adapter until the last is done."""

    launch: AdapterLaunch
    num_users: int = 0
    is_retired: bool = False  # no further request gets it
    on_unused: Callable[[ServedAdapter], None] = _nobody  # called once, after it was retired

    @property
    def name(self) -> str:
        return self.launch.name

    @property
    def id(self) -> int:
        return self.launch.id

    @property
    def digest(self) -> bytes:
        """What the keys of cached results begin with: its id and the content of its files."""
        return f"{self.id}:{self.launch.digest}:".encode()

    def enter(self) -> None:
        self.num_users += 1

    def leave(self) -> None:
        self.num_users -= 1
        self._report()

    def retire(self, on_unused: Callable[[ServedAdapter], None]) -> None:
        """Give it to no further request; `on_unused` is called when the last one is done, perhaps at once."""
        self.is_retired, self.on_unused = True, on_unused
        self._report()

    def _report(self) -> None:
        if self.is_retired and self.num_users == 0:
            on_unused, self.on_unused = self.on_unused, _nobody
            on_unused(self)


Adapters = dict[str, ServedAdapter]


def updated(
    present: Adapters, wanted: Sequence[AdapterLaunch], on_unused: Callable[[ServedAdapter], None]
) -> Adapters:
    """The adapters of a new table. Those that it no longer has are retired."""
    by_id = {each.id: each for each in present.values()}
    kept = {each.name: by_id.get(each.id) or ServedAdapter(each) for each in wanted}
    for gone in by_id.keys() - {each.id for each in wanted}:
        by_id[gone].retire(on_unused)
    return kept

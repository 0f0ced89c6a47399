"""The LoRA adapters of a served model, and how a request chooses one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.serving.launch import AdapterLaunch


def _nobody(adapter: ServedAdapter) -> None:
    """Do nothing after the last request of an adapter."""


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """An adapter that requests may choose. Counts its users: engines keep it until the last one is done."""

    launch: AdapterLaunch
    num_users: int = 0
    is_retired: bool = False  # new requests cannot choose it
    on_unused: Callable[[ServedAdapter], None] = _nobody  # called once, when it is retired and has no users

    @property
    def name(self) -> str:
        return self.launch.name

    @property
    def id(self) -> int:
        return self.launch.id

    @property
    def digest(self) -> bytes:
        """The prefix of the keys of cached results: the adapter's id and the digest of its files."""
        return f"{self.id}:{self.launch.digest}:".encode()

    def enter(self) -> None:
        self.num_users += 1

    def leave(self) -> None:
        self.num_users -= 1
        self._report()

    def retire(self, on_unused: Callable[[ServedAdapter], None]) -> None:
        """Refuse new users. Calls `on_unused` when the last user is done, which may be immediately."""
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
    """The adapters of a new table. Retires present adapters that the table does not contain."""
    by_id = {each.id: each for each in present.values()}
    kept = {each.name: by_id.get(each.id) or ServedAdapter(each) for each in wanted}
    for gone in by_id.keys() - {each.id for each in wanted}:
        by_id[gone].retire(on_unused)
    return kept
